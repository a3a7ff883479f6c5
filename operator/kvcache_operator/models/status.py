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
    """What one pod takes, as computed from the spec. Sizes of tiers in the spec are those of a replica."""

    gpus: int
    """GPUs: one for each rank."""
    ranks: int = 1
    """Worker processes: tensor times pipeline parallelism."""
    memory: str
    """Host memory that is asked for, the caches included."""
    shared_memory: str
    """Size of /dev/shm."""
    ephemeral_storage: str | None = None
    """Disk of the node that is asked for; absent where the disk tier is on a claim or absent."""
    cpu_tier_per_rank: str
    """Host memory of the cache in each worker process."""
    total_memory: str = ""
    """Host memory of all replicas together."""


class TierStatus(_Written):
    """One tier of all pods together, rounded."""

    name: str = Field(max_length=63)
    """Name of the tier: cpu, disk, remote or that of a plugin."""
    state: str = Field(max_length=128)
    """Ready, or the reason why it is not."""
    capacity: str
    """Bytes that it may hold."""
    used: str
    """Bytes that it holds."""
    hit_tokens: int
    """Tokens that it has given back since the pods started."""


class CacheStatus(_Written):
    """What the cache does, as the admin sidecars tell; refreshed every half a minute, and only rounded."""

    hit_rate: str = "-"
    """Percent of the tokens that vLLM had not itself which the cache gave back in the last five minutes; a
    dash while there are none."""
    lookup_tokens: int = 0
    """Tokens looked up in that time."""
    hit_tokens: int = 0
    """Tokens given back in that time."""
    updated_at: str = ""
    """When the numbers last changed, RFC 3339 in UTC."""
    tiers: tuple[TierStatus, ...] = Field(default=(), strict=False, max_length=16)
    """Each tier."""


class PodStatus(_Written):
    """One pod."""

    name: str
    """Its name."""
    node: str | None = None
    """The node it runs on."""
    ready: bool = False
    """Whether it serves, its cache included."""
    reason: str | None = None
    """Why not, in one CamelCase word; absent when it is ready."""
    message: str | None = Field(default=None, max_length=1024)
    """Why not, in a sentence."""


class FlushStatus(_Written):
    """The last flush that was asked for by annotation."""

    request_id: str = Field(alias="requestID", max_length=256)
    """The value of the annotation flush-requested-at."""
    requested_at: str
    """When the operator saw it, RFC 3339 in UTC."""
    completed_at: str | None = None
    """When the last pod had answered; absent while it runs."""
    tiers: tuple[str, ...] = Field(default=(), strict=False, max_length=16)
    """Tiers that were to be flushed."""
    complete: bool = False
    """Nothing that was stored when it began is left in any of these tiers of any pod."""
    message: str | None = Field(default=None, max_length=1024)
    """Why it is not complete."""
    failed_pods: tuple[str, ...] = Field(default=(), strict=False, max_length=64)
    """Pods where it is not complete."""


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
    engine_version: str | None = None
    """Version of vLLM, as a pod tells."""
    connector_version: str | None = None
    """Version of the cache in the pods, as a pod tells."""
    connector: str = ""
    """The connector that vLLM was told to load."""
    cache_namespace: str | None = None
    """Digest of all that must be equal for pods to share chunks, as the first rank tells."""
    endpoint: str = ""
    """URL of the completions API inside the cluster."""
    admin_endpoint: str = ""
    """URL of the admin API inside the cluster."""
    cache: CacheStatus | None = None
    """What the cache does; absent until a pod was asked."""
    pods: tuple[PodStatus, ...] = Field(default=(), strict=False, max_length=64)
    """Each pod."""
    pending_restart: tuple[str, ...] = Field(default=(), strict=False, max_length=64)
    """Fields of the engine's configuration that some pod does not run yet, since they wait for its next
    start."""
    last_flush: FlushStatus | None = None
    """The last flush that was asked for by annotation."""
    budget: BudgetStatus | None = None
    """What one pod takes; absent while the spec is not accepted."""
    conditions: tuple[Condition, ...] = Field(
        default=(),
        strict=False,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Accepted, Progressing, Available, CacheTiersReady, Degraded, Suspended and Ready."""
