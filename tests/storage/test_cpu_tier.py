# SPDX-License-Identifier: Apache-2.0
"""The CPU tier against a plain model of it, with the real allocator under it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache.memory.allocator import ChunkAllocator, KVShape
from kvcache.memory.region import HostRegion
from kvcache.storage.policies import LRUPolicy
from kvcache.storage.tier import ClearScope
from kvcache.storage.tiers.cpu import CpuTier, Outcome
from kvcache.tokens.keys import CacheEngineKey

SHAPE = KVShape(num_layers=2, kv_planes=2, hidden=32, dtype=torch.float32, chunk_tokens=16)
SLOTS = 6


def key_of(number: int) -> CacheEngineKey:
    return CacheEngineKey(number.to_bytes(16, "little"), bytes(16), rank=0)


def make_tier(
    slots: int = SLOTS, timeout_s: float = 1e9, clock: Callable[[], float] = time.monotonic
) -> CpuTier:
    allocator = ChunkAllocator(HostRegion(slots * SHAPE.chunk_bytes, pin="Disabled"), SHAPE)
    assert allocator.capacity_bytes == slots * SHAPE.chunk_bytes
    return CpuTier(allocator, LRUPolicy(8), timeout_s, clock=clock)


def store(tier: CpuTier, number: int) -> Outcome:
    outcome, obj = tier.reserve(key_of(number), 16)
    if obj is not None:
        obj.tensor.fill_(number)
        tier.publish([key_of(number)])
    return outcome


class TierMachine(RuleBasedStateMachine):
    """The model: an LRU list of visible keys, the keys being written, and who leases what."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = make_tier()
        self.order: list[int] = []
        self.writing: dict[int, bool] = {}
        self.leases: dict[str, dict[int, int]] = {}
        self.generation = dict.fromkeys(range(12), 0)
        self.doomed = 0

    def leased(self, number: int) -> bool:
        return any(keys.get(number) == self.generation[number] for keys in self.leases.values())

    def occupied(self) -> int:
        live = {(n, g) for keys in self.leases.values() for n, g in keys.items()}
        return len(live | {(n, self.generation[n]) for n in self.order}) + len(self.writing)

    @rule(number=st.integers(0, 11))
    def reserve(self, number: int) -> None:
        outcome, obj = self.tier.reserve(key_of(number), 16)
        if number in self.order:
            assert outcome is Outcome.PRESENT
        elif number in self.writing:
            assert outcome is Outcome.IN_FLIGHT
        else:
            while self.occupied() >= SLOTS:
                victim = next((n for n in self.order if not self.leased(n)), None)
                if victim is None:
                    assert outcome is Outcome.FULL
                    return
                self.order.remove(victim)
                self.generation[victim] += 1
            assert outcome is Outcome.RESERVED
            assert obj is not None
            obj.tensor.fill_(number)
            self.writing[number] = True

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data: st.DataObject, keep: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.writing)))
        visible = self.writing.pop(number)
        if keep:
            self.tier.publish([key_of(number)])
            if visible:
                self.order.append(number)
        else:
            self.tier.abandon([key_of(number)])

    @rule(numbers=st.lists(st.integers(0, 11), unique=True, max_size=5), owner=st.sampled_from("ab"))
    def lookup(self, numbers: list[int], owner: str) -> None:
        expected = next((i for i, n in enumerate(numbers) if n not in self.order), len(numbers))
        keys = [key_of(n) for n in numbers]
        assert self.tier.lookup(keys) == expected
        assert self.tier.lookup_and_lease(keys, owner) == expected
        for number in reversed(numbers[:expected]):
            self.order.remove(number)
            self.order.append(number)
        for number in numbers[:expected]:
            self.leases.setdefault(owner, {})[number] = self.generation[number]

    @rule(owner=st.sampled_from("ab"))
    def read_and_release(self, owner: str) -> None:
        for number in self.leases.get(owner, {}):
            (obj,) = self.tier.leased([key_of(number)], owner)
            assert torch.equal(obj.tensor, torch.full_like(obj.tensor, number))
        assert self.tier.release(owner) == len(self.leases.pop(owner, {}))

    @rule()
    def flush(self) -> None:
        kept = sum(self.leased(n) for n in self.order) + sum(self.writing.values())
        cleared = self.tier.clear(ClearScope())
        assert cleared.kept == kept
        assert cleared.objects == sum(not self.leased(n) for n in self.order)
        for number in self.order:
            self.generation[number] += 1
        self.order.clear()
        self.writing = dict.fromkeys(self.writing, False)

    @invariant()
    def counts(self) -> None:
        stats = self.tier.stats()
        assert stats.objects == len(self.order)
        assert stats.used_bytes == self.occupied() * SHAPE.chunk_bytes
        assert stats.used_bytes <= stats.capacity_bytes

    def teardown(self) -> None:
        self.tier.close()


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_the_start_of_a_chain_outlives_its_end() -> None:
    tier = make_tier(slots=4)
    for number in (1, 2, 3, 4):
        store(tier, number)
    assert tier.lookup_and_lease([key_of(n) for n in (1, 2, 3)], "request") == 3
    tier.release("request")
    assert [store(tier, n) for n in (5, 6)] == [Outcome.RESERVED] * 2
    assert tier.lookup([key_of(1), key_of(2)]) == 2
    assert tier.lookup([key_of(3)]) == tier.lookup([key_of(4)]) == 0
    tier.close()


