# SPDX-License-Identifier: Apache-2.0
"""Least recently used."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.storage.policies.base import EvictionPolicy, K
from kvcache.storage.policies.order import Order, first_of


class LRUPolicy(EvictionPolicy[K]):
    """What was asked for longest ago leaves first."""

    def __init__(self, capacity: int) -> None:
        self._order: Order[K] = Order()

    def admit(self, key: K) -> None:
        self._order.add(key)

    def touch(self, key: K) -> None:
        self._order.add(key)

    def remove(self, key: K) -> None:
        self._order.remove(key)

    def candidate(self, evictable: Callable[[K], bool]) -> K | None:
        return first_of([self._order], evictable)

    def evict(self, key: K) -> None:
        self._order.remove(key)

    def became_leaf(self, key: K) -> None:
        self._order.became_leaf(key)

    def __len__(self) -> int:
        return len(self._order)
