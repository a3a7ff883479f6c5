# SPDX-License-Identifier: Apache-2.0
"""Resources for the operator's tests."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from kvcache_operator.models import KVCache
from kvcache_operator.parse import parse_resource
from kvcache_operator.plan import Plan, make_plan
from kvcache_operator.render import Manifest, Rendered, render
from kvcache_operator.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = sorted((ROOT / "manifests" / "samples").glob("*.yaml"))

SMALLEST: dict[str, Any] = {
    "apiVersion": "kvcache.dev/v1alpha1",
    "kind": "KVCache",
    "metadata": {"name": "qwen"},
    "spec": {"model": {"name": "Qwen/Qwen3-8B"}, "cache": {"tiers": {"cpu": {"capacity": "32Gi"}}}},
}
"""The smallest useful resource."""


def with_value(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy with `value` at a dotted path, making the mappings in between."""
    changed = copy.deepcopy(document)
    *parents, leaf = path.split(".")
    node = changed
    for key in parents:
        node = node.setdefault(key, {})
    node[leaf] = value
    return changed


def resource(**values: object) -> KVCache:
    """The smallest resource with values below `spec`; dots are written as two underscores."""
    document = SMALLEST
    for path, value in values.items():
        document = with_value(document, f"spec.{path.replace('__', '.')}", value)
    return parse_resource(document)


def plan_of(document: dict[str, Any]) -> Plan:
    return make_plan(parse_resource(document), Settings())


def rendered_of(document: dict[str, Any]) -> Rendered:
    return render(plan_of(document))


def objects_of(document: dict[str, Any]) -> list[Manifest]:
    rendered = rendered_of(document)
    return list(rendered.all)


def pod_of(rendered: Rendered) -> Manifest:
    spec: Manifest = rendered.workload["spec"]["template"]["spec"]
    return spec


def containers_of(rendered: Rendered) -> dict[str, Manifest]:
    return {container["name"]: container for container in pod_of(rendered)["containers"]}
