# SPDX-License-Identifier: Apache-2.0
"""The disk tier within its bytes: what leaves when it is full, what stays, and what is not let in."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
import torch

from kvcache.config.tiers import AdmissionName, EvictionName
from kvcache.memory.formats import KVShape
from kvcache.storage.policies import ADMISSIONS, AdmissionPolicy
from kvcache.storage.tier import PutOutcome
from kvcache.storage.tiers.disk.names import file_bytes
from kvcache.tokens.keys import CacheEngineKey
from tests.storage.disk_rigs import Rig, file_of, files, put, put_all, used


def test_capacity_is_kept_to_the_byte(tmp_path: Path) -> None:
    rig = Rig()
    capacity = 1 << 20
    tier = rig.open(tmp_path, capacity=capacity)
    rng = random.Random(rig.seed)
    seen: list[CacheEngineKey] = []
    for _ in range(30):
        objects = [rig.object(rng.randint(1, 64)) for _ in range(rng.randint(1, 12))]
        put_all(tier, objects)
        seen += [obj.key for obj in objects]
        stats = tier.stats()
        assert stats.used_bytes == used(tmp_path) <= capacity
        there = [key for key, size in zip(seen, tier.head(seen).result(0), strict=True) if size]
        assert len(there) == stats.objects == len(files(tmp_path))
        assert stats.evictions == len(seen) - len(there)
    # It is full: no object of the largest size fits beside the others.
    assert used(tmp_path) > capacity - rig.object_bytes
    tier.close()


def test_object_that_fills_it_exactly_fits_and_one_byte_less_is_too_little(tmp_path: Path) -> None:
    shape = KVShape(1, 2, 2032, torch.uint8, 258)  # 4,064 bytes a token
    rig = Rig(shape=shape)
    size = file_bytes(shape.chunk_bytes)
    tier = rig.open(tmp_path / "fits", capacity=size)
    first, second = rig.objects(2)
    put_all(tier, [first])
    put_all(tier, [second])
    assert tier.stats().used_bytes == used(tmp_path / "fits") == size
    rig.check(tier, [second.key])
    tier.close()
    with pytest.raises(ValueError, match=f"a chunk of 258 tokens takes {size}; raise it"):
        rig.open(tmp_path / "small", capacity=size - 1024)


def test_least_recently_used_leaves_first(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path, capacity=34 * rig.object_bytes)
    objects = rig.objects(34)
    for obj in objects:
        put_all(tier, [obj])
    rig.check(tier, [obj.key for obj in objects[:10]])  # used once more
    put_all(tier, rig.objects(20))
    there = tier.head([obj.key for obj in objects]).result(0)
    assert [size is not None for size in there] == 10 * [True] + 20 * [False] + 4 * [True]
    tier.close()


@pytest.mark.parametrize("restart", [False, True])
def test_chains_are_given_up_from_their_ends(tmp_path: Path, restart: bool) -> None:
    rig = Rig()
    capacity = 40 * rig.object_bytes
    tier = rig.open(tmp_path, capacity=capacity)
    chains = [rig.chain(8) for _ in range(5)]
    for chain in chains:
        put_all(tier, chain)
    if restart:
        tier.close()
        tier = rig.open(tmp_path, capacity=capacity)
    for obj in rig.objects(23):
        put_all(tier, [obj])
        for chain in chains:
            there = [size is not None for size in tier.head([link.key for link in chain]).result(0)]
            assert there == sorted(there, reverse=True)
    tier.close()


def test_use_counts_after_a_restart(tmp_path: Path) -> None:
    """The order is made anew from the times of the files."""
    rig = Rig()
    capacity = 40 * rig.object_bytes
    tier = rig.open(tmp_path, capacity=capacity)
    objects = rig.objects(40)
    put_all(tier, objects)
    tier.close()
    for age, obj in enumerate(rig.rng.sample(objects, len(objects))):
        file = file_of(tmp_path, obj.key)
        os.utime(file, (1e9 + age, 1e9 + age))
    oldest = sorted(objects, key=lambda obj: file_of(tmp_path, obj.key).stat().st_mtime)
    tier = rig.open(tmp_path, capacity=capacity)
    put_all(tier, rig.objects(15))
    there = tier.head([obj.key for obj in oldest]).result(0)
    assert [size is not None for size in there] == 15 * [False] + 25 * [True]
    tier.close()


def test_pinned_objects_stay_and_their_twins_of_other_ranks_too(tmp_path: Path) -> None:
    rig, other = Rig(), Rig(rank=1)
    objects = rig.objects(6)
    pinned = {obj.key for obj in objects[:3]}
    capacity = 40 * rig.object_bytes
    tier = rig.open(tmp_path, capacity=capacity, pinned=pinned.__contains__)
    peer = other.open(tmp_path, capacity=capacity)
    twins = [obj._replace(key=obj.key._replace(rank=1)) for obj in objects]
    put_all(tier, objects)
    put_all(peer, twins)
    for obj in rig.objects(60):
        put_all(tier, [obj])
    there = tier.head([obj.key for obj in (*objects, *twins)]).result(0)
    assert [size is not None for size in there] == 2 * (3 * [True] + 3 * [False])
    tier.close()
    peer.close()


def test_no_room_among_pinned_objects_is_declined(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path, capacity=35 * rig.object_bytes, pinned=lambda key: True)
    put_all(tier, rig.objects(35))
    assert put(tier, rig.objects(2)) == [PutOutcome.DECLINED] * 2
    assert tier.stats().rejected == 2
    assert tier.stats().used_bytes == used(tmp_path) == 35 * rig.object_bytes
    tier.close()


def test_tenant_gives_up_its_own_objects_first(tmp_path: Path) -> None:
    rig = Rig()
    small, free = b"s" * 16, b"f" * 16
    quota = {small: 4 * rig.object_bytes}
    tier = rig.open(tmp_path, quota=quota.get)
    put_all(tier, others := rig.objects(5, tenant=free))
    for obj in (mine := rig.objects(9, tenant=small)):
        put_all(tier, [obj])
    there = tier.head([obj.key for obj in mine]).result(0)
    assert [size is not None for size in there] == 5 * [False] + 4 * [True]
    rig.check(tier, [obj.key for obj in others])
    quota[small] = rig.object_bytes - 1
    assert put(tier, [rig.object(tenant=small)]) == [PutOutcome.DECLINED]
    quota[small] = 2 * rig.object_bytes  # lowered: it gives up what is too much when it comes again
    put_all(tier, last := rig.objects(1, tenant=small))
    left = [obj for obj in (*mine, *last) if tier.head([obj.key]).result(0)[0]]
    assert left == [mine[-1], *last]
    tier.close()
    again = rig.open(tmp_path, quota=quota.get)
    put_all(again, new := rig.objects(1, tenant=small))
    assert sum(again.head([obj.key]).result(0)[0] is not None for obj in (*left, *new)) == 2
    again.close()


class _OnlyAgain(AdmissionPolicy[bytes]):
    """Lets in what was seen before."""

    def __init__(self, capacity: int) -> None:
        self.count: Counter[bytes] = Counter()

    def seen(self, key: bytes) -> None:
        self.count[key] += 1

    def admits(self, key: bytes, victim: bytes | None) -> bool:
        return self.count[key] > 1


def test_admission_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADMISSIONS, "SecondUse", _OnlyAgain)
    rig = Rig()
    tier = rig.open(tmp_path, capacity=35 * rig.object_bytes, admission="SecondUse")
    objects = rig.objects(40)
    assert put(tier, objects) == [PutOutcome.DECLINED] * 40
    assert used(tmp_path) == 0
    put_all(tier, objects[:35])
    before = set(files(tmp_path))
    assert put(tier, rig.objects(3)) == [PutOutcome.DECLINED] * 3  # nobody leaves for what is not let in
    assert set(files(tmp_path)) == before
    put_all(tier, objects[35:])
    assert tier.stats().used_bytes == used(tmp_path) == 35 * rig.object_bytes
    tier.close()


@pytest.mark.parametrize("eviction", get_args(EvictionName))
@pytest.mark.parametrize("admission", get_args(AdmissionName))
def test_all_policies_keep_the_capacity(tmp_path: Path, eviction: str, admission: str) -> None:
    rig = Rig()
    capacity = 35 * rig.object_bytes
    tier = rig.open(tmp_path, capacity=capacity, eviction=eviction, admission=admission)
    objects = [obj for _ in range(12) for obj in rig.chain(rig.rng.randint(1, 8))]
    for _ in range(12):
        batch = rig.rng.sample(objects, 12)
        assert set(put(tier, batch)) <= {PutOutcome.STORED, PutOutcome.PRESENT, PutOutcome.DECLINED}
        keys = [obj.key for obj in rig.rng.sample(objects, 10)]
        got = rig.read(tier, keys)
        assert all(payload in (None, rig.payloads[key]) for key, payload in zip(keys, got, strict=True))
        assert tier.stats().used_bytes == used(tmp_path) <= capacity
    assert tier.stats().objects == len(files(tmp_path)) > 0
    tier.close()


def test_objects_of_other_models_count_and_can_leave(tmp_path: Path) -> None:
    old = Rig(namespace=b"another model..!", shape=KVShape(2, 1, 900, torch.float32, 32))
    tier = old.open(tmp_path, capacity=2 << 20)
    put_all(tier, old.objects(8))
    tier.close()
    rig = Rig()
    tier = rig.open(tmp_path, capacity=2 << 20)
    assert tier.stats().used_bytes == used(tmp_path) == 8 * old.object_bytes
    put_all(tier, new := rig.objects(40))
    assert tier.stats().used_bytes == used(tmp_path) <= 2 << 20
    rig.check(tier, [obj.key for obj in new])
    assert tier.stats().evictions > 0
    tier.close()
