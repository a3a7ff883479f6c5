# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: which stored chunk leaves first."""

from kvcache.storage.policies.base import EvictionPolicy
from kvcache.storage.policies.lru import LRUPolicy

POLICIES: dict[str, type[EvictionPolicy]] = {"LRU": LRUPolicy}
"""By the name that the configuration gives."""

__all__ = ["POLICIES", "EvictionPolicy", "LRUPolicy"]
