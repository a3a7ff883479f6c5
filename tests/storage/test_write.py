# SPDX-License-Identifier: Apache-2.0
"""Writing below: at once or when a chunk leaves, bounded, and never a byte that changed meanwhile."""

from __future__ import annotations

import pytest

from kvcache.storage import manager, write
from kvcache.storage.futures import done
from kvcache.storage.tier import NO_PARENT, ClearScope, Health, PutOutcome
from kvcache.storage.tiers.cpu import Outcome
from tests.storage.doubles import DoubleTier
from tests.storage.rigs import SHAPE, Rig, chain, payload_of


def check_below(tier: DoubleTier) -> None:
    for key, held in tier.objects.items():
        assert held.payload == payload_of(key)


def test_what_is_stored_is_written_through_to_all_tiers() -> None:
    disk, remote = DoubleTier(), DoubleTier("remote", indexed=False)
    rig = Rig([disk, remote], slots=24)
    keys = chain("a", 3)
    rig.store(keys, tenant=b"t" * 16)
    rig.work()
    assert rig.tier.stats().leases == 3
    disk.answer_all()
    assert rig.tier.stats().leases == 3, "the remote still reads them"
    remote.answer_all()
    for tier in (disk, remote):
        assert list(tier.objects) == keys
        check_below(tier)
        assert [held.tenant for held in tier.objects.values()] == [b"t" * 16] * 3
        assert [held.parent for held in tier.objects.values()] == [
            NO_PARENT,
            *(key.chunk_hash for key in keys[:2]),
        ]
    rig.check_clean()


def test_what_is_being_written_is_neither_evicted_nor_overwritten() -> None:
    disk = DoubleTier()
    rig = Rig([disk], slots=4)
    rig.store(chain("a", 1))
    rig.work()
    assert rig.store(chain("b", 4)) == [Outcome.RESERVED] * 3 + [Outcome.FULL]
    disk.answer_all()
    check_below(disk)
    rig.check_clean()


def test_what_does_not_fit_into_the_queue_is_dropped_with_all_behind_it() -> None:
    disk = DoubleTier()
    rig = Rig([disk], slots=32, lane={"write_queue_bytes": 3 * SHAPE.chunk_bytes})
    keys, other = chain("a", 6), chain("b", 1)
    rig.store(keys, last=4)
    rig.work()
    assert rig.storage.stats()[1].writes_dropped == 1
    disk.answer_all()
    rig.store(keys, first=4)
    rig.store(other)
    rig.work()
    disk.answer_all()
    assert rig.storage.stats()[1].writes_dropped == 3
    assert set(disk.objects) == {*keys[:3], *other}
    # A hit shows that it was worth it.
    rig.begin("r", keys)
    rig.work()
    disk.answer_all()
    assert set(disk.objects) == {*keys, *other}
    rig.storage.release("r")
    rig.check_clean()


def test_what_a_tier_declined_is_offered_again_when_it_is_hit() -> None:
    disk = DoubleTier()
    refuse = [True]
    disk.declines = lambda stored: refuse[0]
    rig = Rig([disk], slots=16)
    keys = chain("a", 2)
    rig.store(keys)
    rig.work()
    disk.answer_all()
    assert disk.objects == {}
    assert rig.storage.stats()[1].declined == 2
    refuse[0] = False
    rig.begin("r", keys)
    rig.work()
    disk.answer_all()
    assert list(disk.objects) == keys
    rig.begin("r", keys)
    rig.work()
    assert disk.calls == [], "it has them"
    rig.storage.release("r")
    rig.check_clean()


@pytest.mark.parametrize("how", ["failed", "raised", "misfit"])
def test_a_write_that_fails_is_counted_and_leaves_nothing(how: str) -> None:
    disk = DoubleTier()
    rig = Rig([disk])
    rig.store(chain("a", 1))
    rig.work()
    if how == "failed":
        disk.answer(well=False)
    elif how == "raised":
        disk.fail(RuntimeError("a tier must not"))
    else:
        disk.calls.pop().future.set_result([])
    assert rig.storage.stats()[1].write_failures == 1
    rig.check_clean()


