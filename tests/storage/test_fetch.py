# SPDX-License-Identifier: Apache-2.0
"""Lookups that go on in slower tiers: what comes when, and what happens when it does not."""

from __future__ import annotations

import pytest

from kvcache.storage.fetch import FIRST_HEADS, Standing
from kvcache.storage.tier import Health
from kvcache.storage.tiers.cpu import Outcome
from tests.storage.doubles import DoubleTier
from tests.storage.rigs import CHUNK, SHAPE, Rig, chain


def test_what_is_below_is_fetched_and_leased() -> None:
    disk = DoubleTier()
    rig = Rig([disk])
    keys = chain("a", 5)
    rig.store(keys, last=2)
    rig.work()
    disk.answer_all()
    rig.below(disk, keys[:4])
    assert rig.begin("r", keys) == Standing(2, 4, 2.0, 2, (("cpu", 2),))
    rig.check_leased("r", keys[:2])
    assert disk.answer("get") is not None
    assert rig.storage.standing("r") == Standing(4, 4, 2.0, 4, (("cpu", 2), ("disk", 2)))
    rig.check_leased("r", keys[:4])
    sources = rig.storage.hand_over("r", "loading")
    assert {key: lane.name for key, lane in sources.items()} == {keys[2]: "disk", keys[3]: "disk"}
    rig.check_leased("loading", keys[:4])
    rig.storage.release("loading")
    rig.check_clean()


def test_with_nothing_below_the_answer_is_final() -> None:
    disk, remote = DoubleTier(), DoubleTier("remote")
    rig = Rig([disk, remote])
    keys = chain("a", 40)
    assert rig.begin("r", keys).most == 0
    # Not asked for more than the first chunks: most of what is not there is not there from the start.
    assert [len(asked) for asked in disk.asked] == [FIRST_HEADS]
    assert not rig.storage._fetcher._searches
    rig.check_clean()


def test_host_memory_alone_asks_nobody() -> None:
    disk = DoubleTier()
    rig = Rig([disk])
    keys = chain("a", 3)
    rig.store(keys)
    assert rig.begin("r", keys) == Standing(3, 3, 0.0, 3)
    assert disk.asked == []
    rig.storage.release("r")
    rig.check_clean()


def test_a_remote_that_has_not_answered_may_have_all() -> None:
    remote = DoubleTier("remote", indexed=False)
    rig = Rig([remote], lane={"deadline_s": 1.5})
    keys = chain("a", 3)
    assert rig.begin("r", keys) == Standing(0, 3, 1.5)
    remote.answer("head")
    assert rig.storage.standing("r") == Standing(0, 0, 1.5)
    rig.storage.release("r")
    rig.check_clean()


def test_a_disk_is_read_while_a_remote_is_asked_for_the_rest() -> None:
    disk, remote = DoubleTier(), DoubleTier("remote", indexed=False)
    rig = Rig([disk, remote], slots=40)
    keys = chain("a", 6)
    rig.below(disk, keys[:2])
    rig.below(remote, keys[:5])
    assert rig.begin("r", keys).most == 6
    disk.answer("get")
    assert rig.storage.standing("r")[:2] == (2, 6)
    remote.answer("head")
    assert rig.storage.standing("r")[:2] == (2, 5)
    assert remote.asked == [keys[2:]]
    remote.answer("get")
    standing = rig.storage.standing("r")
    assert standing[:2] == (5, 5)
    assert standing.sources == (("disk", 2), ("remote", 3))
    # What came from the remote is written to the disk before it.
    rig.work()
    disk.answer_all("put")
    assert set(keys[:5]) == set(disk.objects)
    rig.storage.release("r")
    rig.check_clean()


def test_a_chunk_of_host_memory_behind_a_gap_is_kept_for_the_lookup() -> None:
    disk = DoubleTier()
    rig = Rig([disk], slots=3)
    keys = chain("a", 3)
    rig.store(keys, first=2)
    rig.below(disk, keys[:2])
    rig.work()
    assert rig.begin("r", keys)[:2] == (0, 3)
    disk.answer_all()
    assert rig.storage.standing("r").chunks == 3
    assert rig.store(chain("b", 1)) == [Outcome.FULL]
    rig.check_leased("r", keys)
    rig.storage.release("r")
    rig.check_clean()


