# SPDX-License-Identifier: Apache-2.0
"""The KVCache resource as a whole."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from kvcache_operator.models.access import (
    AdminSpec,
    LabelKey,
    LabelValue,
    MetricsSpec,
    NetworkPolicySpec,
)
from kvcache_operator.models.base import Part, rules
from kvcache_operator.models.cache import CacheSpec
from kvcache_operator.models.engine import EngineSpec
from kvcache_operator.models.model import ModelSpec
from kvcache_operator.models.pods import (
    Affinity,
    DisruptionSpec,
    PodTemplate,
    ResourcesSpec,
    RolloutSpec,
    SpreadConstraint,
    Toleration,
)
from kvcache_operator.models.refs import ObjectName

MAX_NAME = 45
"""So that `<name>-admin-token` and the names of pods, with their hashes, fit into 63 characters."""


def _check_name(name: str) -> str:
    # A Service of this name needs a DNS-1035 label: a letter first.
    if len(name) > MAX_NAME or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise ValueError(
            f"{name!r} cannot name the resource's Service; "
            f"use at most {MAX_NAME} lower-case letters, digits and dashes, a letter first"
        )
    return name


def _check_namespace(name: str) -> str:
    if len(name) > 63 or not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
        raise ValueError(f"{name!r} names no namespace; use at most 63 lower-case letters, digits and dashes")
    return name


class Metadata(Part):
    """The parts of Kubernetes' metadata that the operator reads; the rest passes by."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, AfterValidator(_check_name)]
    namespace: Annotated[str, AfterValidator(_check_namespace)] = "default"
    uid: str | None = None
    generation: int | None = None
    annotations: dict[str, str] = Field(default={})


class KVCacheSpec(Part):
    """What is asked for."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.engine.port != self.admin.port && (self.cache.events.mode == 'Disabled' || "
                "(self.cache.events.port != self.engine.port && self.cache.events.port != self.admin.port))",
                "the ports of engine, admin and events must be different",
                ".admin.port",
            ),
            (
                "(has(self.cache.tiers.disk) && has(self.cache.tiers.disk.volume.claimTemplate)) == "
                "(has(oldSelf.cache.tiers.disk) && has(oldSelf.cache.tiers.disk.volume.claimTemplate))",
                "a disk tier with a claimTemplate can be neither added nor removed: it makes another kind of "
                "workload; delete the resource and create it anew",
                ".cache.tiers.disk",
            ),
            (
                "!has(self.cache.tiers.disk) || !has(self.cache.tiers.disk.volume.claimName) || "
                "self.rollout.maxSurge == 0",
                "pods that surge would wait for the claim of the disk tier; set maxSurge to 0",
                ".rollout.maxSurge",
            ),
        )
    )

    replicas: int = Field(default=1, ge=0, le=64)
    """Pods that serve the model, each with a cache of its own."""
    replicas_mode: Literal["Managed", "External"] = "Managed"
    """Managed: pods follow `replicas`. External: something else, such as a HorizontalPodAutoscaler, scales
    the Deployment or StatefulSet, and `replicas` has no meaning."""
    suspend: bool = False
    """Ends all pods and keeps everything else, claims too."""
    model: ModelSpec
    """What is served."""
    engine: EngineSpec = EngineSpec()
    """How it is served."""
    resources: ResourcesSpec = ResourcesSpec()
    """What the engine's container asks for."""
    runtime_class_name: ObjectName | None = None
    """Runtime class of the pods, such as `nvidia` where GPUs need one."""
    node_selector: dict[LabelKey, LabelValue] = Field(default={}, max_length=32)
    """Labels of the nodes that pods may run on."""
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=32, strict=False)
    """Taints that pods tolerate."""
    affinity: Affinity | None = None
    """Where pods go."""
    topology_spread_constraints: tuple[SpreadConstraint, ...] = Field(default=(), max_length=8, strict=False)
    """How pods spread. Default: over nodes, as far as that is possible."""
    priority_class_name: ObjectName | None = None
    """Priority class of the pods."""
    service_account_name: ObjectName | None = None
    """Service account of the pods; its token is not mounted."""
    cache: CacheSpec
    """What is kept of the prompts."""
    admin: AdminSpec = AdminSpec()
    """The sidecar that answers for the cache."""
    metrics: MetricsSpec = MetricsSpec()
    """How metrics are collected."""
    network_policy: NetworkPolicySpec = NetworkPolicySpec()
    """Who may connect to the pods."""
    rollout: RolloutSpec = RolloutSpec()
    """How pods are replaced."""
    pod_disruption_budget: DisruptionSpec = DisruptionSpec()
    """Protection against draining all nodes at once."""
    pod_template: PodTemplate = PodTemplate()
    """What is laid over the pod, for all that has no field of its own."""
    reclaim_policy: Literal["Retain", "Delete"] = "Retain"
    """What happens to claims of a claimTemplate and to this namespace's chunks in a remote tier when the
    resource is deleted. Delete holds the resource by a finalizer until it is done."""
    experimental: dict[LabelKey, Annotated[str, Field(max_length=1024)]] = Field(default={}, max_length=32)
    """Keys of the engine's configuration that have no field here, such as min_retrieve_tokens. They may
    change or go with any version."""

    @property
    def uses_claim_template(self) -> bool:
        """Whether each replica has a claim of its own, which makes the workload a StatefulSet."""
        disk = self.cache.tiers.disk
        return disk is not None and disk.volume.claim_template is not None


class KVCache(Part):
    """One KVCache resource."""

    api_version: Literal["kvcache.dev/v1alpha1"]
    kind: Literal["KVCache"]
    metadata: Metadata
    spec: KVCacheSpec
    status: dict[str, Any] | None = None
    """Written by the operator and never read from here."""
