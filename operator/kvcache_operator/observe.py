# SPDX-License-Identifier: Apache-2.0
"""Reads what became of the children of a resource."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcache_operator.render import Manifest


@dataclass(frozen=True)
class Observed:
    """A Deployment as far as the status of its resource depends on it."""

    is_current: bool
    """The numbers are about the newest template; before its controller has seen it they are not."""
    wanted: int
    replicas: int
    updated: int
    ready: int
    stuck: str
    """Why the rollout does not go on, empty while it does."""
    failure: str
    """Why pods cannot be created, empty when they can."""

    @property
    def is_complete(self) -> bool:
        """All pods are of the newest template and ready."""
        return self.is_current and self.replicas == self.updated == self.ready == self.wanted


def observe(deployment: Manifest) -> Observed:
    """The state of a Deployment as the API server gives it."""
    spec, status = deployment["spec"], deployment.get("status") or {}
    conditions: dict[str, dict[str, Any]] = {entry["type"]: entry for entry in status.get("conditions") or ()}
    progressing, failing = conditions.get("Progressing", {}), conditions.get("ReplicaFailure", {})
    return Observed(
        is_current=(status.get("observedGeneration") or 0) >= deployment["metadata"].get("generation", 0),
        wanted=spec["replicas"],
        replicas=status.get("replicas") or 0,
        updated=status.get("updatedReplicas") or 0,
        ready=status.get("readyReplicas") or 0,
        stuck=progressing.get("message", "") if progressing.get("status") == "False" else "",
        failure=failing.get("message", "") if failing.get("status") == "True" else "",
    )
