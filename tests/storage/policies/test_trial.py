# SPDX-License-Identifier: Apache-2.0
"""Trials: the rivals against plain lists, who wins where the hits are known, and that a lost lead ends it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

import pytest

from kvcache.storage.policies import trial
from kvcache.storage.policies.lifetimes import CLASSES, LRU_PLAN, Plan, ReuseClock, Use
from kvcache.storage.policies.trial import GateRival, LifetimesRival, Rival, Trial

ONCE_ONLY = Plan([0.0, *[1e6] * (CLASSES - 1)], [False, *[True] * (CLASSES - 1)])
"""What was used once is worth nothing."""
ONCE_FIRST = Plan([1e6, *[0.0] * (CLASSES - 1)], [True, *[False] * (CLASSES - 1)])
"""Nothing else is."""


def uses_of(keys: Iterable[int], capacity: int) -> Iterator[tuple[int, Use]]:
    clock = ReuseClock(capacity)
    last: dict[int, Use] = {}
    for key in keys:
        last[key] = clock.use(last.get(key))
        yield key, last[key]


def scanned(rng: random.Random, rounds: int) -> Iterator[int]:
    """Thirty keys come again and again, and between two of them three that never come back."""
    fresh = itertools.count(1_000)
    for _ in range(rounds):
        yield rng.randrange(30)
        yield from itertools.islice(fresh, 3)


def test_lifetimes_by_hand() -> None:
    """Room for three: what is there is a list of its uses, and the most overdue one leaves."""
    capacity, plan = 3, Plan([2.0, 10.0, 50.0, 50.0, 50.0], [True] * CLASSES)
    rival: LifetimesRival[int] = LifetimesRival(capacity)
    here: dict[int, Use] = {}
    rng = random.Random()
    for key, use in uses_of((rng.choice((1, 2, 3, 4, 5, 6, 7)) for _ in range(600)), capacity):
        found = key in here
        if not found and len(here) == capacity:
            overdue = {one: (use.time - at.time) / plan.lifetimes[at.kind] for one, at in here.items()}
            most = max(overdue.values())
            victims = [one for one, value in overdue.items() if value == most]
            if len(victims) > 1:  # of several classes: the order among them is no promise
                return
            del here[victims[0]]
        here[key] = use
        assert rival.use(key, use, plan) == found


def test_a_gate_by_hand() -> None:
    rival: GateRival[int] = GateRival(2)
    once, often = Use(1, 0), Use(2, 3)
    assert [rival.use(key, once, ONCE_ONLY) for key in (1, 2, 3, 1, 2)] == [False, False, False, True, True]
    assert not rival.use(3, often, ONCE_ONLY)
    assert rival.use(3, once, ONCE_ONLY)
    assert not rival.use(1, once, ONCE_ONLY)


@pytest.mark.parametrize("rival", [LifetimesRival, GateRival])
@pytest.mark.parametrize("one_in", [1, 10])
def test_who_hits_more_wins(rival: type[Rival[int]], one_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In room for forty, LRU has lost the thirty when they come. A large tier tries a sample of its keys."""
    monkeypatch.setattr(trial, "_MOST_KEYS", 40)
    rng = random.Random()
    good: Trial[int] = Trial(40 * one_in, rival, 0.02)
    bad: Trial[int] = Trial(40 * one_in, rival, 0.02)
    assert (good.won, bad.won) == (False, False)
    keys = (key * one_in + rng.randrange(one_in) for key in scanned(rng, 6_000 * one_in))
    for key, use in uses_of(keys, 40 * one_in):
        good.use(key, use, ONCE_ONLY)
        bad.use(key, use, ONCE_FIRST)
    assert (good.won, bad.won) == (True, False)


def test_nobody_wins_where_both_do_the_same() -> None:
    rng = random.Random()
    tried: Trial[int] = Trial(50, LifetimesRival, 0.01)
    for key, use in uses_of((int(rng.paretovariate(0.7)) for _ in range(20_000)), 50):
        tried.use(key, use, LRU_PLAN)
        assert not tried.won


def test_a_lead_that_is_lost_ends_it() -> None:
    """What is right for scans is wrong where all comes a second time soon: then nothing is there."""
    rng = random.Random()
    tried: Trial[int] = Trial(40, GateRival, 0.01)
    pairs = (1_000_000 + place // 10 * 5 + place % 5 for place in range(40_000))
    won = []
    for key, use in uses_of(itertools.chain(scanned(rng, 6_000), pairs), 40):
        tried.use(key, use, ONCE_ONLY)
        won.append(tried.won)
    assert won[24_000 - 1]
    assert not won[-1]
