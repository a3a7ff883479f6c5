# SPDX-License-Identifier: Apache-2.0
"""The workload: a Deployment, or a StatefulSet where each replica has a claim of its own."""

from __future__ import annotations

from kvcache_operator.plan import DISK_VOLUME, Plan
from kvcache_operator.render.common import Manifest, metadata, selector_labels
from kvcache_operator.render.pod import pod_template

_SCHEDULING_SPARE_S = 600
"""Beyond the start of vLLM: a node may have to be added and an image of some GiB be pulled."""


def workload(plan: Plan) -> Manifest:
    """Without `replicas` where something else scales it."""
    made = _stateful_set(plan) if plan.is_stateful else _deployment(plan)
    if plan.replicas is not None:
        made["spec"] = {"replicas": plan.replicas, **made["spec"]}
    return made


def _deployment(plan: Plan) -> Manifest:
    """By default pods are replaced one by one, the old one first: a surge would wait for a GPU that nobody
    has."""
    rollout = plan.spec.rollout
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(plan, plan.names.workload),
        "spec": {
            "revisionHistoryLimit": 3,
            "progressDeadlineSeconds": plan.spec.engine.startup_timeout + _SCHEDULING_SPARE_S,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {
                    "maxSurge": rollout.max_surge,
                    "maxUnavailable": rollout.max_unavailable,
                },
            },
            "selector": {"matchLabels": selector_labels(plan)},
            "template": pod_template(plan),
        },
    }


def _stateful_set(plan: Plan) -> Manifest:
    """Its claims have no owner: they outlive it, and are removed by `reclaimPolicy: Delete` alone."""
    disk = plan.spec.cache.tiers.disk
    assert disk is not None and disk.volume.claim_template is not None  # noqa: S101
    template = disk.volume.claim_template
    claim: Manifest = {
        "accessModes": list(template.access_modes),
        "resources": {"requests": {"storage": template.size.text}},
    }
    if template.storage_class_name is not None:
        claim["storageClassName"] = template.storage_class_name
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(plan, plan.names.workload),
        "spec": {
            "serviceName": plan.names.pods_service,
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 3,
            "updateStrategy": {"type": "RollingUpdate"},
            "selector": {"matchLabels": selector_labels(plan)},
            "template": pod_template(plan),
            "volumeClaimTemplates": [
                {
                    # Older servers want kind and version, and all fill them in.
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": DISK_VOLUME, "labels": selector_labels(plan)},
                    "spec": claim,
                }
            ],
        },
    }
