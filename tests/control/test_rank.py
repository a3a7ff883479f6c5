# SPDX-License-Identifier: Apache-2.0
"""What the admin sidecar has a real engine do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from kvcache.control.rank import RankControl
from kvcache.control.wire import FlushScope, Prefix
from kvcache.engine import LMCacheEngine
from kvcache.storage.lane import Lane
from kvcache.storage.manager import StorageManager
from kvcache.storage.pins import PinBook, PinRefusedError
from kvcache.storage.tenants import tenant_of
from kvcache.storage.tiers.cpu import CpuTier
from kvcache.tokens.database import ChunkedTokenDatabase
from tests.storage.doubles import DoubleTier
from tests.test_engine import CHUNK, Rig, make_rig

NAMESPACE = random.randbytes(16)


class Appliance:
    """An engine over a disk's double."""

    def __init__(self) -> None:
        rig: Rig = make_rig(chunks=40)
        plain = rig.tier()
        self.pins = PinBook(lambda: 6)
        self.disk = DoubleTier(prompt=True)
        self.rig = rig
        cpu = CpuTier(plain._allocator, plain._room._policy, 60.0, pinned=self.pins.pinned)
        soon: list[Any] = []
        self.soon = soon
        storage = StorageManager(cpu, [Lane(0, self.disk)], pins=self.pins, run_soon=soon.append)
        database = ChunkedTokenDatabase(CHUNK, NAMESPACE, 0)
        self.engine = LMCacheEngine(database, storage, rig.connector)
        self.control = RankControl(self.engine)

    def store(self, tokens: list[int], salt: str = "") -> None:
        chain = self.engine.database.chain(salt=salt)
        chain.extend(tokens)
        slots = self.rig.slots(len(tokens))
        self.engine.store(slot_mapping=slots, digests=bytes(chain.digests), tenant=tenant_of(salt))
        while self.soon:
            self.soon.pop(0)()

    def where(self, tokens: list[int], salt: str = "") -> list[tuple[str, int]]:
        located = self.control.locate(Prefix(tokens=tokens, salt=salt)).result(5)
        return [(part.tier, part.tokens) for part in located.parts]


@pytest.fixture
def appliance() -> Iterator[Appliance]:
    made = Appliance()
    yield made
    made.engine.close()


def prompt(chunks: int) -> list[int]:
    return [random.randrange(1000) for _ in range(chunks * CHUNK + 3)]


def test_where_a_prompt_lies(appliance: Appliance) -> None:
    tokens = prompt(4)
    appliance.store(tokens)
    assert appliance.where(tokens) == [("cpu", 4 * CHUNK)]
    keys = appliance.engine.database.keys(appliance.engine.database.hash_tokens(tokens))
    cpu = appliance.engine.storage.cpu
    for key in keys[2:]:
        cpu._room.remove(key)
    del appliance.disk.objects[keys[3]]
    assert appliance.where(tokens) == [("cpu", 2 * CHUNK), ("disk", CHUNK)]
    assert appliance.where(tokens, salt="other") == appliance.where(prompt(1)) == []
    assert cpu.stats().leases == 0


def test_a_flush_of_one_tenant(appliance: Appliance) -> None:
    tokens = prompt(3)
    for salt in ("a", "b", ""):
        appliance.store(tokens, salt)
    results = appliance.control.flush([], FlushScope(salt="a")).result(5)
    assert [(r.tier, r.complete, r.removed_objects) for r in results] == [("cpu", True, 3), ("disk", True, 3)]
    assert appliance.where(tokens, "a") == []
    assert appliance.where(tokens, "b") == appliance.where(tokens) == [("cpu", 3 * CHUNK)]
    results = appliance.control.flush(["disk"], FlushScope(salt="")).result(5)
    assert [(r.tier, r.removed_objects) for r in results] == [("disk", 3)]
    assert len(appliance.disk.objects) == 3


def test_a_flush_of_a_prompt_takes_what_continues_it(appliance: Appliance) -> None:
    trunk = prompt(2)[: 2 * CHUNK]
    first, second, other = trunk + prompt(1), trunk + prompt(2), prompt(2)
    for tokens in (first, second, other):
        appliance.store(tokens)
    results = appliance.control.flush([], FlushScope(prefix=Prefix(tokens=trunk))).result(5)
    assert [r.removed_objects for r in results] == [5, 5]
    assert appliance.where(first) == appliance.where(second) == []
    assert appliance.where(other) == [("cpu", 2 * CHUNK)]


def test_a_flush_of_other_namespaces_leaves_ours(appliance: Appliance) -> None:
    tokens = prompt(2)
    appliance.store(tokens)
    assert appliance.control.flush([], FlushScope(namespace=random.randbytes(16))).result(5)[0].complete
    assert appliance.control.flush([], FlushScope(own=True, namespace=bytes(16))).result(5) == []
    assert appliance.where(tokens) == [("cpu", 2 * CHUNK)]
    appliance.control.flush([], FlushScope(own=True)).result(5)
    assert appliance.where(tokens) == []


def test_pins_outlive_flushes_unless_forced(appliance: Appliance) -> None:
    tokens, other = prompt(3), prompt(1)
    assert appliance.control.pin("me", Prefix(tokens=tokens), check=True).chunks == 3
    assert appliance.control.pins().pins == []
    assert appliance.control.pin("me", Prefix(tokens=tokens), check=False).stored == 0
    appliance.store(tokens)
    appliance.store(other)
    assert appliance.control.pin("me", Prefix(tokens=tokens), check=False).stored == 3
    with pytest.raises(PinRefusedError, match="7 chunks would be pinned, at most 6"):
        appliance.control.pin("you", Prefix(tokens=prompt(4)), check=False)
    (cpu,) = appliance.control.flush(["cpu"], FlushScope()).result(5)
    assert (cpu.complete, cpu.removed_objects, cpu.kept_objects, cpu.reached) == (False, 1, 3, True)
    assert "3 objects stay" in cpu.reason
    assert [(pin.owner, pin.chunks) for pin in appliance.control.pins().pins] == [("me", 3)]
    (cpu,) = appliance.control.flush(["cpu"], FlushScope(force=True)).result(5)
    assert (cpu.complete, cpu.removed_objects) == (True, 3)
    assert appliance.control.unpin("me").chunks == 3
    assert appliance.control.unpin("me").chunks == 0


def test_a_tier_that_fails_is_reported(appliance: Appliance) -> None:
    appliance.disk.prompt = False
    clearing = appliance.control.flush([], FlushScope())
    assert not clearing.done()
    appliance.disk.answer(well=False)
    cpu, disk = clearing.result(5)
    assert cpu.complete
    assert (disk.complete, disk.reached, disk.reason) == (False, False, "not reached")
    clearing = appliance.control.flush(["disk"], FlushScope())
    appliance.disk.fail(OSError("pulled out"))
    (disk,) = clearing.result(5)
    assert (disk.complete, disk.reason) == (False, "pulled out")
