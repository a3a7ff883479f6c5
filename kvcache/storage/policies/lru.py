# SPDX-License-Identifier: Apache-2.0
"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvcache.storage.policies.base import EvictionPolicy
from kvcache.tokens.keys import CacheEngineKey


class LRUPolicy(EvictionPolicy):
    """What was asked for longest ago leaves first; each operation takes constant time."""

    def __init__(self) -> None:
        self._order: OrderedDict[CacheEngineKey, None] = OrderedDict()

    def admit(self, key: CacheEngineKey) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def touch(self, key: CacheEngineKey) -> None:
        self._order.move_to_end(key)

    def remove(self, key: CacheEngineKey) -> None:
        del self._order[key]

    def victims(self) -> Iterator[CacheEngineKey]:
        return iter(self._order)
