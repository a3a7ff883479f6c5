# SPDX-License-Identifier: Apache-2.0
"""Several tiers on the same directories, as the ranks and processes of one machine have them."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest

from kvcache.storage.tier import ClearScope, PutOutcome
from kvcache.storage.tiers.disk import ledger, store, watch
from kvcache.storage.tiers.disk.folder import Folder
from kvcache.storage.tiers.disk.names import LAYOUT, ObjectName
from tests.storage.crash import disk as crash
from tests.storage.disk_rigs import Rig, file_of, files, put, put_all, used


def test_each_sees_what_the_other_stores_and_removes(tmp_path: Path) -> None:
    rig = Rig()
    one, other = rig.open(tmp_path), rig.open(tmp_path)
    objects = rig.chain(12)
    keys = [obj.key for obj in objects]
    put_all(one, objects)
    rig.check(other, keys)
    assert put(other, objects) == [PutOutcome.PRESENT] * 12
    other.remove(keys[5:]).result(30)
    assert [size is not None for size in one.head(keys).result(0)] == 5 * [True] + 7 * [False]
    put_all(other, objects[5:])
    rig.check(one, keys)
    assert one.stats().used_bytes == other.stats().used_bytes == used(tmp_path)
    assert one.clear(ClearScope()).result(30).objects == 12
    assert other.head(keys).result(0) == [None] * 12
    assert one.stats().used_bytes == other.stats().used_bytes == used(tmp_path) == 0
    one.close()
    other.close()


def test_capacity_holds_for_all_together(tmp_path: Path) -> None:
    ranks = [Rig(rank=rank) for rank in range(3)]
    capacity = 40 * ranks[0].object_bytes
    tiers = [rig.open(tmp_path, capacity=capacity) for rig in ranks]
    most = 0
    done = threading.Event()

    def watch_it() -> None:
        nonlocal most
        while not done.is_set():
            total = 0
            for file in (tmp_path / LAYOUT).iterdir():
                try:
                    total += file.stat().st_size if file.name != "ledger" else 0
                except FileNotFoundError:
                    continue
            most = max(most, total)

    def work(rank: int) -> None:
        for _ in range(12):
            put_all(tiers[rank], ranks[rank].chain(4))

    watcher = threading.Thread(target=watch_it)
    watcher.start()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    done.set()
    watcher.join()
    # A listing is no snapshot: what leaves and what comes may both be in it, a window of each rank at most.
    assert most <= capacity + 3 * 4 * ranks[0].object_bytes
    assert used(tmp_path) == capacity
    for rig, tier in zip(ranks, tiers, strict=True):
        assert tier.stats().used_bytes == capacity
        assert tier.stats().objects == 40
        keys = list(rig.payloads)
        there = [key for key, size in zip(keys, tier.head(keys).result(0), strict=True) if size]
        rig.check(tier, there)
    for tier in tiers:
        tier.close()


def test_the_same_object_is_written_once_by_many_tiers(tmp_path: Path) -> None:
    rig = Rig()
    tiers = [rig.open(tmp_path / "a", tmp_path / "b") for _ in range(4)]
    objects = rig.objects(40)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda tier: put(tier, objects), tiers))
    for column in zip(*answers, strict=True):
        assert Counter(column) == {PutOutcome.STORED: 1, PutOutcome.PRESENT: 3}
    for tier in tiers:
        rig.check(tier, [obj.key for obj in objects])
        tier.close()


def test_what_another_uses_does_not_leave_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "TOUCH_AFTER_S", 0.0)
    monkeypatch.setattr("kvcache.storage.tiers.disk.reader.TOUCH_AFTER_S", 0.0)
    rig = Rig()
    capacity = 40 * rig.object_bytes
    one, other = rig.open(tmp_path, capacity=capacity), rig.open(tmp_path, capacity=capacity)
    objects = rig.objects(40)
    put_all(one, objects)
    for obj in objects:  # as if that were long ago
        os.utime(file_of(tmp_path, obj.key), (1e9, 1e9))
    for entry in (one._store.catalog.get(obj.key.to_bytes()) for obj in objects):
        assert entry is not None
        entry.touched = 1e9
    rig.check(other, [obj.key for obj in objects[:10]])
    put_all(one, rig.objects(20))
    there = [size is not None for size in one.head([obj.key for obj in objects]).result(0)]
    assert there[:10] == 10 * [True]
    assert there[10:].count(False) == 20
    one.close()
    other.close()


def test_changes_are_found_without_notification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a user has as many inotify instances as the system allows, folders are listed again."""

    def none_left(folder: int) -> None:
        raise OSError(errno.EMFILE, "inotify: Too many open files")

    rig = Rig()
    one = rig.open(tmp_path)
    monkeypatch.setattr("kvcache.storage.tiers.disk.folder.Watch", none_left)
    other = rig.open(tmp_path)
    objects = rig.objects(9)
    keys = [obj.key for obj in objects]
    put_all(one, objects)
    _until(lambda: None not in other.head(keys).result(0))
    rig.check(other, keys)
    one.remove(keys[:4]).result(30)
    assert rig.read(other, keys)[:4] == [None] * 4
    _until(lambda: other.stats().objects == 5)
    assert put(other, objects[:6]) == 4 * [PutOutcome.STORED] + 2 * [PutOutcome.PRESENT]
    put_all(one, more := rig.objects(3))
    # Not known yet, perhaps, and not written again.
    assert put(other, more) == [PutOutcome.PRESENT] * 3
    assert used(tmp_path) == 12 * rig.object_bytes
    one.close()
    other.close()


