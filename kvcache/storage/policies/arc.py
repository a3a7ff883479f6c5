# SPDX-License-Identifier: Apache-2.0
"""ARC (Megiddo and Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003)."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.storage.policies.base import EvictionPolicy, K
from kvcache.storage.policies.ghosts import Ghosts
from kvcache.storage.policies.order import Order, first_of


class ARCPolicy(EvictionPolicy[K]):
    """Two LRU lists, of keys used once and of keys used more often; a key that comes back soon after it left
    one of them makes that one's share greater.

    Differs from the paper in one point: room is made before it is known for which key, so that a key's return
    counts from the next victim on.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._once_share = 0.0
        """Keys used once that may stay (`p` in the paper)."""
        self._once: Order[K] = Order()
        self._often: Order[K] = Order()
        self._once_gone: Ghosts[K] = Ghosts(self._capacity)
        self._often_gone: Ghosts[K] = Ghosts(2 * self._capacity)

    def admit(self, key: K) -> None:
        once_gone, often_gone = len(self._once_gone), len(self._often_gone)
        if self._once_gone.forget(key):
            self._once_share = min(self._capacity, self._once_share + max(1.0, often_gone / once_gone))
            self._often.add(key)
        elif self._often_gone.forget(key):
            self._once_share = max(0.0, self._once_share - max(1.0, once_gone / often_gone))
            self._often.add(key)
        else:
            self._once.add(key)
        self._bound_ghosts()

    def touch(self, key: K) -> None:
        if key in self._once:
            self._once.remove(key)
        self._often.add(key)

    def remove(self, key: K) -> None:
        (self._once if key in self._once else self._often).remove(key)

    def candidate(self, evictable: Callable[[K], bool]) -> K | None:
        once_first = len(self._once) > self._once_share
        orders = (self._once, self._often) if once_first else (self._often, self._once)
        return first_of(orders, evictable)

    def evict(self, key: K) -> None:
        (self._once_gone if key in self._once else self._often_gone).add(key)
        self.remove(key)

    def became_leaf(self, key: K) -> None:
        self._once.became_leaf(key)
        self._often.became_leaf(key)

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    def _bound_ghosts(self) -> None:
        """Used once, here or gone: at most the capacity; all together: at most twice that."""
        while self._once_gone and len(self._once) + len(self._once_gone) > self._capacity:
            self._once_gone.forget_oldest()
        gone = len(self._once_gone) + len(self._often_gone)
        while self._often_gone and len(self) + gone > 2 * self._capacity:
            self._often_gone.forget_oldest()
            gone -= 1
