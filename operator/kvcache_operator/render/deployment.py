# SPDX-License-Identifier: Apache-2.0
"""The Deployment and its pod."""

from __future__ import annotations

from kvcache_operator import GROUP
from kvcache_operator.plan import Plan, in_mebibytes
from kvcache_operator.render.common import Manifest, labels, metadata, selector_labels
from kvcache_operator.render.containers import ENGINE, admin_container, engine_container

_USER_ID = 1000
"""Both containers run as this user and group, so that they, and nobody else, can open the sockets."""

_SCHEDULING_SPARE_S = 600
"""Beyond the start of vLLM: a node may have to be added and an image of some GiB be pulled."""


def deployment(plan: Plan) -> Manifest:
    """Pods are replaced one by one, the old one first: a surge would wait for a GPU that nobody has."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(plan, plan.names.workload),
        "spec": {
            "replicas": plan.spec.replicas,
            "revisionHistoryLimit": 3,
            "progressDeadlineSeconds": plan.spec.engine.startup_timeout + _SCHEDULING_SPARE_S,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "selector": {"matchLabels": selector_labels(plan)},
            "template": _pod_template(plan),
        },
    }


def _pod_template(plan: Plan) -> Manifest:
    return {
        "metadata": {
            "labels": labels(plan),
            "annotations": {
                f"{GROUP}/config-checksum": plan.config_checksum,
                "kubectl.kubernetes.io/default-container": ENGINE,
            },
        },
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": plan.termination_grace_s,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER_ID,
                "runAsGroup": _USER_ID,
                "fsGroup": _USER_ID,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [engine_container(plan), admin_container(plan)],
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": selector_labels(plan)},
                }
            ],
            "volumes": _volumes(plan),
        },
    }


def _volumes(plan: Plan) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": "runtime", "emptyDir": {}},
        {"name": "admin-token", "secret": {"secretName": plan.names.token_secret, "defaultMode": 0o440}},
        {"name": "home", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "config", "configMap": {"name": plan.names.config_map, "defaultMode": 0o444}},
        {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": in_mebibytes(plan.budget.shm)}},
    ]
    if plan.spec.model.volume is not None:
        claim = {"claimName": plan.spec.model.volume.claim_name, "readOnly": plan.spec.model.is_path}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
    return volumes
