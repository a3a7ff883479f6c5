# SPDX-License-Identifier: Apache-2.0
"""The chain from a resource to its status, and what kopf's handlers make of its errors."""

from __future__ import annotations

import asyncio
import base64
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import kopf
import pytest

from kvcache_operator.cluster import ClusterError
from kvcache_operator.handlers import Handlers
from kvcache_operator.reconcile import reconcile, refresh
from kvcache_operator.render import Manifest
from kvcache_operator.settings import Settings
from tests.operator.fake_cluster import FakeCluster
from tests.operator.resources import SMALLEST, with_value

SETTINGS = Settings(retry_s=2.0)
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
KEY = ("KVCache", "serving", "qwen")

BODY = with_value(
    with_value(with_value(SMALLEST, "metadata.namespace", "serving"), "metadata.uid", "1-2-3"),
    "metadata.generation",
    4,
)


def cluster_with(body: dict[str, Any]) -> FakeCluster:
    cluster = FakeCluster()
    cluster.objects[KEY] = with_value(body, "metadata.resourceVersion", "1")
    return cluster


def run(cluster: FakeCluster, now: datetime = NOON, **changes: Any) -> dict[str, Any]:
    """Reconciles the resource after changes to its spec; returns its status."""
    for path, value in changes.items():
        cluster.objects[KEY] = with_value(cluster.objects[KEY], f"spec.{path.replace('__', '.')}", value)
    asyncio.run(reconcile(cluster.objects[KEY], cluster, SETTINGS, lambda: now))
    status: dict[str, Any] = cluster.objects[KEY]["status"]
    return status


def refreshed(cluster: FakeCluster) -> dict[str, Any]:
    asyncio.run(refresh("serving", "qwen", cluster, SETTINGS, lambda: NOON))
    status: dict[str, Any] = cluster.objects[KEY]["status"]
    return status


def body_of(cluster: FakeCluster) -> kopf.Body:
    """The view that kopf gives to handlers."""
    return kopf.Body(cast(kopf.RawBody, cluster.objects[KEY]))


def handle(cluster: FakeCluster) -> dict[str, Any]:
    asyncio.run(Handlers(cluster, SETTINGS).changed(body=body_of(cluster)))
    status: dict[str, Any] = cluster.objects[KEY]["status"]
    return status


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {entry["type"]: (entry["status"], entry["reason"]) for entry in status["conditions"]}


def deployment_status(cluster: FakeCluster, **status: Any) -> None:
    deployment = cluster.objects["Deployment", "serving", "qwen"]
    deployment["metadata"]["generation"] = 2
    deployment["status"] = {"observedGeneration": 2, **status}


def test_the_children_come_in_the_order_of_their_use() -> None:
    cluster = cluster_with(BODY)
    run(cluster)
    assert cluster.writes == ["Secret", "ConfigMap", "Service", "Deployment", "KVCache/status"]
    children = [entry for key, entry in cluster.objects.items() if key != KEY]
    assert all(entry["metadata"]["ownerReferences"][0]["uid"] == "1-2-3" for entry in children)


def test_a_second_reconcile_writes_nothing_and_keeps_the_token() -> None:
    cluster, other = cluster_with(BODY), cluster_with(BODY)
    run(cluster)
    token = cluster.objects["Secret", "serving", "qwen-admin-token"]["data"]["token"]
    assert len(base64.b64decode(token)) >= 32
    cluster.writes.clear()
    run(cluster, NOON + timedelta(hours=1))
    assert cluster.writes == []
    assert cluster.objects["Secret", "serving", "qwen-admin-token"]["data"]["token"] == token
    run(other)
    assert other.objects["Secret", "serving", "qwen-admin-token"]["data"]["token"] != token


def test_an_invalid_spec_is_a_condition_and_touches_nothing() -> None:
    cluster = cluster_with(BODY)
    status = run(cluster, cache__chunkTokens=8192)
    assert cluster.writes == ["KVCache/status"]
    assert status["observedGeneration"] == 4
    assert conditions(status) == {"Accepted": ("False", "InvalidSpec"), "Ready": ("False", "InvalidSpec")}
    (message,) = {entry["message"] for entry in status["conditions"]}
    assert message.startswith("spec.cache.chunkTokens: 8192 is too large")


