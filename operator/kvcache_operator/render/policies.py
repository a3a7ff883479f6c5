# SPDX-License-Identifier: Apache-2.0
"""What protects the pods: from connections, and from draining all nodes at once."""

from __future__ import annotations

from kvcache_operator.models import EventsMode
from kvcache_operator.plan import Plan
from kvcache_operator.render.common import Manifest, metadata, selector_labels

_NAMESPACE_NAME = "kubernetes.io/metadata.name"


def network_policy(plan: Plan) -> Manifest | None:
    """Completions and events for those who may; admin and metrics for the operator and Prometheus."""
    if plan.spec.network_policy.mode == "Disabled":
        return None
    used = [_port("http")]
    if plan.spec.cache.events.mode is not EventsMode.DISABLED:
        used.append(_port("events"))
    allowed = plan.spec.network_policy.allowed_namespaces
    users: Manifest = {"ports": used}
    if allowed:
        # The resource's own namespace always may.
        users["from"] = [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": dict(allowed)}}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(plan, plan.names.workload),
        "spec": {
            "podSelector": {"matchLabels": selector_labels(plan)},
            "policyTypes": ["Ingress"],
            "ingress": [users, _management(plan)],
        },
    }


def _management(plan: Plan) -> Manifest:
    """The admin port asks for a token in all but health and metrics, so where a namespace is not known it is
    open rather than shut."""
    namespaces = (plan.operator_namespace, plan.monitoring_namespace)
    rule: Manifest = {"ports": [_port("admin"), _port("http")]}
    if all(namespaces):
        rule["from"] = [
            {"namespaceSelector": {"matchLabels": {_NAMESPACE_NAME: name}}}
            for name in dict.fromkeys(namespaces)
        ]
    else:
        rule["ports"] = [_port("admin")]
    return rule


def _port(name: str) -> Manifest:
    return {"port": name, "protocol": "TCP"}


def disruption_budget(plan: Plan, api_version: str) -> Manifest | None:
    """One pod at a time may go; for a single pod it would only block the draining of its node."""
    replicas = plan.spec.replicas if plan.spec.replicas_mode == "Managed" else None
    if plan.spec.pod_disruption_budget.mode == "Disabled" or (replicas is not None and replicas < 2):
        return None
    return {
        "apiVersion": api_version,
        "kind": "PodDisruptionBudget",
        "metadata": metadata(plan, plan.names.workload),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector_labels(plan)}},
    }