def test_nothing_waits_where_everything_is_leased() -> None:
    tier = make_tier(slots=2)
    store(tier, 1)
    store(tier, 2)
    assert tier.lookup_and_lease([key_of(1), key_of(2)], "request") == 2
    assert store(tier, 3) is Outcome.FULL
    assert tier.stats().rejected == 1
    tier.release("request")
    assert store(tier, 3) is Outcome.RESERVED
    tier.close()


def test_a_lease_of_a_lost_owner_ends_by_itself() -> None:
    now = [0.0]
    tier = make_tier(slots=1, timeout_s=5.0, clock=lambda: now[0])
    store(tier, 1)
    tier.lookup_and_lease([key_of(1)], "lost")
    now[0] = 4.0
    assert tier.stats().leases == 1
    now[0] = 6.0
    assert tier.stats().leases == 0
    assert tier.leased([key_of(1)], "lost") == []
    tier.close()


def test_publishing_what_is_not_reserved_is_an_error() -> None:
    tier = make_tier()
    with pytest.raises(KeyError):
        tier.publish([key_of(1)])
    tier.close()


def test_threads_leave_nothing_behind() -> None:
    """Writers, readers and a flusher at once: no wrong byte, no lease, no memory left."""
    tier = make_tier(slots=8)
    errors: list[str] = []
    stop = threading.Event()

    def write(offset: int) -> None:
        for turn in range(300):
            store(tier, (turn + offset) % 12)

    def read(owner: str) -> None:
        while not stop.is_set():
            keys = [key_of(n) for n in range(12)]
            found = tier.lookup_and_lease(keys, owner)
            for number, obj in enumerate(tier.leased(keys[:found], owner)):
                if not bool((obj.tensor == number).all()):
                    errors.append(f"{owner} read {obj.tensor.flatten()[0]} for {number}")
            tier.release(owner)

    writers = [threading.Thread(target=write, args=(n,)) for n in (0, 5)]
    readers = [threading.Thread(target=read, args=(n,)) for n in "ab"]
    for thread in (*writers, *readers):
        thread.start()
    for thread in writers:
        while thread.is_alive():
            tier.clear(ClearScope())
            thread.join(0.01)
    stop.set()
    for thread in readers:
        thread.join()
    assert errors == []
    tier.clear(ClearScope())
    assert tier.stats().leases == tier.stats().used_bytes == 0
    tier.close()
