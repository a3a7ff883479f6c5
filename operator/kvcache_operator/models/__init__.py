# SPDX-License-Identifier: Apache-2.0
"""The KVCache resource as pydantic models: the one place that says which fields there are and what fits."""

from kvcache_operator.models.access import AdminSpec, MonitorMode, MonitorSpec, NetworkPolicySpec
from kvcache_operator.models.cache import NEEDS_SHARED, CacheSpec, EventsMode, Role, Transfer
from kvcache_operator.models.engine import Device, EngineSpec, EnvVar, owned_variable
from kvcache_operator.models.measures import Duration, Quantity
from kvcache_operator.models.model import MODELS_MOUNT, ModelSpec
from kvcache_operator.models.pods import Amounts, PodTemplate
from kvcache_operator.models.refs import SecretKey
from kvcache_operator.models.resource import MAX_NAME, KVCache, KVCacheSpec, Metadata
from kvcache_operator.models.status import (
    BudgetStatus,
    CacheStatus,
    Condition,
    FlushStatus,
    PodStatus,
    Status,
    TierStatus,
)
from kvcache_operator.models.tiers import CpuTier, DiskTier, RemoteTier, Tiers

__all__ = [
    "MAX_NAME",
    "MODELS_MOUNT",
    "NEEDS_SHARED",
    "AdminSpec",
    "Amounts",
    "BudgetStatus",
    "CacheSpec",
    "CacheStatus",
    "Condition",
    "CpuTier",
    "Device",
    "DiskTier",
    "Duration",
    "EngineSpec",
    "EnvVar",
    "EventsMode",
    "FlushStatus",
    "KVCache",
    "KVCacheSpec",
    "Metadata",
    "ModelSpec",
    "MonitorMode",
    "MonitorSpec",
    "NetworkPolicySpec",
    "PodStatus",
    "PodTemplate",
    "Quantity",
    "RemoteTier",
    "Role",
    "SecretKey",
    "Status",
    "TierStatus",
    "Tiers",
    "Transfer",
    "owned_variable",
]
