# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: which stored chunk leaves first."""

from typing import Any

from kvcache.storage.policies.base import AdmissionPolicy, EvictionPolicy
from kvcache.storage.policies.lru import LRUPolicy

POLICIES: dict[str, type[EvictionPolicy[Any]]] = {"LRU": LRUPolicy}
"""By the name that the configuration gives."""

__all__ = ["POLICIES", "AdmissionPolicy", "EvictionPolicy", "LRUPolicy"]
