# SPDX-License-Identifier: Apache-2.0
"""The pod's template: the same for a Deployment and for a StatefulSet."""

from __future__ import annotations

from typing import Any

from kvcache_operator import GROUP
from kvcache_operator.models.pods import SpreadConstraint
from kvcache_operator.plan import DISK_VOLUME, RESTART_ANNOTATION, TOKEN_KEY, Plan, in_mebibytes
from kvcache_operator.render.common import Manifest, labels, selector_labels
from kvcache_operator.render.containers import ENGINE, admin_container, engine_container
from kvcache_operator.render.overlay import overlaid

_USER_ID = 1000
"""Both containers run as this user and group, so that they, and nobody else, can open the sockets."""
_HOSTNAME = "kubernetes.io/hostname"


def pod_template(plan: Plan) -> Manifest:
    """The template, with what the resource lays over it."""
    more = plan.spec.pod_template.metadata
    annotations = {
        f"{GROUP}/config-checksum": plan.config_checksum,
        "kubectl.kubernetes.io/default-container": ENGINE,
    }
    if plan.restart:
        annotations[RESTART_ANNOTATION] = plan.restart
    return {
        "metadata": {
            # Labels that select the pods, and the operator's own, win.
            "labels": more.labels | labels(plan),
            "annotations": more.annotations | annotations,
        },
        "spec": overlaid(_pod(plan), plan.spec.pod_template.spec),
    }


def _pod(plan: Plan) -> Manifest:
    spec = plan.spec
    pod: Manifest = {
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
            _spread(plan, entry)
            for entry in spec.topology_spread_constraints
            or (SpreadConstraint.model_validate({"topologyKey": _HOSTNAME}),)
        ],
        "volumes": _volumes(plan),
    }
    optional = {
        "imagePullSecrets": [{"name": entry.name} for entry in spec.engine.image_pull_secrets],
        "runtimeClassName": spec.runtime_class_name,
        "nodeSelector": spec.node_selector,
        "tolerations": [_dump(entry) for entry in spec.tolerations],
        "affinity": _pruned(_dump(spec.affinity)) if spec.affinity is not None else None,
        "priorityClassName": spec.priority_class_name,
        "serviceAccountName": spec.service_account_name,
    }
    return pod | {name: value for name, value in optional.items() if value}


def _dump(part: Any) -> Manifest:
    dumped: Manifest = part.model_dump(by_alias=True, exclude_none=True, mode="json")
    return dumped


def _pruned(value: Any) -> Any:
    """Without empty lists and maps: absence says the same, and some of them are refused."""
    if isinstance(value, dict):
        kept = {key: _pruned(part) for key, part in value.items()}
        # An empty selector selects all, an absent one nothing.
        return {key: part for key, part in kept.items() if part not in ([], {}) or key == "labelSelector"}
    if isinstance(value, list):
        return [_pruned(part) for part in value]
    return value


def _spread(plan: Plan, entry: SpreadConstraint) -> Manifest:
    return {
        "maxSkew": entry.max_skew,
        "topologyKey": entry.topology_key,
        "whenUnsatisfiable": entry.when_unsatisfiable,
        "labelSelector": {"matchLabels": selector_labels(plan)},
    }


def _volumes(plan: Plan) -> list[Manifest]:
    own = plan.spec.admin.token_secret_ref
    token: Manifest = {"secretName": plan.names.token_secret, "defaultMode": 0o440}
    if own is not None:
        token["items"] = [{"key": own.key, "path": TOKEN_KEY}]
    volumes: list[Manifest] = [
        {"name": "runtime", "emptyDir": {}},
        {"name": "admin-token", "secret": token},
        {"name": "home", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "config", "configMap": {"name": plan.names.config_map, "defaultMode": 0o444}},
        {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": in_mebibytes(plan.budget.shm)}},
    ]
    volumes += [
        {
            "name": entry.use,
            "secret": {
                "secretName": entry.secret,
                "defaultMode": 0o440,
                "items": [{"key": key, "path": key} for key in entry.keys],
            },
        }
        for entry in plan.secret_files
    ]
    model = plan.spec.model
    if model.claim is not None:
        claim = {"claimName": model.claim, "readOnly": model.is_path}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
    elif model.volume is not None:
        limit = model.volume.size_limit
        assert limit is not None  # the one of the two that is there  # noqa: S101
        volumes.append({"name": "models", "emptyDir": {"sizeLimit": limit.text}})
    disk = plan.spec.cache.tiers.disk
    if disk is not None and disk.volume.claim_name is not None:
        source = {"claimName": disk.volume.claim_name}
        volumes.append({"name": DISK_VOLUME, "persistentVolumeClaim": source})
    elif plan.budget.disk_size_limit is not None:
        size = in_mebibytes(plan.budget.disk_size_limit)
        volumes.append({"name": DISK_VOLUME, "emptyDir": {"sizeLimit": size}})
    return volumes