def test_lost_notifications_are_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    one, other = rig.open(tmp_path), rig.open(tmp_path)
    objects = rig.objects(6)
    put_all(one, objects[:3])
    rig.check(other, [obj.key for obj in objects[:3]])
    with monkeypatch.context() as patch:
        patch.setattr(watch.Watch, "changes", lambda self: watch.Changes([], lost=True, gone=False))
        put_all(one, objects[3:])
        one.remove([objects[0].key]).result(30)
        other.head([]).result(0)
        other.remove([]).result(30)
    keys = [obj.key for obj in objects]
    assert [size is not None for size in other.head(keys).result(0)] == [False] + 5 * [True]
    rig.check(other, keys[1:])
    one.close()
    other.close()


def test_part_of_the_dead_goes_and_that_of_the_living_counts(tmp_path: Path) -> None:
    rig = Rig()
    rig.open(tmp_path).close()
    dead, alive = (ObjectName.of(rig.object()) for _ in range(2))
    folder = tmp_path / LAYOUT
    (folder / dead.part).write_bytes(b"half")
    with (folder / alive.part).open("wb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        tier = rig.open(tmp_path)
        assert not (folder / dead.part).exists()
        assert (folder / alive.part).exists()
        totals = _totals(tmp_path)
        assert (totals.num_bytes, totals.objects) == (rig.object_bytes, 0)
    tier.close()


def test_object_whose_writer_died_is_written_by_the_next(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path)
    obj = rig.object()
    part = tmp_path / LAYOUT / ObjectName.of(obj).part
    with part.open("wb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        assert put(tier, [obj]) == [PutOutcome.PRESENT]
    put_all(tier, [obj])
    rig.check(tier, [obj.key])
    assert not part.exists()
    tier.close()


def test_room_that_the_dead_have_taken_is_found_again(tmp_path: Path) -> None:
    rig = Rig()
    capacity = 40 * rig.object_bytes
    tier = rig.open(tmp_path, capacity=capacity)
    put_all(tier, kept := rig.objects(20))
    folder = Folder(str(tmp_path))
    with folder.section() as section:  # another process claims half of the room, and dies
        claims = [section.claim(ObjectName.of(rig.object()), direct=False) for _ in range(20)]
    for claim in claims:
        assert claim is not None
        claim.close()
    put_all(tier, new := rig.objects(20))
    rig.check(tier, [obj.key for obj in (*kept, *new)])
    assert tier.stats().evictions == 0
    assert _totals(tmp_path).num_bytes == used(tmp_path) == capacity
    tier.close()


def test_sums_of_a_section_that_nobody_ended_are_counted_anew(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path)
    put_all(tier, rig.objects(5))
    file = tmp_path / LAYOUT / ledger.FILE
    begun = bytearray(file.read_bytes())
    begun[8] = 1  # somebody was killed in a section
    begun[16:24] = (12345).to_bytes(8, "little")
    file.write_bytes(begun)
    put_all(tier, rig.objects(1))
    totals = _totals(tmp_path)
    assert (totals.num_bytes, totals.objects) == (used(tmp_path), 6) == (6 * rig.object_bytes, 6)
    tier.close()


@pytest.mark.parametrize("content", [b"", b"short", bytes(48), b"\xff" * 100])
def test_ledger_that_is_none_is_made_anew(tmp_path: Path, content: bytes) -> None:
    rig = Rig()
    tier = rig.open(tmp_path)
    put_all(tier, rig.objects(3))
    (tmp_path / LAYOUT / ledger.FILE).write_bytes(content)
    put_all(tier, rig.objects(2))
    assert (_totals(tmp_path).num_bytes, _totals(tmp_path).objects) == (5 * rig.object_bytes, 5)
    tier.close()


def test_ledger_that_was_removed_is_everybodys_again(tmp_path: Path) -> None:
    rig = Rig()
    one, other = rig.open(tmp_path), rig.open(tmp_path)
    put_all(one, rig.objects(3))
    (tmp_path / LAYOUT / ledger.FILE).unlink()
    put_all(one, rig.objects(2))
    put_all(other, rig.objects(4))
    assert (_totals(tmp_path).num_bytes, _totals(tmp_path).objects) == (9 * rig.object_bytes, 9)
    one.close()
    other.close()


def test_stopped_process_that_holds_the_lock_costs_its_time_once_and_no_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "LOCK_TIMEOUT_S", 0.05)
    rig = Rig()
    tier = rig.open(tmp_path)
    put_all(tier, objects := rig.objects(3))
    with (tmp_path / LAYOUT / ledger.FILE).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert put(tier, rig.objects(2)) == [PutOutcome.FAILED] * 2
        rig.check(tier, [obj.key for obj in objects])
        health = tier.health()
        assert (health.state, health.readable) == ("DiskBusy", True)
        assert "look for a stopped process that uses it" in health.detail
        assert not tier.clear(ClearScope()).result(30).complete
    tier.close()


def test_half_written_object_is_nobodys(tmp_path: Path) -> None:
    rig = Rig()
    writer, reader = rig.open(tmp_path), rig.open(tmp_path)
    obj = rig.object()
    folder = Folder(str(tmp_path))
    with folder.section() as section:
        claim = section.claim(ObjectName.of(obj), direct=False)
    assert claim is not None
    os.write(claim.fd, bytes(8192))
    for tier in (writer, reader):
        assert rig.read(tier, [obj.key]) == [None]
        assert put(tier, [obj]) == [PutOutcome.PRESENT]
    claim.close()
    put_all(reader, [obj])
    rig.check(writer, [obj.key])
    assert len(files(tmp_path)) == 1
    writer.close()
    reader.close()


def _totals(place: Path) -> ledger.Totals:
    with Folder(str(place)).section() as section:
        return section.totals


def _until(holds: object) -> None:
    """Waits for what a job in the background does."""
    assert callable(holds)
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def _store(place: str, seed: int, answers: SimpleQueue[list[str]]) -> None:
    """In a process of its own: stores the objects that the seed makes."""
    tier = Rig().open(Path(place))
    rng = random.Random(seed)
    outcomes = put(tier, [crash.make(rng, 0, bytes(16)) for _ in range(60)])
    tier.close()
    answers.put([outcome.name for outcome in outcomes])


def test_processes_store_the_same_once_and_read_each_others(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.storage.crash.disk"])
    reader = Rig().open(tmp_path)
    queues: list[SimpleQueue[list[str]]] = [context.SimpleQueue() for _ in range(2)]
    processes = [context.Process(target=_store, args=(str(tmp_path), 5, queue)) for queue in queues]
    for process in processes:
        process.start()
    answers = [queue.get() for queue in queues]
    for process in processes:
        process.join()
    for column in zip(*answers, strict=True):
        assert sorted(column) == ["PRESENT", "STORED"]
    rng = random.Random(5)
    objects = [crash.make(rng, 0, bytes(16)) for _ in range(60)]
    got = Rig().read(reader, [obj.key for obj in objects])
    assert got == [bytes(obj.payload) for obj in objects]
    assert len(files(tmp_path)) == reader.stats().objects == 60
    assert reader.stats().used_bytes == used(tmp_path)
    reader.close()
