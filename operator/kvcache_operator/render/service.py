# SPDX-License-Identifier: Apache-2.0
"""The Services: one in front of the pods, and one that gives each pod's own address."""

from __future__ import annotations

from kvcache_operator import GROUP
from kvcache_operator.models import EventsMode
from kvcache_operator.plan import Plan
from kvcache_operator.render.common import Manifest, metadata, selector_labels

SCRAPED = {f"{GROUP}/scrape": "pods"}
"""Label of the Service that a ServiceMonitor selects; the other one leads to the same pods."""


def service(plan: Plan) -> Manifest:
    """Both ports under the resource's name; target ports go by name, so that they may differ between pods."""
    ports = {"http": plan.spec.engine.port, "admin": plan.spec.admin.port}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(plan, plan.names.service, SCRAPED),
        "spec": {"type": "ClusterIP", "selector": selector_labels(plan), "ports": _ports(ports)},
    }


def pods_service(plan: Plan) -> Manifest:
    """Headless: for those who need every pod, such as subscribers of events and the StatefulSet itself."""
    ports = {"http": plan.spec.engine.port, "admin": plan.spec.admin.port}
    if plan.spec.cache.events.mode is not EventsMode.DISABLED:
        ports["events"] = plan.spec.cache.events.port
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(plan, plan.names.pods_service),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector_labels(plan),
            "ports": _ports(ports),
        },
    }


def _ports(ports: dict[str, int]) -> list[Manifest]:
    return [
        {"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in ports.items()
    ]
