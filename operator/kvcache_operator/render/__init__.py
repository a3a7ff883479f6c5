# SPDX-License-Identifier: Apache-2.0
"""From a plan to Kubernetes objects: pure, one module a kind, equal bytes for equal plans."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_operator.plan import Plan
from kvcache_operator.render.common import Manifest
from kvcache_operator.render.configmap import config_map
from kvcache_operator.render.deployment import deployment
from kvcache_operator.render.secret import token_secret
from kvcache_operator.render.service import service

__all__ = ["Manifest", "Rendered", "render"]


@dataclass(frozen=True)
class Rendered:
    """The children of one resource, apart by how they come to be."""

    token_secret: Manifest
    """Created with a random token where there is none, and never changed: rendering stays free of chance."""
    config_map: Manifest
    service: Manifest
    deployment: Manifest

    @property
    def applied(self) -> tuple[Manifest, ...]:
        """What is applied on every reconcile, in order: what a pod mounts comes before the pod."""
        return (self.config_map, self.service, self.deployment)


def render(plan: Plan) -> Rendered:
    """All children of the resource behind `plan`."""
    return Rendered(
        token_secret=token_secret(plan),
        config_map=config_map(plan),
        service=service(plan),
        deployment=deployment(plan),
    )
