# SPDX-License-Identifier: Apache-2.0
"""What would have been hit: LRU and its rival are tried side by side on keys alone, and hits decide.

Lifetimes are an estimate, and where they promise little more than LRU the estimate may be wrong. So the tier
does what LRU does until the rival has shown on the same uses that it hits more, by more than chance, and does
so again as soon as the rival hits less. What is remembered are keys, up to as many as the tier has room for;
of a large tier's keys a sample is tried in room of the same share (Waldspurger et al., Efficient MRC
Construction with SHARDS, FAST 2015).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic

from kvcache.storage.policies.base import K
from kvcache.storage.policies.lifetimes import CLASSES, Plan, Use

_MOST_KEYS = 1 << 15
"""Room of a trial: a tier with more tries a sample."""

_LONG, _LEAST_LONG = 32, 30_000
_SHORT, _LEAST_SHORT = 4, 4_000
"""Half-lives of what was hit, in uses for each key that there is room for, and in uses."""
_PERIOD = 64
"""Uses between two judgements."""
_SIGMAS = 8.0
"""Beyond chance: a count's deviation is its root, and some times that where a prompt's keys hit together."""

SHORTEST_LIFETIME = 1e-3
"""Stands for a lifetime of 0."""


class Rival(ABC, Generic[K]):
    """A way to use the room, tried on keys alone."""

    @abstractmethod
    def use(self, key: K, use: Use, plan: Plan) -> bool:
        """Whether the key is there; afterwards it is, unless it is not let in.

        Args:
            use: the use of the key that this is.
            plan: by which keys are judged now.
        """


class Trial(Generic[K]):
    """LRU against a rival.

    Args:
        capacity: keys that the tier has room for.
        rival: makes the other one, for the room that it is given.
        margin: share of LRU's hits that the rival must bring beyond them before it is followed.
    """

    def __init__(self, capacity: int, rival: Callable[[int], Rival[K]], margin: float) -> None:
        capacity = max(1, capacity)
        self._one_in = -(-capacity // _MOST_KEYS)
        room = max(1, capacity // self._one_in)
        self._lru: _Lru[K] = _Lru(room)
        self._rival: Rival[K] = rival(room)
        self._margin = margin
        self._long = _Hits(max(_LEAST_LONG, _LONG * room))
        self._short = _Hits(max(_LEAST_SHORT, _SHORT * room))
        self._uses = self._lru_hits = self._rival_hits = self._apart = 0
        """Since the last judgement; apart: uses that were a hit of one of the two alone."""
        self.won = False
        """Whether to do as the rival does."""

    def use(self, key: K, use: Use, plan: Plan) -> None:
        """Each use of a key, once."""
        if self._one_in > 1 and hash(key) % self._one_in:
            return
        lru, rival = self._lru.use(key), self._rival.use(key, use, plan)
        self._uses += 1
        self._lru_hits += lru
        self._rival_hits += rival
        self._apart += lru != rival
        if self._uses == _PERIOD:
            self._judge()

    def _judge(self) -> None:
        for hits in (self._long, self._short):
            hits.add(self._lru_hits, self._rival_hits, self._apart)
        self._uses = self._lru_hits = self._rival_hits = self._apart = 0
        if self._short.rival < self._short.lru:
            self.won = False
        elif self.won:
            self.won = self._long.rival >= self._long.lru
        else:
            chance = _SIGMAS * self._long.apart**0.5
            self.won = self._long.rival - self._long.lru > self._margin * self._long.lru + chance


class _Lru(Generic[K]):
    def __init__(self, room: int) -> None:
        self._room = room
        self._keys: OrderedDict[K, None] = OrderedDict()

    def use(self, key: K, let_in: bool = True) -> bool:
        if key in self._keys:
            self._keys.move_to_end(key)
            return True
        full = len(self._keys) >= self._room
        if let_in or not full:
            if full:
                self._keys.popitem(last=False)
            self._keys[key] = None
        return False


class GateRival(Rival[K]):
    """LRU that lets in only what is worth writing."""

    def __init__(self, room: int) -> None:
        self._lru: _Lru[K] = _Lru(room)

    def use(self, key: K, use: Use, plan: Plan) -> bool:
        return self._lru.use(key, plan.worth_writing[use.kind])


class LifetimesRival(Rival[K]):
    """What is furthest past its lifetime leaves."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._classes: list[OrderedDict[K, int]] = [OrderedDict() for _ in range(CLASSES)]
        """Times of the last use, in their order."""
        self._kinds: dict[K, int] = {}

    def use(self, key: K, use: Use, plan: Plan) -> bool:
        kind = self._kinds.get(key)
        if kind is not None:
            del self._classes[kind][key]
        elif len(self._kinds) >= self._room:
            self._evict(use.time, plan)
        self._classes[use.kind][key] = use.time
        self._kinds[key] = use.kind
        return kind is not None

    def _evict(self, now: int, plan: Plan) -> None:
        _, kind = max(
            ((now - next(iter(keys.values()))) / max(lifetime, SHORTEST_LIFETIME), kind)
            for kind, (keys, lifetime) in enumerate(zip(self._classes, plan.lifetimes, strict=True))
            if keys
        )
        key, _ = self._classes[kind].popitem(last=False)
        del self._kinds[key]


class _Hits:
    """Fading sums.

    Args:
        half_life: in uses.
    """

    def __init__(self, half_life: int) -> None:
        self._kept = 0.5 ** (_PERIOD / half_life)
        self.lru = self.rival = self.apart = 0.0

    def add(self, lru: int, rival: int, apart: int) -> None:
        """What was counted in a period."""
        self.lru = self.lru * self._kept + lru
        self.rival = self.rival * self._kept + rival
        self.apart = self.apart * self._kept + apart
