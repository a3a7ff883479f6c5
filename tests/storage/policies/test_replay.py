# SPDX-License-Identifier: Apache-2.0
"""The replay of traces: presence is monotone along chains, what the bounds promise, and orders between the
policies that must hold."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from kvcache.bench.policy import ALWAYS, ReplayTier, Trace, replay
from kvcache.bench.policy_bounds import clairvoyant, unbounded
from kvcache.bench.policy_traces import GENERATORS, Request, synthetic_trace
from kvcache.config.tiers import CpuTierConfig
from kvcache.storage.policies import ADMISSIONS, POLICIES

PAIRS = [(eviction, admission) for eviction in POLICIES for admission in (ALWAYS, *ADMISSIONS)]


def branching(rng: random.Random, requests: int, width: int, depth: int) -> list[Request]:
    """Walks from the root of a tree in which each block has `width` blocks behind it."""
    trace = []
    for _ in range(requests):
        block, request = 0, []
        for _ in range(rng.randint(1, depth)):
            block = block * width + rng.randint(1, width)
            request.append(block)
        trace.append(request)
    return trace


def beginning(name: str, requests: int, seed: int = 3) -> Trace:
    return Trace(synthetic_trace(name, seed)[:requests])


@pytest.mark.parametrize(("eviction", "admission"), PAIRS)
def test_what_is_there_has_all_before_it_there(eviction: str, admission: str) -> None:
    trace = Trace(branching(random.Random(), 400, width=3, depth=6))
    capacity = 40
    chosen = None if admission == ALWAYS else ADMISSIONS[admission](capacity)
    tier = ReplayTier(trace, capacity, POLICIES[eviction](capacity), chosen)
    hits = writes = 0
    for request in trace.requests:
        present = list(itertools.takewhile(tier.here.__contains__, request))
        before = set(tier.here)
        found, stored = tier.serve(request)
        assert found == len(present)
        assert set(request[found : found + stored]) <= tier.here - before
        assert len(tier.here) <= capacity
        assert all(trace.parents[block] in {None, *tier.here} for block in tier.here)
        hits, writes = hits + found, writes + stored
    assert hits > 0
    assert writes >= len(tier.here) > 0


@pytest.mark.parametrize("name", GENERATORS)
def test_all_fits(name: str) -> None:
    """With room for everything, every policy that lets all in hits what an endless cache hits."""
    trace = beginning(name, 60)
    best = unbounded(trace)
    assert best.hits == trace.reads - trace.blocks
    bound = clairvoyant(trace, trace.blocks)
    uses = Counter(itertools.chain.from_iterable(trace.requests))
    assert (bound.hits, bound.writes) == (best.hits, sum(count > 1 for count in uses.values()))
    for eviction in POLICIES:
        result = replay(trace, trace.blocks, eviction, ALWAYS)
        assert (result.hits, result.writes) == (best.hits, trace.blocks)


@pytest.mark.parametrize("name", GENERATORS)
def test_nobody_surpasses_who_knows_the_future(name: str) -> None:
    trace = beginning(name, 120)
    capacity = max(1, int(trace.blocks * random.uniform(0.02, 0.3)))
    bound = clairvoyant(trace, capacity)
    for eviction, admission in PAIRS:
        result = replay(trace, capacity, eviction, admission)
        assert result.hits <= bound.hits <= unbounded(trace).hits
        assert result.writes <= result.reads - result.hits


def most_hits(trace: Trace, capacity: int) -> int:
    """By trying everything: after each request, all sets of blocks that fit, and hold what is before
    them."""
    states = {frozenset[int](): 0}
    for request in trace.requests:
        following: dict[frozenset[int], int] = {}
        for state, hits in states.items():
            found = len(list(itertools.takewhile(state.__contains__, request)))
            at_hand = sorted(state | set(request))
            for size in range(min(capacity, len(at_hand)) + 1):
                for kept in map(frozenset, itertools.combinations(at_hand, size)):
                    if all(trace.parents[block] in {None, *kept} for block in kept):
                        following[kept] = max(following.get(kept, 0), hits + found)
        states = following
    return max(states.values())


@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_the_bound_is_reached_and_not_more(capacity: int) -> None:
    for seed in random.Random().sample(range(1 << 30), 6):
        trace = Trace(branching(random.Random(seed), 9, width=2, depth=3))
        assert clairvoyant(trace, capacity).hits == most_hits(trace, capacity), f"seed {seed}"


def test_prompts_that_come_round_want_mru() -> None:
    """LRU throws out each one just before its turn. Adaptive learns to leave in what is there."""
    rng = random.Random()
    ids = itertools.count()
    prompts = [list(itertools.islice(ids, rng.randint(2, 6))) for _ in range(60)]
    trace = Trace(prompts * 40)
    capacity = trace.blocks // 2
    assert replay(trace, capacity, "LRU", ALWAYS).hits == 0
    mru = replay(trace, capacity, "MRU", ALWAYS)
    assert mru.hit_rate > 0.4
    assert replay(trace, capacity, "Adaptive", "Adaptive").hit_rate > 0.9 * mru.hit_rate
    assert clairvoyant(trace, capacity).hits >= mru.hits


def test_a_scan_does_not_sweep_what_is_used_often() -> None:
    trace = beginning("scan", 1_000)
    capacity = trace.blocks // 20
    lru = replay(trace, capacity, "LRU", ALWAYS)
    for eviction in ("LFU", "S3FIFO", "ARC", "Adaptive"):
        assert replay(trace, capacity, eviction, ALWAYS).hits > 1.1 * lru.hits


def test_admission_saves_writes() -> None:
    trace = beginning("scan", 2_500)
    capacity = trace.blocks // 20
    for eviction in ("LRU", "Adaptive"):
        everything = replay(trace, capacity, eviction, ALWAYS)
        for admission in ADMISSIONS:
            gated = replay(trace, capacity, eviction, admission)
            assert gated.writes < 0.8 * everything.writes
            assert gated.hits > 0.9 * everything.hits


@pytest.mark.parametrize("name", GENERATORS)
def test_the_default_is_near_the_best_and_never_below_lru(name: str) -> None:
    trace = beginning(name, 2_500, seed=5)
    default = CpuTierConfig()
    for share in (0.02, 0.1):
        capacity = int(share * trace.blocks)
        hits = {
            (eviction, admission): replay(trace, capacity, eviction, admission).hits
            for eviction, admission in (
                ("LRU", ALWAYS),
                ("S3FIFO", ALWAYS),
                ("ARC", ALWAYS),
                ("ARC", "TinyLFU"),
            )
        }
        ours = replay(trace, capacity, default.eviction, default.admission).hits
        assert ours >= hits["LRU", ALWAYS], share
        assert ours >= 0.9 * max(hits.values()), share


@pytest.mark.parametrize("name", GENERATORS)
def test_generators(name: str) -> None:
    trace = synthetic_trace(name, 5)
    assert trace == synthetic_trace(name, 5)
    assert len(trace) > 2_000
    assert all(request and len(set(request)) == len(request) for request in trace)
    parents: dict[int, int | None] = {}
    for request in trace:
        for parent, block in zip([None, *request], request, strict=False):
            assert parents.setdefault(block, parent) == parent
    if name != "loop":
        assert trace != synthetic_trace(name, 6)
