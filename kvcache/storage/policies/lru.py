# SPDX-License-Identifier: Apache-2.0
"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvcache.storage.policies.base import EvictionPolicy, K


class LRUPolicy(EvictionPolicy[K]):
    """What was asked for longest ago leaves first; each operation takes constant time."""

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def admit(self, key: K) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def touch(self, key: K) -> None:
        self._order.move_to_end(key)

    def remove(self, key: K) -> None:
        del self._order[key]

    def victim(self, evictable: Callable[[K], bool]) -> K | None:
        key = next((key for key in self._order if evictable(key)), None)
        if key is not None:
            del self._order[key]
        return key

    def __len__(self) -> int:
        return len(self._order)