@pytest.mark.parametrize("how", ["late", "failed", "raised"])
def test_what_does_not_come_makes_the_hit_shorter(how: str) -> None:
    disk = DoubleTier()
    rig = Rig([disk])
    keys = chain("a", 3)
    rig.store(keys, last=1)
    rig.below(disk, keys[1:])
    rig.work()
    assert rig.begin("r", keys)[:2] == (1, 3)
    if how == "failed":
        disk.answer("get", well=False)
    elif how == "raised":
        disk.calls[0], disk.calls[-1] = disk.calls[-1], disk.calls[0]
        disk.fail(RuntimeError("a tier must not"))
    standing = rig.storage.standing("r")
    assert standing[:2] == ((1, 3) if how == "late" else (1, 1))
    rig.storage.hand_over("r", "loading")
    rig.check_leased("loading", keys[:1])
    # It may come later, for others.
    rig.storage.release("loading")
    disk.answer_all()
    assert rig.tier.lookup(keys) == (3 if how == "late" else 1)
    rig.check_clean()


def test_a_chunk_is_fetched_once_for_all_who_wait() -> None:
    disk = DoubleTier()
    rig = Rig([disk])
    keys = chain("a", 4)
    rig.below(disk, keys)
    assert rig.begin("r", keys[:3]).most == 3
    assert rig.begin("s", keys).most == 4
    rig.storage.release("r")
    assert sorted(call.size for call in disk.calls if call.kind == "get") == [1, 3]
    disk.answer_all()
    assert rig.storage.standing("s").chunks == 4
    rig.check_leased("s", keys)
    assert rig.tier.leased(keys, "r") == []
    rig.storage.release("s")
    rig.check_clean()


def test_what_nobody_waits_for_any_more_is_not_begun() -> None:
    disk = DoubleTier()
    rig = Rig([disk], slots=400)
    keys = chain("a", 400)
    rig.below(disk, keys)
    assert rig.begin("r", keys).most == 400
    begun = sum(call.size for call in disk.calls)
    assert begun < 400
    rig.storage.release("r")
    disk.answer_all()
    assert sum(key in rig.tier for key in keys) == begun
    rig.check_clean()


def test_only_what_host_memory_has_room_for_is_fetched() -> None:
    disk = DoubleTier()
    rig = Rig([disk], slots=4)
    other, keys = chain("other", 1), chain("a", 6)
    rig.store(other)
    assert rig.begin("holds", other).chunks == 1
    rig.below(disk, keys)
    assert rig.begin("r", keys)[:2] == (0, 3)
    disk.answer_all()
    rig.work()
    disk.answer_all()
    rig.check_leased("r", keys[:3])
    for owner in ("r", "holds"):
        rig.storage.release(owner)
    rig.check_clean()


def test_a_chunk_that_is_computed_meanwhile_is_not_waited_for() -> None:
    disk = DoubleTier()
    rig = Rig([disk])
    keys = chain("a", 1)
    rig.below(disk, keys)
    assert rig.begin("r", keys)[:2] == (0, 1)
    assert rig.store(keys) == [Outcome.RESERVED]
    assert rig.storage.standing("r").chunks == 1
    rig.check_leased("r", keys)
    disk.answer("get", well=False)  # garbage into memory that nobody sees
    rig.check_leased("r", keys)
    rig.storage.release("r")
    rig.check_clean()


def test_a_tier_that_hangs_costs_its_deadline_once() -> None:
    remote = DoubleTier("remote", indexed=False)
    rig = Rig([remote], lane={"deadline_s": 1.0})
    assert rig.begin("r", chain("a", 2)).most == 2
    rig.clock.now += 1.01
    assert rig.begin("s", chain("b", 2)).most == 0
    assert rig.storage.stats()[1].state == "Stalled"
    remote.answer_all()
    assert rig.storage.stats()[1].state == "Ready"
    assert rig.begin("t", chain("c", 2)).most == 2
    for owner in "rst":
        rig.storage.release(owner)
    rig.check_clean()


def test_a_slow_tier_that_answers_is_not_given_up() -> None:
    disk = DoubleTier()
    rig = Rig([disk], slots=200, lane={"deadline_s": 1.0})
    keys = chain("a", 200)
    rig.below(disk, keys)
    rig.begin("r", keys)
    for _ in range(2):
        rig.clock.now += 0.8
        disk.answer("get")
        assert not rig.storage.lanes[0].stalled()
    rig.storage.release("r")
    rig.check_clean()


def test_a_tier_that_is_not_ready_is_not_asked() -> None:
    remote = DoubleTier("remote", indexed=False)
    rig = Rig([remote])
    remote.state = Health("RemoteUnreachable", "refused; start it")
    assert rig.begin("r", chain("a", 2)).most == 0
    assert remote.asked == []
    stats = rig.storage.stats()[1]
    assert (stats.state, stats.detail) == ("RemoteUnreachable", "refused; start it")
    rig.check_clean()