def test_an_invalid_change_keeps_what_was_known_of_the_pods() -> None:
    cluster = cluster_with(BODY)
    run(cluster)
    status = run(cluster, replicas=-1)
    assert conditions(status)["Accepted"] == ("False", "InvalidSpec")
    assert conditions(status)["Progressing"] == ("True", "RolloutUnderWay")
    assert status["endpoint"]


def test_the_status_follows_the_pods() -> None:
    cluster = cluster_with(BODY)
    status = run(cluster)
    assert conditions(status)["Ready"] == ("False", "NoReadyPods")
    assert status["endpoint"] == "http://qwen.serving.svc:8000/v1"
    assert status["budget"]["cpuTierPerRank"] == "32768Mi"

    deployment_status(cluster, replicas=1, updatedReplicas=1, readyReplicas=1)
    ready = run(cluster, NOON + timedelta(minutes=5))
    assert conditions(ready) == {
        "Accepted": ("True", "Valid"),
        "Progressing": ("False", "RolloutComplete"),
        "Available": ("True", "PodsReady"),
        "CacheTiersReady": ("True", "PodsReady"),
        "Degraded": ("False", "AsExpected"),
        "Ready": ("True", "AllPodsReady"),
    }
    since = {entry["type"]: entry["lastTransitionTime"] for entry in ready["conditions"]}
    # Only what has changed has a new time.
    assert since["Accepted"] == "2030-01-01T12:00:00Z"
    assert since["Ready"] == "2030-01-01T12:05:00Z"
    # An API server may take an empty text for none.
    assert all(entry["message"] for entry in ready["conditions"])


def test_numbers_of_an_older_template_are_no_completed_rollout() -> None:
    cluster = cluster_with(BODY)
    run(cluster)
    deployment_status(cluster, replicas=1, updatedReplicas=1, readyReplicas=1)
    cluster.objects["Deployment", "serving", "qwen"]["metadata"]["generation"] = 3
    assert conditions(run(cluster))["Progressing"] == ("True", "RolloutUnderWay")


