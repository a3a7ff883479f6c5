# SPDX-License-Identifier: Apache-2.0
"""What all rendered objects share: labels, owner, and the order of keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcache_operator import API_VERSION, KIND
from kvcache_operator.plan import Plan

Manifest = dict[str, Any]
"""A Kubernetes object as it goes over the wire."""


def selector_labels(plan: Plan) -> dict[str, str]:
    """Labels that find a resource's pods. A selector is immutable, so nothing here may ever change."""
    return {
        "app.kubernetes.io/name": "kvcache",
        "app.kubernetes.io/instance": plan.name,
        "app.kubernetes.io/component": "engine",
    }


def labels(plan: Plan) -> dict[str, str]:
    """Labels of every object that belongs to a resource."""
    return selector_labels(plan) | {
        "app.kubernetes.io/part-of": "kvcache",
        "app.kubernetes.io/managed-by": "kvcache-operator",
    }


def metadata(plan: Plan, name: str, more_labels: Mapping[str, str] | None = None) -> Manifest:
    """Name, place, labels and, where an API server knows it, the owner: the object goes when it goes."""
    meta: Manifest = {
        "name": name,
        "namespace": plan.namespace,
        "labels": labels(plan) | dict(more_labels or {}),
    }
    if plan.owner_uid is not None:
        meta["ownerReferences"] = [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": plan.name,
                "uid": plan.owner_uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return meta