def test_a_tier_that_raises_does_not_end_the_writer() -> None:
    class Raises(DoubleTier):
        def put(self, objects):  # type: ignore[no-untyped-def]
            raise OSError("not like this")

    disk = Raises()
    rig = Rig([disk])
    rig.store(chain("a", 2))
    rig.work()
    assert rig.storage.stats()[1].write_failures == 2
    rig.check_clean()


@pytest.mark.parametrize("mode", ["Through", "Back"])
def test_a_tier_that_is_down_is_not_asked_to_write(mode: str) -> None:
    remote = DoubleTier("remote")
    remote.state = Health("RemoteUnreachable", "start it")
    rig = Rig([remote], slots=4, write=mode)
    assert [rig.store(chain(f"{number}-", 1)) for number in range(9)] == [[Outcome.RESERVED]] * 9
    assert not rig.soon
    assert remote.calls == []
    stats = rig.storage.stats()[1]
    assert stats.write_failures == (9 if mode == "Through" else stats.write_failures) > 0
    remote.state = Health("Ready")
    rig.store(keys := chain("a", 1))
    rig.begin("r", keys)
    rig.work()
    remote.answer_all()
    assert mode == "Back" or list(remote.objects) == keys
    rig.storage.release("r")
    rig.check_clean()


def test_a_tier_that_is_down_is_not_offered_old_chunks() -> None:
    disk = DoubleTier()
    rig = Rig([disk], slots=16)
    keys = chain("a", 2)
    rig.store(keys)
    rig.work()
    disk.answer(well=False)
    disk.state = Health("DiskFull", "make room")
    rig.begin("r", keys)
    rig.work()
    assert disk.calls == []
    rig.storage.release("r")
    rig.check_clean()


# Write-back


def test_what_leaves_is_written_before_it_goes() -> None:
    disk = DoubleTier()
    rig = Rig([disk], slots=16, write="Back")
    first = chain("a", 15)
    rig.store(first)
    rig.work()
    assert disk.calls == []
    # The last chunk of the memory: another one is to leave ahead of the next need, the end of the chain.
    rig.store(chain("b", 1))
    rig.work()
    assert [call.size for call in disk.calls] == [1]
    assert rig.tier.lookup(first) == 15, "it can be hit until it is written"
    disk.answer_all()
    assert list(disk.objects) == first[-1:]
    assert rig.tier.lookup(first) == 14
    check_below(disk)
    assert rig.storage.stats()[1].writes_dropped == 0
    rig.check_clean()


def test_what_is_hit_while_it_leaves_stays() -> None:
    disk = DoubleTier()
    rig = Rig([disk], slots=16, write="Back")
    first = chain("a", 15)
    rig.store(first)
    rig.store(chain("b", 1))
    rig.work()
    assert rig.begin("r", first).chunks == 15
    disk.answer_all()
    assert rig.tier.lookup(first) == 15
    rig.storage.release("r")
    # It is below, and needs no other write when it leaves.
    rig.store(chain("c", 2))
    rig.work()
    disk.answer_all()
    assert [key for key in disk.objects if disk.objects[key].payload != payload_of(key)] == []
    rig.check_clean()


def test_where_writes_are_too_slow_chunks_go_unwritten_and_are_counted() -> None:
    disk = DoubleTier()
    rig = Rig([disk], slots=16, write="Back")
    for number in range(60):
        assert rig.store(chain(f"{number}-", 1)) == [Outcome.RESERVED]
    rig.work()
    assert rig.storage.stats()[1].writes_dropped == 60 - 16
    disk.answer_all()
    check_below(disk)
    rig.check_clean()


def test_whatever_comes_from_below_goes_without_a_write() -> None:
    disk = DoubleTier()
    rig = Rig([disk], slots=16, write="Back")
    keys = chain("a", 8)
    rig.below(disk, keys)
    rig.begin("r", keys)
    disk.answer_all()
    rig.storage.release("r")
    rig.store(chain("b", 16))
    rig.work()
    assert all(call.kind != "put" or call.size == 0 for call in disk.calls) or len(disk.objects) == 8
    disk.answer_all()
    assert rig.tier.lookup(keys) < 8
    rig.check_clean()


# The end


OWN_THREAD = {"run_soon": None}


