# SPDX-License-Identifier: Apache-2.0
"""The lifetimes: hits and room by hand, the best of all choices, and what is learnt of known intervals."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from kvcache.storage.policies.lifetimes import (
    CLASSES,
    LIFETIMES,
    LRU_PLAN,
    Plan,
    ReuseClock,
    Use,
    best_plan,
    unseen,
)

BINS = len(LIFETIMES) - 1


def hits_and_room(
    uses: np.ndarray, again: np.ndarray, elapsed: float, kind: int, bins: int
) -> tuple[float, float]:
    """What the first so many bins of a class bring and take: a key is in the room from its use to its next
    one, or to the end of the lifetime; in the middle of a bin half of the bin's keys are back."""
    hits = room = 0.0
    for place in range(bins):
        away_before = uses[kind] - hits
        hits += again[kind, place]
        away_after = uses[kind] - hits
        room += (LIFETIMES[place + 1] - LIFETIMES[place]) * (away_before + away_after) / 2
    return hits, room / elapsed


@pytest.mark.parametrize("seed", range(8))
def test_no_other_choice_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    used = rng.choice(160, 9, replace=False)
    again = np.zeros((CLASSES, BINS))
    again[:, used] = rng.integers(0, 2_000, (CLASSES, 9)) * rng.random((CLASSES, 9)) ** 3
    uses = again.sum(axis=1) * rng.uniform(1, 4, CLASSES)
    elapsed = uses.sum()
    capacity = int(10 ** rng.uniform(1, 4))
    plan = best_plan(uses, again, elapsed, capacity)
    bins = [int(np.searchsorted(LIFETIMES, lifetime)) for lifetime in plan.lifetimes]
    sums = [hits_and_room(uses, again, elapsed, kind, bins[kind]) for kind in range(CLASSES)]
    plan_hits, plan_room = (sum(column) for column in zip(*sums, strict=True))
    assert plan_room <= capacity * 1.001
    choices = []
    for kind in range(CLASSES):
        ends = [0, *(int(place) + 1 for place in used)]
        choices.append([hits_and_room(uses, again, elapsed, kind, end) for end in ends])
    for combination in itertools.product(*choices):
        hits, room = (sum(column) for column in zip(*combination, strict=True))
        if room <= plan_room:
            assert hits <= plan_hits * 1.001


def test_lru_before_anything_was_learnt() -> None:
    assert ReuseClock(1_000).plan == LRU_PLAN


def learnt(capacity: int, steps: int) -> Plan:
    """Of 300 keys in turn, after each of which four keys come that never come back."""
    clock = ReuseClock(capacity)
    last: dict[int, Use] = {}
    for step in range(steps):
        key = step // 5 % 300 if step % 5 == 0 else 1_000_000 + step
        last[key] = clock.use(last.get(key))
    return clock.plan


def test_keys_that_come_back_stay_until_they_do() -> None:
    """Each of the 300 comes back after 1,500 uses: LRU needs room for 1,200 keys and more."""
    plan = learnt(capacity=400, steps=60_000)
    slowly = plan.lifetimes[-1]
    assert 1_500 <= slowly < 1_900
    assert plan.lifetimes[0] == 0
    assert plan.worth_writing[-1]
    assert not plan.worth_writing[0]


def test_keys_that_come_back_too_late_are_let_go() -> None:
    plan = learnt(capacity=100, steps=60_000)
    assert plan.lifetimes[-1] < 1_500


def test_long_intervals_are_seen_too_seldom_at_first() -> None:
    """Of uses at every moment, with all intervals alike: those that ended in the time that there was."""
    fading = 1 - 1e-12
    interval, time = 1_000, 3_000
    place = int(np.searchsorted(LIFETIMES, interval)) - 1
    middle = (LIFETIMES[place] + LIFETIMES[place + 1]) / 2
    assert unseen(time, fading)[place] == pytest.approx(time / (time - middle), rel=1e-3)
    assert unseen(1 << 29, fading)[place] == pytest.approx(1, rel=1e-3)
    assert unseen(1_000_000, 0.999)[place] == pytest.approx(1)
    assert np.isfinite(unseen(1, fading)).all()


def test_intervals_beyond_all_bins() -> None:
    clock = ReuseClock(10)
    clock.time = 1 << 40
    assert clock.use(Use(1, 2)).kind == CLASSES - 1


def test_kinds() -> None:
    clock = ReuseClock(10)
    rng = random.Random()
    use = clock.use(None)
    assert use.kind == 0
    kinds = [(use := clock.use(use)).kind for _ in range(5)]
    assert kinds == [1, 2, 3, 3, 3]
    for _ in range(rng.randint(10, 50)):
        clock.use(None)
    assert clock.use(use).kind == 4
