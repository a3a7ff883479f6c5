# SPDX-License-Identifier: Apache-2.0
"""The KVCache resource as pydantic models: the one place that says which fields there are and what fits."""

from kvcache_operator.models.cache import AdminSpec, CacheSpec, CpuTier, Role, Tiers, Transfer
from kvcache_operator.models.engine import MODELS_MOUNT, Device, EngineSpec, EnvVar, ModelSpec
from kvcache_operator.models.measures import Duration, Quantity
from kvcache_operator.models.resource import KVCache, KVCacheSpec, Metadata
from kvcache_operator.models.status import BudgetStatus, Condition, Status

__all__ = [
    "MODELS_MOUNT",
    "AdminSpec",
    "BudgetStatus",
    "CacheSpec",
    "Condition",
    "CpuTier",
    "Device",
    "Duration",
    "EngineSpec",
    "EnvVar",
    "KVCache",
    "KVCacheSpec",
    "Metadata",
    "ModelSpec",
    "Quantity",
    "Role",
    "Status",
    "Tiers",
    "Transfer",
]
