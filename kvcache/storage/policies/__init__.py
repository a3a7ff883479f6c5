# SPDX-License-Identifier: Apache-2.0
"""Policies: which stored chunk leaves first, and which is let in at all."""

from typing import Any

from kvcache.storage.policies.adaptive import AdaptiveAdmission, AdaptivePolicy
from kvcache.storage.policies.arc import ARCPolicy
from kvcache.storage.policies.base import AdmissionPolicy, EvictionPolicy
from kvcache.storage.policies.fifo import FIFOPolicy
from kvcache.storage.policies.lfu import LFUPolicy
from kvcache.storage.policies.lru import LRUPolicy
from kvcache.storage.policies.mru import MRUPolicy
from kvcache.storage.policies.s3fifo import S3FIFOPolicy
from kvcache.storage.policies.second_use import SecondUseAdmission
from kvcache.storage.policies.tinylfu import TinyLFUAdmission

POLICIES: dict[str, type[EvictionPolicy[Any]]] = {
    "Adaptive": AdaptivePolicy,
    "LRU": LRUPolicy,
    "LFU": LFUPolicy,
    "FIFO": FIFOPolicy,
    "MRU": MRUPolicy,
    "S3FIFO": S3FIFOPolicy,
    "ARC": ARCPolicy,
}
"""By the name that the configuration gives."""
ADMISSIONS: dict[str, type[AdmissionPolicy[Any]]] = {
    "Adaptive": AdaptiveAdmission,
    "SecondUse": SecondUseAdmission,
    "TinyLFU": TinyLFUAdmission,
}
"""By the name that the configuration gives; `Always` needs none."""

__all__ = ["ADMISSIONS", "POLICIES", "AdmissionPolicy", "EvictionPolicy", "LRUPolicy"]
