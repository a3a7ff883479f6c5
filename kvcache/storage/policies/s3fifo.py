# SPDX-License-Identifier: Apache-2.0
"""S3-FIFO (Yang et al., FIFO Queues are All You Need for Cache Eviction, SOSP 2023)."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.storage.policies.base import EvictionPolicy, K
from kvcache.storage.policies.ghosts import Ghosts
from kvcache.storage.policies.order import Order

_SMALL_SHARE = 0.1
_MOST_USES = 3

_NextOf = Callable[[Order[K], Callable[[K], bool]], K | None]


class S3FIFOPolicy(EvictionPolicy[K]):
    """A newcomer goes through a small queue, a tenth of the tier. Asked for twice before its end it moves on
    to the main queue; else it leaves, and is remembered: if it comes back it starts in the main queue. In
    that one, what was asked for since its last turn goes round again, once for each time up to three."""

    def __init__(self, capacity: int) -> None:
        self._small_size = max(1, round(capacity * _SMALL_SHARE))
        self._small: Order[K] = Order()
        self._main: Order[K] = Order()
        self._uses: dict[K, int] = {}
        """Since the key came, or since its last turn."""
        self._gone: Ghosts[K] = Ghosts(max(1, capacity - self._small_size))

    def admit(self, key: K) -> None:
        self._uses[key] = 0
        (self._main if self._gone.forget(key) else self._small).add(key)

    def touch(self, key: K) -> None:
        self._uses[key] = min(_MOST_USES, self._uses[key] + 1)

    def remove(self, key: K) -> None:
        del self._uses[key]
        (self._small if key in self._small else self._main).remove(key)

    def candidate(self, evictable: Callable[[K], bool]) -> K | None:
        queues = [self._of_small, self._of_main]
        if len(self._small) < self._small_size:
            queues.reverse()
        next_of: _NextOf[K]
        # The last resort may give keys another turn, which is then their last.
        for next_of in (Order.first, Order.last_resort, Order.first):
            for of_queue in queues:
                key = of_queue(next_of, evictable)
                if key is not None:
                    return key
        return None

    def evict(self, key: K) -> None:
        if key in self._small:
            self._gone.add(key)
        self.remove(key)

    def became_leaf(self, key: K) -> None:
        (self._small if key in self._small else self._main).became_leaf(key)

    def __len__(self) -> int:
        return len(self._uses)

    def _of_small(self, next_of: _NextOf[K], evictable: Callable[[K], bool]) -> K | None:
        while (key := next_of(self._small, evictable)) is not None and self._uses[key] > 1:
            self._small.remove(key)
            self._main.add(key)
            self._uses[key] = 0
        return key

    def _of_main(self, next_of: _NextOf[K], evictable: Callable[[K], bool]) -> K | None:
        while (key := next_of(self._main, evictable)) is not None and self._uses[key] > 0:
            self._main.add(key)
            self._uses[key] -= 1
        return key
