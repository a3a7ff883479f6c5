# SPDX-License-Identifier: Apache-2.0
"""Least frequently used, with ageing."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable

from kvcache.storage.policies.base import EvictionPolicy, K
from kvcache.storage.policies.order import Order


class LFUPolicy(EvictionPolicy[K]):
    """What was asked for least often leaves first, of equals the one that was asked for longest ago.

    A key's priority is the number of its uses while it is here, plus the cache's age at the last one; the age
    is the priority of the last victim, so that what was popular once leaves in the end (LFU-DA: Arlitt et
    al., Evaluating Content Management Techniques for Web Proxy Caches, 2000).
    """

    def __init__(self, capacity: int) -> None:
        self._age = 0
        self._uses: dict[K, int] = {}
        self._priority: dict[K, int] = {}
        self._buckets: defaultdict[int, OrderedDict[K, None]] = defaultdict(OrderedDict)
        """Keys by priority, in the order of their last use."""
        self._lowest = 0
        """No bucket lies below."""
        self._passed: Order[K] = Order()
        """Had the lowest priority, but could not leave."""

    def admit(self, key: K) -> None:
        self._use(key, 1)

    def touch(self, key: K) -> None:
        self._take_out(key)
        self._use(key, self._uses[key] + 1)

    def remove(self, key: K) -> None:
        self._take_out(key)
        del self._uses[key], self._priority[key]

    def candidate(self, evictable: Callable[[K], bool]) -> K | None:
        key = self._passed.first(evictable)
        if key is not None:
            return key
        while self._buckets:
            if self._lowest not in self._buckets:
                self._lowest += 1
                continue
            key = next(iter(self._buckets[self._lowest]))
            if evictable(key):
                return key
            self._take_out(key)
            self._passed.add(key)
        return self._passed.last_resort(evictable)

    def evict(self, key: K) -> None:
        self._age = max(self._age, self._priority[key])
        self.remove(key)

    def became_leaf(self, key: K) -> None:
        self._passed.became_leaf(key)

    def __len__(self) -> int:
        return len(self._uses)

    def _use(self, key: K, uses: int) -> None:
        priority = self._age + uses
        self._uses[key], self._priority[key] = uses, priority
        self._buckets[priority][key] = None
        self._lowest = min(self._lowest, priority)

    def _take_out(self, key: K) -> None:
        if key in self._passed:
            self._passed.remove(key)
            return
        priority = self._priority[key]
        bucket = self._buckets[priority]
        del bucket[key]
        if not bucket:
            del self._buckets[priority]
