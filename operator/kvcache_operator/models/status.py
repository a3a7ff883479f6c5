# SPDX-License-Identifier: Apache-2.0
"""What the operator writes below `status`: each key stands here, or the API server would drop it."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from kvcache_operator.models.base import Part


class _Written(Part):
    model_config = ConfigDict(validate_by_name=True)


class Condition(_Written):
    """One condition, as Kubernetes' conventions have it."""

    type: str = Field(max_length=64)
    """Name of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: str = Field(max_length=128)
    """Why, in one CamelCase word."""
    message: str = Field(min_length=1, max_length=4096)
    """Why, in a sentence."""
    last_transition_time: str
    """When `status` last changed, RFC 3339 in UTC."""
    observed_generation: int = Field(default=0, ge=0)
    """The generation of the resource that this is about."""


class BudgetStatus(_Written):
    """What one pod takes, as computed from the spec."""

    gpus: int
    """GPUs."""
    memory: str
    """Host memory that is asked for, the caches included."""
    shared_memory: str
    """Size of /dev/shm."""
    cpu_tier_per_rank: str
    """Host memory of the cache in each worker process."""


class Status(_Written):
    """The state of a resource as last seen."""

    observed_generation: int = Field(default=0, ge=0)
    """The generation of the spec that the rest of the status is about."""
    replicas: int = 0
    """Pods that exist."""
    ready_replicas: int = 0
    """Pods that serve, their caches included."""
    updated_replicas: int = 0
    """Pods of the newest template."""
    selector: str = ""
    """Label selector of the pods, for the scale subresource."""
    image: str = ""
    """Image of the pods."""
    endpoint: str = ""
    """URL of the completions API inside the cluster."""
    admin_endpoint: str = ""
    """URL of the admin API inside the cluster."""
    budget: BudgetStatus | None = None
    """What one pod takes; absent while the spec is not accepted."""
    conditions: tuple[Condition, ...] = Field(default=(), strict=False, max_length=16)
    """Accepted, Progressing, Available, CacheTiersReady, Degraded and Ready."""