def test_a_stuck_rollout_and_pods_that_cannot_be_made_are_seen() -> None:
    cluster = cluster_with(BODY)
    run(cluster)
    deployment_status(
        cluster,
        conditions=[
            {"type": "Progressing", "status": "False", "message": "timed out"},
            {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"},
        ],
    )
    status = run(cluster)
    assert conditions(status)["Progressing"] == ("False", "RolloutStuck")
    assert conditions(status)["Degraded"] == ("True", "PodsFail")
    assert conditions(status)["Ready"] == ("False", "PodsFail")
    (degraded,) = (entry for entry in status["conditions"] if entry["type"] == "Degraded")
    assert degraded["message"] == "exceeded quota"


def test_refresh_writes_only_what_is_new() -> None:
    cluster = cluster_with(BODY)
    run(cluster)
    deployment_status(cluster, replicas=1, updatedReplicas=1, readyReplicas=1)
    cluster.writes.clear()
    for _ in range(3):
        status = refreshed(cluster)
    assert cluster.writes == ["KVCache/status"]
    assert conditions(status)["Ready"] == ("True", "AllPodsReady")


def test_refresh_leaves_alone_what_is_not_reconciled_or_not_accepted() -> None:
    cluster = cluster_with(BODY)
    run(cluster)
    deployment_status(cluster, replicas=1, updatedReplicas=1, readyReplicas=1)
    cluster.writes.clear()
    cluster.objects[KEY]["metadata"]["generation"] = 5
    assert conditions(refreshed(cluster))["Ready"] == ("False", "NoReadyPods")
    run(cluster, cache__chunkTokens=8192)
    before = refreshed(cluster)
    assert conditions(before)["Accepted"] == ("False", "InvalidSpec")
    assert cluster.writes == ["KVCache/status"]


def test_refresh_of_a_resource_that_has_gone() -> None:
    asyncio.run(refresh("serving", "qwen", FakeCluster(), SETTINGS))


def test_what_was_read_before_somebody_else_wrote_is_read_again() -> None:
    """A child's handler reads, the resource's handler writes, then the child's handler writes."""

    class Overtaken(FakeCluster):
        overtake = False

        def patch_status(self, manifest: Manifest, status: dict[str, Any]) -> None:
            if self.overtake:
                self.overtake = False
                self.objects[KEY]["status"]["observedGeneration"] = 5
                self.objects[KEY]["metadata"] |= {"resourceVersion": "77", "generation": 5}
            super().patch_status(manifest, status)

    cluster = Overtaken()
    cluster.objects[KEY] = with_value(BODY, "metadata.resourceVersion", "1")
    run(cluster)
    deployment_status(cluster, replicas=1, updatedReplicas=1, readyReplicas=1)
    cluster.overtake = True
    status = refreshed(cluster)
    assert status["observedGeneration"] == 5
    assert conditions(status)["Ready"] == ("True", "AllPodsReady")


def test_endless_conflicts_are_an_error() -> None:
    class Contested(FakeCluster):
        def patch_status(self, manifest: Manifest, status: dict[str, Any]) -> None:
            raise ClusterError("the object has been modified", 409)

    cluster = Contested()
    cluster.objects[KEY] = BODY
    with pytest.raises(ClusterError, match="modified"):
        asyncio.run(reconcile(BODY, cluster, SETTINGS))


def test_a_namesake_gets_no_status() -> None:
    """The resource was deleted and made again while its predecessor was reconciled."""
    cluster = cluster_with(with_value(BODY, "metadata.uid", "another"))
    asyncio.run(reconcile(BODY, cluster, SETTINGS))
    assert "status" not in cluster.objects[KEY]


@pytest.mark.parametrize("status", [409, 429, 500, 503, 403, None])
def test_errors_of_the_api_server_come_back_later_and_are_shown(status: int | None) -> None:
    cluster = cluster_with(BODY)
    cluster.faults["Service"] = status
    delays = set()
    for _ in range(5):
        with pytest.raises(kopf.TemporaryError, match="a fault of the test") as caught:
            handle(cluster)
        assert caught.value.delay is not None
        assert 2.0 <= caught.value.delay <= 4.0
        delays.add(caught.value.delay)
    assert len(delays) > 1
    shown = conditions(cluster.objects[KEY]["status"])
    assert shown["Accepted"] == ("True", "Valid")
    assert shown["Ready"] == ("False", "ApplyFailed")
    # The children before the refused one stand, the one after it does not.
    assert {key[0] for key in cluster.objects} == {"KVCache", "Secret", "ConfigMap"}
    cluster.faults.clear()
    assert conditions(handle(cluster))["Ready"] == ("False", "NoReadyPods")
    assert {key[0] for key in cluster.objects} == {"KVCache", "Secret", "ConfigMap", "Service", "Deployment"}


def test_what_the_server_refuses_for_its_content_is_not_tried_again() -> None:
    cluster = cluster_with(BODY)
    cluster.faults["Service"] = 422
    status = handle(cluster)
    assert conditions(status)["Degraded"] == ("True", "ApplyFailed")


def test_user_errors_raise_nothing() -> None:
    cluster = cluster_with(with_value(BODY, "spec.cache.chunkTokens", 100))
    assert conditions(handle(cluster))["Accepted"] == ("False", "InvalidSpec")


def test_no_handler_asks_for_a_finalizer() -> None:
    registry = Handlers(FakeCluster(), SETTINGS).registry()
    handlers = registry._changing.get_all_handlers()
    assert {str(handler.reason) for handler in handlers} == {"create", "update", "delete", "None"}
    assert not any(handler.requires_finalizer for handler in handlers)
    assert not registry._spawning.get_all_handlers()
