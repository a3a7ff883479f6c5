# SPDX-License-Identifier: Apache-2.0
"""Lays part of a pod's spec over the one that the operator makes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
    "hostAliases": "ip",
}
"""The key by which entries of a list are the same, as in Kubernetes' strategic merge."""
_APPENDED = ("tolerations",)


def overlaid(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `overlay` over it: mappings merge, entries of lists with a key merge by it, tolerations are
    added, and all else is replaced. Nothing of `base` can be removed.
    """
    merged = dict(copy.deepcopy(base))
    for name, value in overlay.items():
        below = merged.get(name)
        if isinstance(below, dict) and isinstance(value, Mapping):
            merged[name] = overlaid(below, value)
        elif isinstance(below, list) and isinstance(value, list) and name in _KEYS:
            merged[name] = _by_key(below, value, _KEYS[name])
        elif isinstance(below, list) and isinstance(value, list) and name in _APPENDED:
            merged[name] = below + [entry for entry in value if entry not in below]
        else:
            merged[name] = copy.deepcopy(value)
    return merged


def _by_key(base: list[Any], overlay: list[Any], key: str) -> list[Any]:
    merged = {entry[key]: entry for entry in base}
    for entry in overlay:
        below = merged.get(entry.get(key)) if isinstance(entry, Mapping) else None
        if below is None:
            merged[entry.get(key) if isinstance(entry, Mapping) else str(entry)] = copy.deepcopy(entry)
            continue
        # A variable or volume has one source: merging two would make none of them valid.
        replaces = key == "name" and not {"image", "securityContext", "resources"} & below.keys()
        merged[entry[key]] = copy.deepcopy(entry) if replaces else overlaid(below, entry)
    return list(merged.values())