def test_an_object_of_another_size_is_not_fetched() -> None:
    disk = DoubleTier()
    rig = Rig([disk])
    keys = chain("a", 2)
    rig.below(disk, keys)
    disk.objects[keys[1]].payload = bytes(SHAPE.token_bytes)
    assert rig.begin("r", keys).most == 1
    disk.answer_all()
    rig.storage.release("r")
    rig.check_clean()


def test_the_last_chunk_may_be_partial() -> None:
    from kvcache.storage.fetch import Query

    disk = DoubleTier()
    rig = Rig([disk])
    keys = chain("a", 2)
    rig.below(disk, keys)
    disk.objects[keys[1]].payload = bytes(5 * SHAPE.token_bytes)
    assert rig.storage.begin_lookup("r", Query(keys, CHUNK + 5)).most == 2
    disk.answer_all()
    assert rig.storage.standing("r").chunks == 2
    assert [obj.num_tokens for obj in rig.tier.leased(keys, "r")] == [CHUNK, 5]
    rig.storage.release("r")
    rig.check_clean()


def test_what_vllm_has_itself_is_not_fetched() -> None:
    disk = DoubleTier()
    rig = Rig([disk])
    keys = chain("a", 4)
    rig.store(keys, last=1)
    rig.work()
    disk.answer_all()
    rig.below(disk, keys)
    assert rig.begin("r", keys, skip=3) == Standing(3, 4, 2.0, 1, (("cpu", 3),))
    disk.answer_all()
    assert rig.storage.standing("r") == Standing(4, 4, 2.0, 1, (("cpu", 3), ("disk", 1)))
    assert keys[1] not in rig.tier
    rig.storage.release("r")
    rig.check_clean()


def test_only_what_pays_is_fetched() -> None:
    disk = DoubleTier()
    rig = Rig([disk], slots=20)
    first, second, third = chain("a", 3), chain("b", 3), chain("c", 3)
    for keys in (first, second, third):
        rig.below(disk, keys)
    rig.begin("r", first)
    rig.clock.now += 3.0  # a second a chunk
    disk.answer_all()
    assert rig.begin("s", second, seconds_per_token=0.5 / CHUNK).most == 0
    assert rig.storage.stats()[1].not_worth_tokens == 3 * CHUNK
    assert rig.begin("t", second, seconds_per_token=2.0 / CHUNK).most == 3
    rig.clock.now += 60.0  # measured too long ago
    disk.answer_all()
    rig.clock.now += 60.0
    assert rig.begin("u", third, seconds_per_token=1e-9).most == 3
    for owner in "rstu":
        rig.storage.release(owner)
    rig.check_clean()


def test_a_lookup_that_is_asked_again_takes_the_place_of_the_first() -> None:
    disk = DoubleTier()
    rig = Rig([disk])
    keys = chain("a", 3)
    rig.below(disk, keys)
    rig.begin("r", keys)
    assert rig.begin("r", keys).most == 3
    assert sum(call.size for call in disk.calls if call.kind == "get") == 3
    disk.answer_all()
    assert rig.storage.standing("r").chunks == 3
    rig.storage.release("r")
    assert rig.storage.standing("r") == Standing(0, 0)
    rig.check_clean()


def test_what_was_asked_for_a_lookup_that_was_asked_again_takes_nothing() -> None:
    remote = DoubleTier("remote", indexed=False)
    rig = Rig([remote])
    keys = chain("a", 2)
    rig.below(remote, keys)
    rig.begin("r", keys, skip=1)
    rig.begin("r", keys)
    late, again = (call for call in remote.calls if call.kind == "head")
    remote.answer_call(again)
    remote.answer_all("get")
    rig.storage.hand_over("r", "loading")
    remote.answer_call(late)
    rig.storage.release("loading")
    rig.check_clean()


def test_lookups_that_nobody_ends_are_forgotten() -> None:
    disk = DoubleTier()
    rig = Rig([disk], manager={"forget_after_s": 10.0})
    keys = chain("a", 2)
    rig.below(disk, keys)
    rig.begin("lost", keys)
    rig.clock.now += 11.0
    rig.begin("r", chain("b", 1))
    assert rig.storage.standing("lost") == Standing(0, 0)
    rig.storage.release("lost")
    rig.check_clean()


def test_what_was_cleared_while_it_was_read_is_not_there() -> None:
    from kvcache.storage.tier import ClearScope

    disk = DoubleTier()
    rig = Rig([disk])
    keys = chain("a", 2)
    rig.below(disk, keys)
    rig.begin("r", keys)
    rig.storage.clear(ClearScope(), ["cpu"])
    disk.answer_all()
    assert rig.storage.standing("r")[:2] == (0, 0)
    assert rig.tier.lookup(keys) == 0
    rig.storage.release("r")
    rig.check_clean()
