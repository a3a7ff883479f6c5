# SPDX-License-Identifier: Apache-2.0
"""From a plan to Kubernetes objects: pure, one module a kind, equal bytes for equal plans."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_operator.plan import Plan
from kvcache_operator.render.common import Manifest
from kvcache_operator.render.configmap import config_map, connection
from kvcache_operator.render.kinds import MONITORING, Kinds
from kvcache_operator.render.monitor import monitor
from kvcache_operator.render.policies import disruption_budget, network_policy
from kvcache_operator.render.secret import token_secret
from kvcache_operator.render.service import pods_service, service
from kvcache_operator.render.workload import workload

__all__ = ["Kinds", "Manifest", "Reference", "Rendered", "render"]


@dataclass(frozen=True)
class Reference:
    """An object by its kind and name, in the resource's namespace."""

    api_version: str
    kind: str
    name: str


@dataclass(frozen=True)
class Rendered:
    """The children of one resource, apart by how they come to be."""

    token_secret: Manifest | None
    """Created with a random token where there is none, and never changed: rendering stays free of chance.
    None where the resource names a Secret of its own."""
    config_map: Manifest
    service: Manifest
    workload: Manifest
    others: tuple[Manifest, ...]
    unwanted: tuple[Reference, ...]
    """Children that another spec would have; they go if they are there and are the resource's own."""

    @property
    def applied(self) -> tuple[Manifest, ...]:
        """What is applied, in order: what a pod mounts or is protected by comes before the pod."""
        return (self.config_map, self.service, *self.others, self.workload)

    @property
    def all(self) -> tuple[Manifest, ...]:
        """Everything, as it is shown to people."""
        return (*((self.token_secret,) if self.token_secret is not None else ()), *self.applied)


def render(plan: Plan, kinds: Kinds | None = None) -> Rendered:
    """All children of the resource behind `plan` in a cluster with these kinds."""
    kinds = kinds or Kinds()
    optional = (
        network_policy(plan),
        disruption_budget(plan, kinds.disruption_budget),
        monitor(plan, kinds),
    )
    made = tuple(manifest for manifest in optional if manifest is not None)
    return Rendered(
        token_secret=token_secret(plan) if plan.owns_token else None,
        config_map=config_map(plan),
        service=service(plan),
        workload=workload(plan),
        others=(connection(plan), pods_service(plan), *made),
        unwanted=_unwanted(plan, kinds, made),
    )


def _unwanted(plan: Plan, kinds: Kinds, made: tuple[Manifest, ...]) -> tuple[Reference, ...]:
    name = plan.names.workload
    possible = [
        Reference("networking.k8s.io/v1", "NetworkPolicy", name),
        Reference(kinds.disruption_budget, "PodDisruptionBudget", name),
    ]
    if kinds.pod_monitor:
        possible.append(Reference(MONITORING, "PodMonitor", name))
    if kinds.service_monitor:
        possible.append(Reference(MONITORING, "ServiceMonitor", name))
    there = {manifest["kind"] for manifest in made}
    return tuple(entry for entry in possible if entry.kind not in there)
