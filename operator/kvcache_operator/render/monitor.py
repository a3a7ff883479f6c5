# SPDX-License-Identifier: Apache-2.0
"""The monitor by which Prometheus' operator scrapes the pods: vLLM's metrics and the cache's own."""

from __future__ import annotations

from kvcache_operator.models import MonitorMode
from kvcache_operator.plan import Plan
from kvcache_operator.render.common import Manifest, metadata, selector_labels
from kvcache_operator.render.kinds import MONITORING, Kinds
from kvcache_operator.render.service import SCRAPED

# Dashboards and rules choose by namespace, resource and pod; the other two labels are there anyway.
_RESOURCE_LABEL: Manifest = {
    "sourceLabels": ["__meta_kubernetes_pod_label_app_kubernetes_io_instance"],
    "targetLabel": "resource",
}


def monitor(plan: Plan, kinds: Kinds) -> Manifest | None:
    """A PodMonitor or a ServiceMonitor, never both: they would count everything twice."""
    chosen = chosen_monitor(plan.spec.metrics.monitor.mode, kinds)
    if chosen is None:
        return None
    given = plan.spec.metrics.monitor
    endpoints = [
        {
            "port": name,
            "path": "/metrics",
            "interval": given.interval.text,
            "relabelings": [dict(_RESOURCE_LABEL)],
        }
        for name in ("http", "admin")
    ]
    if chosen is MonitorMode.POD_MONITOR:
        spec: Manifest = {
            "selector": {"matchLabels": selector_labels(plan)},
            "podMetricsEndpoints": endpoints,
        }
    else:
        spec = {"selector": {"matchLabels": selector_labels(plan) | SCRAPED}, "endpoints": endpoints}
    return {
        "apiVersion": MONITORING,
        "kind": chosen.value,
        "metadata": metadata(plan, plan.names.workload, given.labels),
        "spec": spec,
    }


def chosen_monitor(mode: MonitorMode, kinds: Kinds) -> MonitorMode | None:
    """Which kind to make; None where it is not wanted or the cluster does not know it."""
    there = {MonitorMode.POD_MONITOR: kinds.pod_monitor, MonitorMode.SERVICE_MONITOR: kinds.service_monitor}
    wanted = list(there) if mode is MonitorMode.AUTO else [mode]
    return next((kind for kind in wanted if there.get(kind)), None)
