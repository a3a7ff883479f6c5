# SPDX-License-Identifier: Apache-2.0
"""How long keys are worth keeping after a use, by how they were used before: learnt from when they come back.

Keys fall into classes by their number of uses. The intervals between the uses of a class tell, for each
lifetime that it could be given, how many hits that brings and how much room it takes: a key that comes back
within the lifetime is a hit and takes room until then, any other one takes room for the whole lifetime (the
model of Hu et al., Kinetic Modeling of Data Eviction in Cache, USENIX ATC 2016). Which lifetimes are best in
the room that there is, is a question of price: each class takes the lifetime at which its hits, less the
price of its room, are most; the price is the lowest one at which the room suffices for all (a Lagrange
multiplier). LRU is the case of one lifetime for all classes.

Time is counted in uses of keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CLASSES = 5
"""Keys used once, twice, three times, and more often: those that came back soon, and those that did not."""
_OFTEN, _OFTEN_BUT_SLOWLY = 3, 4

_BINS_PER_OCTAVE = 8
_BINS = 30 * _BINS_PER_OCTAVE
"""Of intervals, up to 2 ** 30 uses."""
LIFETIMES: Floats = np.concatenate([[0.0], 2.0 ** (np.arange(1, _BINS + 1) / _BINS_PER_OCTAVE)])
"""Those to choose from: 0, and the upper ends of the bins."""

_HALF_LIFE = 16
"""Of what was learnt, in uses for each key that there is room for."""
_LEAST_HALF_LIFE = 4096
_PERIOD = 1 / 8
"""Uses between two plans, for each key that there is room for."""
_LEAST_PERIOD = 512

_WORTH_WRITING = 0.02
"""Hits for each key of a class that is let in, below which none of it is."""
_TOO_FEW = 32
"""Uses of a class, too few to tell."""
_MOST_CORRECTION = 4.0


class Plan(NamedTuple):
    """By class."""

    lifetimes: list[float]
    """In uses. What is furthest past its lifetime leaves first; all alike, that is LRU."""
    worth_writing: list[bool]
    """Whether a key that is not there should be let in where another one has to leave for it."""


LRU_PLAN = Plan([1.0] * CLASSES, [True] * CLASSES)


class Use(NamedTuple):
    """The last use of a key."""

    time: int
    kind: int
    """The key's class since then, from 0 on."""


def best_plan(uses: Floats, again: Floats, elapsed: float, capacity: int) -> Plan:
    """The lifetimes that bring most hits.

    Args:
        uses: `[CLASSES]`, the number of uses that made a key one of the class.
        again: `[CLASSES, bins]`, how many of them were followed by another use of the key, by interval.
        elapsed: the number of all uses, which is the time in which they happened.
        capacity: keys that there is room for.
    """
    hits = np.minimum(_sums(again), uses[:, None])
    away = uses[:, None] - hits
    room = _sums((away[:, 1:] + away[:, :-1]) / 2 * np.diff(LIFETIMES)) / elapsed
    every = np.arange(CLASSES)

    low, high = 0.0, float(hits.max()) + 1.0
    chosen = np.zeros(CLASSES, np.intp)
    for _ in range(40):
        price = (low + high) / 2
        tried = np.argmax(hits - price * room, axis=1)
        if room[every, tried].sum() > capacity:
            low = price
        else:
            high, chosen = price, tried
    worth = (hits[every, chosen] >= _WORTH_WRITING * uses) | (uses < _TOO_FEW)
    return Plan(LIFETIMES[chosen].tolist(), worth.tolist())


def _sums(rows: Floats) -> Floats:
    """Running sums of each row, from 0 on."""
    return np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)], axis=1)


def unseen(time: int, fading: float) -> Floats:
    """`[bins]`, by what to multiply the intervals that were seen: in so short a time, long ones had mostly
    begun before it. 1 in the long run.

    Args:
        time: uses so far.
        fading: of what was learnt, with each use.
    """
    middles = (LIFETIMES[1:] + LIFETIMES[:-1]) / 2
    weight = 1 - fading ** np.maximum(time - middles, 0.0)
    correction: Floats = np.minimum(_MOST_CORRECTION, (1 - fading**time) / np.maximum(weight, 1e-9))
    return correction


class ReuseClock:
    """Counts uses, learns from the intervals between them, and plans.

    Args:
        capacity: keys that there is room for.
    """

    def __init__(self, capacity: int) -> None:
        self.time = 0
        self.plan = LRU_PLAN
        self._capacity = max(1, capacity)
        self._period = max(_LEAST_PERIOD, int(_PERIOD * self._capacity))
        half_life = max(_LEAST_HALF_LIFE, _HALF_LIFE * self._capacity)
        self._fading = 0.5 ** (1 / half_life)
        """Of what was learnt, with each use."""
        self._elapsed = 0.0
        self._uses: Floats = np.zeros(CLASSES)
        self._again: Floats = np.zeros((CLASSES, _BINS))
        self._start_period()

    def use(self, previous: Use | None) -> Use:
        """A key is used now, for the first time or since its previous use."""
        self.time += 1
        kind = 0
        if previous is not None:
            interval = self.time - previous.time
            self._again_now[previous.kind][min(_BINS - 1, int(math.log2(interval) * _BINS_PER_OCTAVE))] += 1
            kind = previous.kind + 1
            if kind >= _OFTEN:
                kind = _OFTEN if interval <= self._capacity else _OFTEN_BUT_SLOWLY
        self._uses_now[kind] += 1
        if self.time % self._period == 0:
            self._learn()
        return Use(self.time, kind)

    def _start_period(self) -> None:
        self._uses_now = [0] * CLASSES
        self._again_now = [[0] * _BINS for _ in range(CLASSES)]

    def _learn(self) -> None:
        kept = self._fading**self._period
        self._elapsed = self._elapsed * kept + self._period
        self._uses = self._uses * kept + self._uses_now
        self._again = self._again * kept + np.array(self._again_now)
        self._start_period()
        self.plan = best_plan(
            self._uses, self._again * unseen(self.time, self._fading), self._elapsed, self._capacity
        )
