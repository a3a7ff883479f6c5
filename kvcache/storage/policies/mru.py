# SPDX-License-Identifier: Apache-2.0
"""Most recently used."""

from __future__ import annotations

from kvcache.storage.policies.base import K
from kvcache.storage.policies.lru import LRUPolicy
from kvcache.storage.policies.order import Order


class MRUPolicy(LRUPolicy[K]):
    """What was asked for last leaves first: right where the same prompts come round and round, and more of
    them than there is room for."""

    def __init__(self, capacity: int) -> None:
        self._order: Order[K] = Order(newest_first=True)
