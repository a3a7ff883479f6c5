# SPDX-License-Identifier: Apache-2.0
"""Policies that learn what is worth keeping, and for how long."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic

from kvcache.storage.policies.base import AdmissionPolicy, EvictionPolicy, K
from kvcache.storage.policies.lifetimes import CLASSES, ReuseClock, Use
from kvcache.storage.policies.order import Order

_REMEMBERED = 4
"""Keys that are not here, for each one that there is room for."""
_SHORTEST = 1e-3
"""Stands for a lifetime of 0."""


class AdaptivePolicy(EvictionPolicy[K]):
    """A list in the order of the last use for each class of keys; of the keys whose turn it is in their
    lists, the one that is furthest past its lifetime leaves (`kvcache.storage.policies.lifetimes`)."""

    def __init__(self, capacity: int) -> None:
        self._clock = ReuseClock(capacity)
        self._orders: list[Order[K]] = [Order() for _ in range(CLASSES)]
        self._here: dict[K, Use] = {}
        self._gone: _LastUses[K] = _LastUses(_REMEMBERED * max(1, capacity))

    def admit(self, key: K) -> None:
        self._use(key, self._gone.pop(key))

    def touch(self, key: K) -> None:
        previous = self._here[key]
        self._orders[previous.kind].remove(key)
        self._use(key, previous)

    def remove(self, key: K) -> None:
        self._orders[self._here.pop(key).kind].remove(key)

    def candidate(self, evictable: Callable[[K], bool]) -> K | None:
        for next_of in (Order.first, Order.last_resort):
            keys = [key for order in self._orders if (key := next_of(order, evictable)) is not None]
            if keys:
                return max(keys, key=self._overdue)
        return None

    def evict(self, key: K) -> None:
        self._gone.put(key, self._here[key])
        self.remove(key)

    def became_leaf(self, key: K) -> None:
        use = self._here.get(key)
        if use is not None:
            self._orders[use.kind].became_leaf(key)

    def __len__(self) -> int:
        return len(self._here)

    def _use(self, key: K, previous: Use | None) -> None:
        use = self._clock.use(previous)
        self._here[key] = use
        self._orders[use.kind].add(key)

    def _overdue(self, key: K) -> float:
        """The time since the last use, in lifetimes."""
        use = self._here[key]
        return (self._clock.time - use.time) / max(self._clock.plan.lifetimes[use.kind], _SHORTEST)


class AdaptiveAdmission(AdmissionPolicy[K]):
    """Lets all in while there is room, and then those classes of keys that are worth writing: in little room,
    what was used once is mostly not. It needs no particular eviction policy."""

    def __init__(self, capacity: int) -> None:
        self._clock = ReuseClock(capacity)
        self._used: _LastUses[K] = _LastUses((1 + _REMEMBERED) * max(1, capacity))

    def seen(self, key: K) -> None:
        self._used.put(key, self._clock.use(self._used.pop(key)))

    def admits(self, key: K, victim: K | None) -> bool:
        use = self._used.get(key)
        return victim is None or use is None or self._clock.plan.worth_writing[use.kind]


class _LastUses(Generic[K]):
    """Of the keys that were used last.

    Args:
        limit: how many are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._uses: OrderedDict[K, Use] = OrderedDict()

    def put(self, key: K, use: Use) -> None:
        """Of a key that is not there."""
        self._uses[key] = use
        if len(self._uses) > self._limit:
            self._uses.popitem(last=False)

    def pop(self, key: K) -> Use | None:
        return self._uses.pop(key, None)

    def get(self, key: K) -> Use | None:
        return self._uses.get(key)
