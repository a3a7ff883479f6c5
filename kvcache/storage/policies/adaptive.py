# SPDX-License-Identifier: Apache-2.0
"""Policies that learn what is worth keeping, and for how long.

They do what LRU does until they have shown on the tier's own uses that they hit more.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic

from kvcache.storage.policies.base import AdmissionPolicy, EvictionPolicy, K
from kvcache.storage.policies.lifetimes import CLASSES, ReuseClock, Use
from kvcache.storage.policies.order import Order
from kvcache.storage.policies.trial import SHORTEST_LIFETIME, GateRival, LifetimesRival, Trial

_REMEMBERED = 4
"""Keys that are not here, for each one that there is room for."""
_MOST_NOTES = 4096
"""Uses that were not taken in yet. Where a tier is read alone and nothing has to be decided, the oldest are
forgotten."""
_NOTES_AT_ONCE = 256
"""Taken in before a decision: half a millisecond at most."""
_EVICTION_MARGIN = 0.01
_ADMISSION_MARGIN = 0.04
"""Of LRU's hits: a gate that turned out wrong has not even written what is missed."""


class AdaptivePolicy(EvictionPolicy[K]):
    """A list in the order of the last use for each class of keys; of the keys whose turn it is in their
    lists, the one that is furthest past its lifetime leaves (`kvcache.storage.policies.lifetimes`). As long
    as LRU would hit as much (`kvcache.storage.policies.trial`), the one whose last use is longest ago.

    Lookups wait for `touch`: what it tells is noted, and taken in when something is decided.
    """

    def __init__(self, capacity: int) -> None:
        self._clock = ReuseClock(capacity)
        self._trial: Trial[K] = Trial(capacity, LifetimesRival, _EVICTION_MARGIN)
        self._orders: list[Order[K]] = [Order() for _ in range(CLASSES)]
        self._here: dict[K, Use] = {}
        self._gone: _LastUses[K] = _LastUses(_REMEMBERED * max(1, capacity))
        self._touched: _Notes[K] = _Notes()

    def admit(self, key: K) -> None:
        self._settle()
        self._use(key, self._gone.pop(key))

    def touch(self, key: K) -> None:
        self._touched.add([key])

    def touch_all(self, keys: Iterable[K]) -> None:
        self._touched.add(keys)

    def remove(self, key: K) -> None:
        self._settle()
        self._orders[self._here.pop(key).kind].remove(key)

    def candidate(self, evictable: Callable[[K], bool]) -> K | None:
        self._settle()
        for next_of in (Order.first, Order.last_resort):
            keys = [key for order in self._orders if (key := next_of(order, evictable)) is not None]
            if keys:
                return max(keys, key=self._overdue)
        return None

    def evict(self, key: K) -> None:
        self._settle()
        self._gone.put(key, self._here[key])
        self.remove(key)

    def became_leaf(self, key: K) -> None:
        self._settle()
        use = self._here.get(key)
        if use is not None:
            self._orders[use.kind].became_leaf(key)

    def __len__(self) -> int:
        return len(self._here)

    def _settle(self) -> None:
        for key in self._touched.take():
            previous = self._here.get(key)
            if previous is not None:
                self._orders[previous.kind].remove(key)
                self._use(key, previous)

    def _use(self, key: K, previous: Use | None) -> None:
        use = self._clock.use(previous)
        self._here[key] = use
        self._orders[use.kind].add(key)
        self._trial.use(key, use, self._clock.plan)

    def _overdue(self, key: K) -> float:
        """The time since the last use: in lifetimes, or for LRU in uses."""
        use = self._here[key]
        unit = max(self._clock.plan.lifetimes[use.kind], SHORTEST_LIFETIME) if self._trial.won else 1.0
        return (self._clock.time - use.time) / unit


class AdaptiveAdmission(AdmissionPolicy[K]):
    """Lets all in while there is room, and then those classes of keys that are worth writing: in little room,
    what was used once is mostly not. As long as LRU would hit as much without that, lets all in. It needs no
    particular eviction policy. What `seen` tells is noted, as in `AdaptivePolicy`."""

    def __init__(self, capacity: int) -> None:
        self._clock = ReuseClock(capacity)
        self._trial: Trial[K] = Trial(capacity, GateRival, _ADMISSION_MARGIN)
        self._used: _LastUses[K] = _LastUses((1 + _REMEMBERED) * max(1, capacity))
        self._seen: _Notes[K] = _Notes()

    def seen(self, key: K) -> None:
        self._seen.add([key])

    def seen_all(self, keys: Iterable[K]) -> None:
        self._seen.add(keys)

    def admits(self, key: K, victim: K | None) -> bool:
        for noted in self._seen.take():
            now = self._clock.use(self._used.pop(noted))
            self._used.put(noted, now)
            self._trial.use(noted, now, self._clock.plan)
        use = self._used.get(key)
        if victim is None or use is None or not self._trial.won:
            return True
        return self._clock.plan.worth_writing[use.kind]


class _Notes(Generic[K]):
    """Keys in the order of their use, the oldest of which are forgotten."""

    def __init__(self) -> None:
        self._keys: deque[K] = deque(maxlen=_MOST_NOTES)

    def add(self, keys: Iterable[K]) -> None:
        self._keys.extend(keys)

    def take(self) -> Iterator[K]:
        """The oldest ones, which are no notes any more."""
        for _ in range(min(_NOTES_AT_ONCE, len(self._keys))):
            yield self._keys.popleft()


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
