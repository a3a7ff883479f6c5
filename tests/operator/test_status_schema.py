# SPDX-License-Identifier: Apache-2.0
"""The definition has room for every key of a status: a server drops the others without a word."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from kvcache_operator.crd import crd
from kvcache_operator.flush import FLUSH_ANNOTATION, TIERS_ANNOTATION
from kvcache_operator.models import Status
from kvcache_operator.parse import field_paths
from kvcache_operator.render import Manifest
from tests.operator.fake_cluster import FakeCluster
from tests.operator.resources import with_value
from tests.operator.test_reconcile import BODY, Bench, stats

SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]


def pruned(schema: dict[str, Any], value: Any) -> Any:
    """What an API server keeps of a value."""
    if isinstance(value, dict):
        known = schema.get("properties", {})
        return {key: pruned(known[key], below) for key, below in value.items() if key in known}
    if isinstance(value, list):
        return [pruned(schema["items"], entry) for entry in value]
    return value


def paths(value: Any, prefix: str = "") -> set[str]:
    if isinstance(value, list):
        return set().union(*(paths(entry, prefix) for entry in value)) if value else set()
    if not isinstance(value, dict):
        return set()
    found: set[str] = set()
    for key, below in value.items():
        found |= {f"{prefix}{key}"} | paths(below, f"{prefix}{key}.")
    return found


class PruningCluster(FakeCluster):
    """Keeps of a status what the definition names, or less: that of an older one."""

    schema = SCHEMA

    def patch_status(self, manifest: Manifest, status: Mapping[str, Any]) -> Manifest:
        return super().patch_status(manifest, pruned(self.schema, dict(status)))


def seen(cluster: FakeCluster) -> list[dict[str, Any]]:
    """Statuses of a life in which everything happens that is told of."""
    bench = Bench(with_value(BODY, "spec.cache.tiers.disk", {"capacity": "1Gi"}), cluster)
    statuses = [bench.run()]
    bench.make_ready()
    bench.answers = {"/v1/stats": stats(), "/v1/config": {"version": "1"}, "/version": {"version": "0.32.0"}}
    bench.annotate(**{FLUSH_ANNOTATION: "x", TIERS_ANNOTATION: "cpu"})
    bench.now += timedelta(minutes=1)
    statuses.append(bench.run())
    pod = bench.cluster.objects["Pod", "serving", "qwen-0"]
    pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": "no room"}]
    statuses.append(bench.run())
    return statuses


def test_every_key_that_is_written_is_kept() -> None:
    whole, kept = seen(FakeCluster()), seen(PruningCluster())
    assert kept == whole
    written = set().union(*(paths(status) for status in whole))
    # All that can be written was, or this says little.
    assert set(field_paths(Status)) - written == set()


def test_a_definition_that_is_older_than_the_operator_is_told(caplog: pytest.LogCaptureFixture) -> None:
    cluster = PruningCluster()
    cluster.schema = {
        "properties": {key: below for key, below in SCHEMA["properties"].items() if key != "budget"}
    }
    with caplog.at_level(logging.WARNING):
        Bench(BODY, cluster).run()
    assert "the server drops budget of a status" in caplog.text
    assert "apply manifests/crd" in caplog.text
