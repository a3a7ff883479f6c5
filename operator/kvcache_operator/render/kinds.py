# SPDX-License-Identifier: Apache-2.0
"""Which kinds of objects a cluster has, as far as what is rendered depends on it."""

from __future__ import annotations

from dataclasses import dataclass

MONITORING = "monitoring.coreos.com/v1"


@dataclass(frozen=True)
class Kinds:
    """Found by discovery; the defaults are those of a new cluster without Prometheus' operator."""

    disruption_budget: str = "policy/v1"
    """API version of PodDisruptionBudget."""
    pod_monitor: bool = False
    service_monitor: bool = False