def test_what_only_host_memory_has_is_written_at_the_end() -> None:
    disk = DoubleTier(prompt=True)
    rig = Rig([disk], slots=16, write="Back", manager=OWN_THREAD)
    rig.below(disk, below := chain("below", 2))
    rig.begin("r", below)
    rig.storage.release("r")
    keys = chain("a", 9)
    rig.store(keys)
    assert set(disk.objects) == set(below)
    rig.storage.close()
    assert set(disk.objects) == {*below, *keys}, "more than what may wait while it serves"
    check_below(disk)
    assert rig.storage.stats()[1].writes_dropped == 0


def test_another_ranks_chunks_are_not_written_at_the_end() -> None:
    disk = DoubleTier(prompt=True)
    rig = Rig([disk], slots=16, write="Back", manager={**OWN_THREAD, "writes_below": False})
    rig.store(chain("a", 3))
    rig.storage.close()
    assert disk.objects == {}


def test_the_newest_chains_are_written_first_each_from_its_start_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "BATCH_OBJECTS", 1)
    disk = DoubleTier(prompt=True)
    rig = Rig([disk], slots=32, write="Back", manager=OWN_THREAD)
    old, other, new = chain("old", 3), chain("other", 2), chain("new", 2)
    rig.store(old, last=2)
    rig.store(other)
    rig.store(new)
    rig.store(old, first=2)
    rig.storage.close()
    assert list(disk.objects) == [*old, *new, *other]


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_what_is_not_written_at_the_end_is_counted_and_logged(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(manager, "_LAST_WRITES_S", 0.05)
    monkeypatch.setattr(write, "BATCH_OBJECTS", 1)
    disk = DoubleTier()
    if how == "fails":
        disk.state = Health("DiskFull", "make room")
        monkeypatch.setattr(disk, "put", lambda objects: done([PutOutcome.FAILED] * len(objects)))
    rig = Rig([disk], slots=16, write="Back", manager=OWN_THREAD)
    keys = chain("a", 7)
    rig.store(keys)
    with caplog.at_level("WARNING", "vllm.kvcache"):
        rig.storage.close()
    assert disk.objects == {}
    stats = rig.storage.stats()[1]
    assert stats.writes_dropped + stats.write_failures == len(keys)
    state = "DiskFull" if how == "fails" else "Ready"
    assert f"7 chunks were not written to the tier disk ({state}) before the end" in caplog.text


# Clearing


def test_a_clear_waits_for_what_is_being_written() -> None:
    disk = DoubleTier()
    rig = Rig([disk], slots=16)
    keys = chain("a", 2)
    rig.store(keys)
    rig.work()
    cleared = rig.storage.clear(ClearScope())
    assert cleared["cpu"].result().kept == 2
    assert [call.kind for call in disk.calls] == ["put"]
    disk.answer("put")
    assert [call.kind for call in disk.calls] == ["clear"]
    disk.answer("clear")
    assert cleared["disk"].result().objects == 2
    assert disk.objects == {}
    rig.check_clean()


def test_what_waits_to_be_written_is_not_written_after_a_clear() -> None:
    disk = DoubleTier()
    rig = Rig([disk], slots=16)
    rig.store(chain("a", 2), tenant=b"t" * 16)
    rig.store(chain("b", 1))
    cleared = rig.storage.clear(ClearScope(tenant=b"t" * 16))
    disk.answer_all()
    rig.work()
    disk.answer_all()
    assert list(disk.objects) == chain("b", 1)
    assert cleared["disk"].done()
    rig.check_clean()


def test_a_tier_that_was_cleared_gets_what_is_hit_later() -> None:
    disk = DoubleTier(prompt=True)
    rig = Rig([disk], slots=16)
    keys = chain("a", 2)
    rig.store(keys)
    rig.work()
    assert list(disk.objects) == keys
    rig.storage.clear(ClearScope(), ["disk"])
    assert disk.objects == {}
    rig.begin("r", keys)
    rig.work()
    assert list(disk.objects) == keys
    rig.storage.release("r")
    rig.check_clean()


def test_a_tier_that_is_not_reached_says_so() -> None:
    disk = DoubleTier()
    rig = Rig([disk])
    cleared = rig.storage.clear(ClearScope(), ["disk", "nothing"])
    disk.answer(well=False)
    assert list(cleared) == ["disk"]
    assert not cleared["disk"].result().complete
    rig.check_clean()
