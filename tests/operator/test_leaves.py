# SPDX-License-Identifier: Apache-2.0
"""Each leaf of the spec changes what is rendered: fields that are ignored are what users of other operators
complain of most."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from kvcache_operator.crd import crd
from kvcache_operator.models import KVCacheSpec
from kvcache_operator.parse import field_paths
from kvcache_operator.render import Kinds, render
from tests.operator.full import CLUSTER, FULL
from tests.operator.resources import plan_of

SPEC = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
KINDS = Kinds(pod_monitor=True, service_monitor=True)
ONLY_FINALIZER = {"reclaimPolicy"}
"""Leaves that change the resource's finalizer and no child (tests/cluster)."""

SPECIAL: dict[str, Any] = {
    "cache.chunkTokens": 1024,
    "cache.tiers.remote.valkey.endpoints": ["other.cache.svc:6379"],
    "cache.tiers.remote.mooncake.adminEndpoint": "other:9003",
    "cache.tiers.remote.mooncake.master": "other:50051",
    "cache.tiers.remote.valkey.mode": None,
    "engine.port": 9100,
    "engine.cpuKvSpace": "5Gi",
    "engine.args": ["--block-size", "64"],
    "experimental": {"min_retrieve_tokens": "512"},
    "podTemplate.spec": {"hostname": "x"},
    "resources.limits.memory": "190Gi",
    "resources.limits.ephemeral-storage": "500Gi",
    "cache.tiers.disk.volume.emptyDir": None,
}
"""Values where no general rule finds one; None where the test of that leaf is another one."""


def leaves() -> list[str]:
    paths = list(field_paths(KVCacheSpec))
    return [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]


def place(node: Any, parts: list[str]) -> tuple[Any, str] | None:
    """The mapping that holds the leaf, going through lists by their entries; None where it is not there."""
    if isinstance(node, list):
        found = (place(entry, parts) for entry in node)
        return next((entry for entry in found if entry is not None), None)
    if not isinstance(node, dict) or parts[0] not in node:
        return None
    if len(parts) == 1:
        return node, parts[0]
    return place(node[parts[0]], parts[1:])


def schema_of(path: str) -> dict[str, Any]:
    node = SPEC
    for part in path.split("."):
        node = node.get("items", node)["properties"][part]
    return dict(node)


def another(value: Any, schema: dict[str, Any]) -> Any:
    """A value of the same kind."""
    if "enum" in schema:
        return next(entry for entry in schema["enum"] if entry != value)
    if isinstance(value, list):
        return [another(value[0], schema["items"]), *value[1:]]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, dict):
        return {key: f"{entry}x" for key, entry in value.items()}
    number = re.match(r"^\d+", value)
    if number:
        return f"{int(number[0]) + 1}{value[number.end() :]}"
    return f"{value}x"


@pytest.mark.parametrize("leaf", leaves())
def test_each_leaf_changes_what_is_rendered(leaf: str) -> None:
    if leaf in ONLY_FINALIZER:
        return
    for document in FULL:
        changed = copy.deepcopy(document)
        found = place(changed["spec"], leaf.split("."))
        special = SPECIAL.get(leaf, "")
        if leaf == "cache.tiers.remote.valkey.mode":
            changed = CLUSTER
        elif leaf == "cache.tiers.remote.mooncake.protocol" and found is not None:
            found[0].pop("device")
            found[0]["protocol"] = "tcp"
        elif leaf == "cache.tiers.disk.volume.emptyDir":
            changed["spec"]["cache"]["tiers"]["disk"]["volume"] = {"claimName": "other"}
            changed["spec"]["rollout"]["maxSurge"] = 0
        elif leaf == "cache.tiers.remote.mooncake.protocol" and found is not None:
            found[0].update({"protocol": "tcp", "device": ""})
        elif found is None and leaf in DEFAULTS:
            changed["spec"] |= DEFAULTS[leaf]
        elif found is None:
            continue
        else:
            node, key = found
            node[key] = special if leaf in SPECIAL else another(node[key], schema_of(leaf))
        if leaf in ("engine.device", "engine.cpuKvSpace") and document is not FULL[2]:
            continue
        before, after = (render(plan_of(entry), KINDS).all for entry in (document, changed))
        assert before != after
        return
    raise AssertionError(f"no resource of tests/operator/full.py has {leaf}")


DEFAULTS: dict[str, dict[str, Any]] = {
    "suspend": {"suspend": True},
    "replicasMode": {"replicasMode": "External"},
}
"""Leaves that the full resources leave at their default, and the spec that changes them."""
