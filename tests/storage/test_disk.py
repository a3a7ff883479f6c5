# SPDX-License-Identifier: Apache-2.0
"""The disk tier in one process: what is put is there, to the byte."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.config.tiers import DiskTierConfig
from kvcache.memory.formats import KVShape
from kvcache.storage.changes import ChangeLog
from kvcache.storage.tier import ClearScope, PutOutcome, StoredObject, WantedObject
from kvcache.storage.tiers.disk import engine as disk_engine
from kvcache.storage.tiers.disk.names import (
    LAYOUT,
    PART_SUFFIX,
    SUFFIX,
    ObjectName,
    file_bytes,
    parse_name,
    sum_of_files,
)
from kvcache.tokens.keys import CacheEngineKey
from tests.storage.disk_rigs import NAMESPACE, SHAPE, Rig, aligned, file_of, files, put, put_all, used

ENGINES = ["Threads"] if disk_engine.uring_unavailable() else ["Uring", "Threads"]
digests = st.binary(min_size=16, max_size=16)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("direct_io", ["Auto", "Disabled"])
def test_what_is_put_is_there_also_after_a_restart(
    tmp_path: Path, engine: Literal["Uring", "Threads"], direct_io: Literal["Auto", "Disabled"]
) -> None:
    rig = Rig()
    objects = [
        *rig.chain(30),
        *(rig.object(n) for n in (1, 2, 33, 63)),
        rig.object(shift=8),
        rig.object(7, shift=1),
    ]
    keys = [obj.key for obj in objects]
    tier = rig.open(tmp_path, engine=engine, direct_io=direct_io)
    assert tier.engine == engine
    assert tier.head(keys).result(0) == [None] * len(keys)
    put_all(tier, objects)
    rig.check(tier, keys)
    assert rig.read(tier, keys, shift=24) == [rig.payloads[key] for key in keys]
    stats = tier.stats()
    assert (stats.state, stats.objects, stats.leases) == ("Ready", len(keys), 0)
    assert stats.used_bytes == used(tmp_path) == sum(file_bytes(obj.payload.nbytes) for obj in objects)
    assert stats.write_bytes == sum(obj.payload.nbytes for obj in objects)
    assert stats.read_bytes == 2 * stats.write_bytes
    assert stats.hit_tokens == 2 * sum(obj.num_tokens for obj in objects)
    tier.close()
    again = rig.open(tmp_path)
    rig.check(again, keys)
    assert again.stats().used_bytes == used(tmp_path)
    again.close()


def test_other_shapes(tmp_path: Path) -> None:
    for number, shape in enumerate(
        (
            KVShape(1, 1, 1, torch.uint8, 3),
            KVShape(2, 1, 576, torch.float8_e4m3fn, 64),
            KVShape(4, 2, 256, torch.float32, 16),
        )
    ):
        rig = Rig(shape=shape)
        tier = rig.open(tmp_path / str(number), capacity=8 << 20)
        objects = [rig.object(n) for n in range(1, shape.chunk_tokens + 1)]
        put_all(tier, objects)
        rig.check(tier, [obj.key for obj in objects])
        assert tier.stats().used_bytes == used(tmp_path / str(number))
        tier.close()


def test_second_put_is_told_that_it_is_there(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path)
    objects = rig.objects(5)
    twice = [*objects, *objects]
    outcomes = Counter(put(tier, twice))
    assert outcomes == {PutOutcome.STORED: 5, PutOutcome.PRESENT: 5}
    assert put(tier, objects) == [PutOutcome.PRESENT] * 5
    assert len(files(tmp_path)) == 5
    tier.close()


def test_many_threads_that_store_the_same_write_it_once(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path)
    objects = rig.objects(24)
    gate = threading.Barrier(6)

    def store(number: int) -> list[PutOutcome]:
        mine = random.Random(number).sample(objects, len(objects))
        gate.wait()
        by_key = dict(zip((obj.key for obj in mine), put(tier, mine), strict=True))
        return [by_key[obj.key] for obj in objects]

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(store, range(6)))
    for column in zip(*answers, strict=True):
        assert Counter(column) == {PutOutcome.STORED: 1, PutOutcome.PRESENT: 5}
    rig.check(tier, [obj.key for obj in objects])
    assert tier.stats().used_bytes == used(tmp_path)
    tier.close()


def test_target_of_another_size_gets_nothing(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path)
    obj = rig.object(10)
    put_all(tier, [obj])
    size = obj.payload.nbytes
    targets = [aligned(size - 480), aligned(size + 480), aligned(size)]
    answers = tier.get([WantedObject(obj.key, target) for target in targets]).result(30)
    assert answers == [False, False, True]
    assert bytes(targets[0]) == bytes(size - 480)
    tier.close()


def test_memory_behind_a_payload_does_not_get_to_the_disk(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path)
    memory = aligned(3 * 4096)
    memory[:] = b"\xaa" * len(memory)  # the neighbour's bytes go on after ours
    size = 5 * SHAPE.token_bytes
    key = CacheEngineKey(b"k" * 16, NAMESPACE, 0)
    put_all(tier, [StoredObject(key, 5, memory[:size].toreadonly())])
    content = file_of(tmp_path, key).read_bytes()
    assert content[4096 : 4096 + size] == b"\xaa" * size
    assert not content[4096 + size :].strip(b"\0")
    assert len(content) == file_bytes(size)
    tier.close()


@given(
    st.builds(CacheEngineKey, digests, digests, st.integers(0, 65535), st.integers(0, 65535)),
    digests,
    digests,
    st.integers(1, 2**32 - 1),
    st.integers(1, 100_000),
)
def test_names_say_all(key: CacheEngineKey, parent: bytes, tenant: bytes, tokens: int, size: int) -> None:
    name = ObjectName.of(StoredObject(key, tokens, memoryview(bytes(size)), tenant, parent))
    raw = parse_name(name.file)
    assert raw is not None
    again = ObjectName(raw)
    assert again == name
    assert (again.key, again.parent, again.tenant) == (key, parent, tenant)
    assert (again.num_tokens, again.payload_bytes) == (tokens, size)
    assert again.parent_key_bytes == key._replace(chunk_hash=parent).to_bytes()
    assert parse_name(name.part, PART_SUFFIX) == raw
    assert len(name.file) < 255  # what file systems take
    assert sum_of_files([raw, raw]) == 2 * name.file_bytes == 2 * (4096 + -(-size // 4096) * 4096)


@pytest.mark.parametrize(
    "change", ["upper", "short", "long", "space", "zero", "huge", "tail", "suffix", "letters"]
)
def test_other_names_are_nobodys(change: str) -> None:
    rng = random.Random()
    raw = rng.randbytes(68) + (7).to_bytes(4, "little") + (4096).to_bytes(8, "little") + bytes(4)
    good = raw.hex()
    assert parse_name(good + SUFFIX) == raw
    bad = {
        "upper": "AB" + good[2:],
        "short": good[:-2],
        "long": good + "00",
        "space": good[:10] + "  " + good[12:],
        "zero": good[:144] + bytes(8).hex() + good[160:],
        "huge": good[:144] + b"\xff".hex() * 8 + good[160:],
        "tail": good[:-1] + "1",
        "suffix": good,
        "letters": "xy" + good[2:],
    }[change]
    assert parse_name(bad + ("" if change == "suffix" else SUFFIX)) is None


def test_directories_share_the_objects_and_the_capacity(tmp_path: Path) -> None:
    rig = Rig()
    directories = [tmp_path / name for name in "abc"]
    capacity = 90 * rig.object_bytes
    tier = rig.open(*directories, capacity=capacity)
    objects = rig.objects(90)
    put_all(tier, objects)
    shares = [len(files(directory)) for directory in directories]
    assert sum(shares) == 90
    assert min(shares) > 10
    put_all(tier, rig.objects(30))
    assert tier.stats().used_bytes == used(*directories) == capacity
    tier.close()
    again = rig.open(*reversed(directories), capacity=capacity)  # the order of the names does not matter
    there = [obj.key for obj in objects if again.head([obj.key]).result(0)[0]]
    assert len(there) == 60
    rig.check(again, there)
    again.close()


def test_removed_objects_are_gone(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path)
    objects = rig.objects(6)
    put_all(tier, objects)
    keys = [obj.key for obj in objects]
    assert tier.remove([*keys[:4], CacheEngineKey(bytes(16), NAMESPACE, 0)]).result(30) == 4
    assert [size is not None for size in tier.head(keys).result(0)] == 4 * [False] + 2 * [True]
    assert tier.stats().used_bytes == used(tmp_path) == 2 * rig.object_bytes
    put_all(tier, objects[:4])
    rig.check(tier, keys)
    tier.close()


def test_clear_removes_what_is_in_the_scope(tmp_path: Path) -> None:
    rig, other = Rig(), Rig(namespace=b"another model..!")
    red, blue = b"r" * 16, b"b" * 16
    reds, blues, others = (
        rig.objects(4, tenant=red),
        rig.objects(5, tenant=blue),
        other.objects(3, tenant=red),
    )
    pinned = {reds[0].key, blues[0].key}
    tier = rig.open(tmp_path, pinned=pinned.__contains__)
    put_all(tier, [*reds, *blues, *others])
    everything = [*reds, *blues, *others]

    def left() -> list[StoredObject]:
        answers = tier.head([obj.key for obj in everything]).result(0)
        return [obj for obj, size in zip(everything, answers, strict=True) if size is not None]

    size = reds[0].payload.nbytes
    assert tier.clear(ClearScope(tenant=red, namespace=NAMESPACE)).result(30) == (3, 3 * size, 1, True, "")
    assert left() == [reds[0], *blues, *others]
    assert tier.clear(ClearScope(keys={blues[1].key, blues[0].key})).result(30) == (1, size, 1, True, "")
    assert left() == [reds[0], blues[0], *blues[2:], *others]
    assert tier.clear(ClearScope(namespace=other.namespace)).result(30).objects == 3
    assert tier.clear(ClearScope()).result(30) == (3, 3 * size, 2, True, "")
    assert left() == [reds[0], blues[0]]
    assert tier.clear(ClearScope(pinned_too=True)).result(30).objects == 2
    assert used(tmp_path) == tier.stats().used_bytes == 0
    tier.close()


def test_clear_catches_what_is_still_to_be_written(tmp_path: Path) -> None:
    """Of what was handed over before the clearing began, nothing is there after it."""
    rig = Rig()
    tier = rig.open(tmp_path)
    for _ in range(10):
        before, after = rig.objects(64), rig.objects(16)
        first = tier.put(before)
        cleared = tier.clear(ClearScope())
        second = tier.put(after)
        assert cleared.result(30).complete
        outcomes = {*first.result(30), *second.result(30)}  # the second may be seen to or not
        assert outcomes <= {PutOutcome.STORED, PutOutcome.DECLINED}
        assert tier.head([obj.key for obj in before]).result(0) == [None] * 64
        assert tier.stats().used_bytes == used(tmp_path)
        put_all(tier, third := rig.objects(2))
        rig.check(tier, [obj.key for obj in third])
    tier.close()


def test_what_is_none_of_ours_is_left_alone(tmp_path: Path) -> None:
    """Files of others, and folders of older and newer layouts: not read, not counted, not touched."""
    rig = Rig()
    old = tmp_path / "kvcache-objects-v0"
    old.mkdir()
    rest = old / ("00" * 84 + SUFFIX)
    rest.write_bytes(b"an older layout")
    (tmp_path / LAYOUT).mkdir()
    note = tmp_path / LAYOUT / "README"
    note.write_text("by hand")
    tier = rig.open(tmp_path, capacity=1 << 20)
    assert tier.stats().used_bytes == tier.stats().objects == 0
    for obj in rig.objects(60):
        put_all(tier, [obj])
    tier.clear(ClearScope(pinned_too=True)).result(30)
    assert rest.read_bytes() == b"an older layout"
    assert note.read_text() == "by hand"
    tier.close()


def test_lowered_capacity_holds_after_the_restart(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path)
    objects = rig.chain(60)
    for obj in objects:
        put_all(tier, [obj])
    tier.close()
    tier = rig.open(tmp_path, capacity=40 * rig.object_bytes)
    tier.remove([]).result(30)  # behind what is done at the start
    assert tier.stats().used_bytes == used(tmp_path) == 40 * rig.object_bytes
    rig.check(tier, [obj.key for obj in objects[:40]])
    tier.close()


def test_capacity_and_policies_change_while_it_runs(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path, capacity=60 * rig.object_bytes)
    objects = rig.objects(60)
    for obj in objects:
        put_all(tier, [obj])
    rig.check(tier, [obj.key for obj in objects[:10]])

    def change(capacity: int, **config: str) -> set[str]:
        given = {"directories": [str(tmp_path)], "capacity": f"{capacity / 1024}Ki", **config}
        done = set(tier.adapt(DiskTierConfig.model_validate(given)))
        tier.remove([]).result(30)  # behind what follows from it
        return done

    assert change(40 * rig.object_bytes) == {"capacity", "eviction", "admission"}
    assert tier.stats().used_bytes == used(tmp_path) == tier.stats().capacity_bytes == 40 * rig.object_bytes
    there = [size is not None for size in tier.head([obj.key for obj in objects]).result(0)]
    assert there == 10 * [True] + 20 * [False] + 30 * [True]
    change(40 * rig.object_bytes, eviction="MRU", admission="SecondUse")
    newcomer = rig.object()
    assert put(tier, [newcomer]) == [PutOutcome.DECLINED]
    put_all(tier, [newcomer])
    there = [size is not None for size in tier.head([obj.key for obj in objects]).result(0)]
    assert there[30:] == 30 * [True]
    assert there[:10].count(False) == 1  # one of those used last
    tier.close()


def test_changes_are_noted(tmp_path: Path) -> None:
    rig, other, log = Rig(), Rig(rank=1), ChangeLog()
    tier = rig.open(tmp_path, capacity=35 * rig.object_bytes, changes=log)
    peer = other.open(tmp_path, capacity=35 * rig.object_bytes)
    objects = rig.objects(40)
    put_all(tier, objects[:35])
    put_all(peer, [other.object()])
    tier.head([]).result(0)
    taken = log.take()
    assert taken is not None
    stored = [change.chunk_hash for change in taken.changes if change.stored]
    assert sorted(stored) == sorted(obj.key.chunk_hash for obj in objects[:35])
    assert [change.stored for change in taken.changes].count(False) == 1
    assert {change.tier for change in taken.changes} == {"disk"}
    gone = {change.chunk_hash for change in taken.changes if not change.stored}
    tier.close()
    again = rig.open(tmp_path, capacity=35 * rig.object_bytes, changes=log)
    again.remove([]).result(30)  # behind what is done at the start
    taken = log.take()
    assert taken is not None
    assert {change.chunk_hash for change in taken.changes if change.stored} == set(stored) - gone
    again.clear(ClearScope()).result(30)
    taken = log.take()
    assert taken is not None
    assert {change.chunk_hash for change in taken.changes if not change.stored} == set(stored) - gone
    assert log.take() is None
    again.close()
    peer.close()


def test_object_that_is_none_of_the_shape_is_refused_alone(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path)
    good, bad = rig.objects(2)
    outcomes = put(tier, [bad._replace(num_tokens=63), good, bad._replace(tenant=b"short", num_tokens=1)])
    assert outcomes == [PutOutcome.FAILED, PutOutcome.STORED, PutOutcome.FAILED]
    assert tier.failures == {"EncodeFailed": 2}
    assert tier.stats().used_bytes == used(tmp_path) == rig.object_bytes
    assert tier.health().ready
    tier.close()


def test_closed_tier_answers(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path)
    obj = rig.object()
    put_all(tier, [obj])
    tier.close()
    tier.close()
    assert tier.put([rig.object()]).result(0) == [PutOutcome.FAILED]
    assert tier.get([WantedObject(obj.key, aligned(obj.payload.nbytes))]).result(0) == [False]
    assert tier.head([obj.key]).result(0) == [None]
    assert tier.remove([obj.key]).result(0) == 0
    assert not tier.clear(ClearScope()).result(0).complete
    assert not tier.health().ready
    tier.stats()


def test_empty_calls(tmp_path: Path) -> None:
    tier = Rig().open(tmp_path)
    assert tier.put([]).result(0) == []
    assert tier.get([]).result(0) == []
    assert tier.head([]).result(0) == []
    assert tier.remove([]).result(30) == 0
    tier.close()


def test_configuration_that_cannot_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match=r"disk.directories: .*/a and .*/b are the same; name it once"):
        rig.open(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match=r"keys: cannot be read"):
        rig.open(tmp_path / "a", encryption_key_file=str(tmp_path / "keys"))
    monkeypatch.setattr(
        "kvcache.storage.tiers.disk.tier.uring_unavailable", lambda: "Function not implemented"
    )
    with pytest.raises(ValueError, match=r"disk.engine is Uring, and there is no io_uring \(Function not"):
        rig.open(tmp_path / "a", engine="Uring")
    tier = rig.open(tmp_path / "a")
    assert tier.engine == "Threads"
    tier.close()
    monkeypatch.setattr("kvcache.storage.tiers.disk.folder.Folder.direct_io", lambda self: False)
    with pytest.raises(ValueError, match=r"disk.direct_io is Enabled, and the file system of .* has none"):
        rig.open(tmp_path / "a", direct_io="Enabled")
