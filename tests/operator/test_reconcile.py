# SPDX-License-Identifier: Apache-2.0
"""The chain from a resource to its status, against an API server in memory."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from kvcache_operator.cluster import ClusterError
from kvcache_operator.flush import FLUSH_ANNOTATION, TIERS_ANNOTATION
from kvcache_operator.pods import Pods
from kvcache_operator.queue import Key
from kvcache_operator.reclaim import FINALIZER, FORCE_ANNOTATION
from kvcache_operator.reconcile import SECRET_RECHECK_S, Outcome, Reconciler
from kvcache_operator.render import Manifest
from kvcache_operator.settings import Settings
from kvcache_operator.verdicts import TYPES
from tests.operator.fake_cluster import FakeCluster
from tests.operator.resources import SMALLEST, with_value

SETTINGS = Settings(retry_s=2.0)
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
KEY = ("KVCache", "serving", "qwen")
WORKLOAD = ("Deployment", "serving", "qwen")

BODY = with_value(
    with_value(with_value(SMALLEST, "metadata.namespace", "serving"), "metadata.uid", "1-2-3"),
    "metadata.generation",
    4,
)


class Bench:
    """One resource, its reconciler and the pods that answer."""

    def __init__(self, body: dict[str, Any] = BODY, cluster: FakeCluster | None = None) -> None:
        self.cluster = cluster or FakeCluster()
        self.cluster.objects[KEY] = with_value(body, "metadata.resourceVersion", "1")
        self.now = NOON
        self.requests: list[httpx.Request] = []
        self.answers: dict[str, Any] = {}
        """By path of a pod's route: what is answered, or an HTTP status."""
        self.pods = Pods(2, 2, httpx.MockTransport(self._answer))
        self.reconciler = Reconciler(self.cluster, SETTINGS, self.pods, lambda: self.now)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        found = self.answers.get(request.url.path, 404)
        return httpx.Response(found) if isinstance(found, int) else httpx.Response(200, json=found)

    def run(self, **changes: Any) -> dict[str, Any]:
        """Reconciles after changes to the spec; returns the status."""
        for path, value in changes.items():
            self.set(f"spec.{path.replace('__', '.')}", value)
        self.outcome()
        return self.status

    def outcome(self) -> Outcome:
        return asyncio.run(self.reconciler.reconcile(Key("serving", "qwen")))

    def set(self, path: str, value: object) -> None:
        self.cluster.objects[KEY] = with_value(self.cluster.objects[KEY], path, value)

    def annotate(self, **annotations: str) -> None:
        meta = self.cluster.objects[KEY]["metadata"]
        meta["annotations"] = {**meta.get("annotations", {}), **annotations}

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.cluster.objects[KEY].get("status", {})
        return status

    @property
    def reasons(self) -> list[str]:
        return [event["reason"] for event in self.cluster.events]

    def play_controller(self, **numbers: Any) -> None:
        workload = self.cluster.objects[WORKLOAD]
        workload["status"] = {"observedGeneration": workload["metadata"]["generation"], **numbers}

    def make_ready(self, name: str = "qwen-0") -> None:
        """One pod, and it serves."""
        self.play_controller(replicas=1, updatedReplicas=1, readyReplicas=1)
        labels = self.cluster.objects[WORKLOAD]["spec"]["selector"]["matchLabels"]
        self.cluster.objects["Pod", "serving", name] = {
            "metadata": {"name": name, "namespace": "serving", "labels": labels},
            "spec": {"nodeName": "n1", "containers": []},
            "status": {"podIP": "10.0.0.7", "conditions": [{"type": "Ready", "status": "True"}]},
        }


def conditions(status: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    return {entry["type"]: (entry["status"], entry["reason"]) for entry in status["conditions"]}


def stats(**changes: Any) -> dict[str, Any]:
    """A pod's statistics."""
    tier = {"name": "cpu", "state": "Ready", "capacity_bytes": 32 << 30, "used_bytes": 1 << 30}
    return {
        "window": {"prompt_tokens": 1500, "hit_gpu_tokens": 500, "hit_cache_tokens": 614},
        "tiers": [tier | {"hit_tokens": 123456} | changes],
        "scheduler": {"ready": True, "reason": ""},
        "ranks": [{"rank": 0, "ready": True, "reason": "", "namespace": "ab12"}],
    }


def test_the_children_come_in_the_order_of_their_use() -> None:
    bench = Bench()
    bench.run()
    others = ["ConfigMap", "Service", "ConfigMap", "Service", "NetworkPolicy"]
    assert bench.cluster.writes == ["Secret", *others, "Deployment", "KVCache/status"]
    children = [entry for key, entry in bench.cluster.objects.items() if key != KEY]
    assert all(entry["metadata"]["ownerReferences"][0]["uid"] == "1-2-3" for entry in children)


def test_fifty_reconciles_write_nothing_and_keep_the_token() -> None:
    bench, other = Bench(), Bench()
    bench.run()
    token = bench.cluster.objects["Secret", "serving", "qwen-admin-token"]["data"]["token"]
    assert len(base64.b64decode(token)) >= 32
    bench.cluster.writes.clear()
    for count in range(50):
        bench.now = NOON + timedelta(hours=count)
        if count % 2:
            bench.reconciler.forget_applied(Key("serving", "qwen"))
        bench.run()
    assert bench.cluster.writes == []
    assert bench.cluster.objects["Secret", "serving", "qwen-admin-token"]["data"]["token"] == token
    other.run()
    assert other.cluster.objects["Secret", "serving", "qwen-admin-token"]["data"]["token"] != token


def test_an_invalid_spec_is_a_condition_and_touches_nothing() -> None:
    bench = Bench()
    status = bench.run(cache__chunkTokens=8192)
    assert bench.cluster.writes == ["KVCache/status"]
    assert status["observedGeneration"] == 4
    shown = conditions(status)
    assert list(shown) == list(TYPES)
    assert (shown["Accepted"], shown["Ready"]) == (("False", "InvalidSpec"), ("False", "InvalidSpec"))
    message = status["conditions"][0]["message"]
    assert message.startswith("spec.cache.chunkTokens: 8192 is too large")
    assert bench.reasons == ["ConfigRejected"]


def test_an_invalid_change_keeps_what_was_known_of_the_pods() -> None:
    bench = Bench()
    bench.run()
    status = bench.run(replicas=-1)
    assert conditions(status)["Accepted"] == ("False", "InvalidSpec")
    assert conditions(status)["Progressing"] == ("True", "RolloutUnderWay")
    assert status["endpoint"]


def test_a_workload_that_the_server_refuses_leaves_nothing_half_applied() -> None:
    bench = Bench()
    bench.cluster.refuses_workload = "spec.template.spec.foo: unknown"
    status = bench.run()
    assert conditions(status)["Accepted"] == ("False", "InvalidSpec")
    assert "spec.template.spec.foo" in status["conditions"][0]["message"]
    assert {key[0] for key in bench.cluster.objects} == {"KVCache"}


@pytest.mark.parametrize("kind", ["Deployment", "Service", "ConfigMap"])
def test_what_belongs_to_somebody_else_is_left_alone(kind: str) -> None:
    bench = Bench()
    name = "qwen-config" if kind == "ConfigMap" else "qwen"
    theirs = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": "serving"}}
    bench.cluster.objects[kind, "serving", name] = theirs
    status = bench.run()
    assert conditions(status)["Accepted"] == ("False", "NameTaken")
    assert bench.cluster.objects[kind, "serving", name] == theirs
    assert {key[0] for key in bench.cluster.objects} == {"KVCache", kind}


def test_children_that_a_new_spec_does_not_want_go() -> None:
    bench = Bench()
    bench.run(replicas=2)
    assert ("PodDisruptionBudget", "serving", "qwen") in bench.cluster.objects
    bench.run(replicas=1, networkPolicy={"mode": "Disabled"})
    kinds = {key[0] for key in bench.cluster.objects}
    assert not {"PodDisruptionBudget", "NetworkPolicy"} & kinds


def test_the_status_follows_the_pods() -> None:
    bench = Bench()
    status = bench.run()
    assert conditions(status)["Ready"] == ("False", "RolloutUnderWay")
    assert status["endpoint"] == "http://qwen.serving.svc:8000/v1"
    assert status["budget"]["cpuTierPerRank"] == "32768Mi"

    bench.make_ready()
    bench.now += timedelta(minutes=5)
    ready = bench.run()
    assert conditions(ready) == {
        "Accepted": ("True", "Valid"),
        "Progressing": ("False", "RolloutComplete"),
        "Available": ("True", "PodsReady"),
        "CacheTiersReady": ("True", "PodsReady"),
        "Degraded": ("False", "AsExpected"),
        "Suspended": ("False", "NotSuspended"),
        "Ready": ("True", "AllPodsReady"),
    }
    since = {entry["type"]: entry["lastTransitionTime"] for entry in ready["conditions"]}
    # Only what has changed has a new time.
    assert since["Accepted"] == "2030-01-01T12:00:00Z"
    assert since["Ready"] == "2030-01-01T12:05:00Z"
    # An API server may take an empty text for none.
    assert all(entry["message"] for entry in ready["conditions"])
    assert ready["pods"] == [{"name": "qwen-0", "node": "n1", "ready": True}]
    assert bench.reasons == ["Applied", "RolloutStarted", "RolloutFinished"]


def test_numbers_of_an_older_template_are_no_completed_rollout() -> None:
    bench = Bench()
    bench.run()
    bench.play_controller(replicas=1, updatedReplicas=1, readyReplicas=1)
    bench.cluster.objects[WORKLOAD]["status"]["observedGeneration"] = 0
    assert conditions(bench.run())["Progressing"] == ("True", "RolloutUnderWay")


def test_a_changed_workload_is_brought_back() -> None:
    bench = Bench()
    bench.run()
    workload = bench.cluster.objects[WORKLOAD]
    workload["spec"]["replicas"] = 9
    workload["metadata"]["generation"] += 1
    bench.run()
    assert bench.cluster.objects[WORKLOAD]["spec"]["replicas"] == 1


def test_somebody_else_may_scale() -> None:
    bench = Bench(with_value(BODY, "spec.replicasMode", "External"))
    bench.run()
    workload = bench.cluster.objects[WORKLOAD]
    workload["spec"]["replicas"] = 9
    workload["metadata"]["generation"] += 1
    bench.run()
    bench.run(replicas=3)
    assert bench.cluster.objects[WORKLOAD]["spec"]["replicas"] == 9


def test_suspend_and_resume() -> None:
    bench = Bench()
    bench.run()
    bench.make_ready()
    bench.run(suspend=True)
    assert bench.cluster.objects[WORKLOAD]["spec"]["replicas"] == 0
    assert conditions(bench.status)["Suspended"] == ("False", "Suspending")
    del bench.cluster.objects["Pod", "serving", "qwen-0"]
    bench.play_controller()
    status = bench.run()
    assert conditions(status)["Suspended"] == ("True", "Suspended")
    assert conditions(status)["Ready"] == ("False", "Suspended")
    bench.run(suspend=False)
    assert bench.cluster.objects[WORKLOAD]["spec"]["replicas"] == 1
    assert bench.reasons[-2:] == ["RolloutStarted", "Resumed"]
    assert "Suspended" in bench.reasons


def test_a_restart_is_another_template() -> None:
    bench = Bench()
    bench.run()
    before = bench.cluster.objects[WORKLOAD]["spec"]["template"]
    bench.annotate(**{"kvcache.dev/restart-requested-at": "now"})
    bench.run()
    after = bench.cluster.objects[WORKLOAD]["spec"]["template"]
    assert before["spec"] == after["spec"]
    assert before["metadata"] != after["metadata"]


def test_secrets_that_are_missing_empty_and_there() -> None:
    bench = Bench(with_value(BODY, "spec.model.tokenSecretRef", {"name": "hub"}))
    secret = {"metadata": {"name": "hub", "namespace": "serving"}}
    status = bench.run()
    assert conditions(status)["Accepted"] == ("True", "Valid")
    assert conditions(status)["Ready"] == ("False", "SecretNotFound")
    (degraded,) = (entry for entry in status["conditions"] if entry["type"] == "Degraded")
    assert "hub" in degraded["message"]
    assert "token" in degraded["message"]
    assert bench.outcome().again_in_s == SECRET_RECHECK_S
    bench.cluster.objects["Secret", "serving", "hub"] = {**secret, "data": {"other": "eA=="}}
    assert conditions(bench.run())["Ready"] == ("False", "SecretNotFound")
    bench.cluster.objects["Secret", "serving", "hub"] = {**secret, "data": {"token": ""}}
    assert conditions(bench.run())["Ready"] == ("False", "SecretInvalid")
    bench.cluster.objects["Secret", "serving", "hub"] = {**secret, "data": {"token": "eA=="}}
    assert conditions(bench.run())["Degraded"] == ("False", "AsExpected")


def test_a_claim_for_one_node_is_not_for_many_pods() -> None:
    disk = {"capacity": "10Gi", "volume": {"claimName": "kv"}}
    bench = Bench(with_value(BODY, "spec.cache.tiers.disk", disk))
    claim = {"metadata": {"name": "kv", "namespace": "serving"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
    bench.cluster.objects["PersistentVolumeClaim", "serving", "kv"] = claim
    assert conditions(bench.run())["Accepted"] == ("True", "Valid")
    assert conditions(bench.run(replicas=2))["Accepted"] == ("False", "ClaimNotShareable")
    claim["spec"] = {"accessModes": ["ReadWriteMany"]}
    assert conditions(bench.run())["Accepted"] == ("True", "Valid")


def test_pods_are_asked_seldom_and_their_numbers_are_rounded() -> None:
    bench = Bench()
    bench.answers = {
        "/v1/stats": stats(),
        "/v1/config": {"version": "0.1.0"},
        "/version": {"version": "0.32"},
    }
    bench.run()
    bench.make_ready()
    bench.now += timedelta(minutes=1)
    status = bench.run()
    assert status["cache"]["hitRate"] == "61.4"
    assert status["cache"]["tiers"] == [
        {"name": "cpu", "state": "Ready", "capacity": "32Gi", "used": "1Gi", "hitTokens": 123000}
    ]
    assert (status["engineVersion"], status["connectorVersion"]) == ("0.32", "0.1.0")
    assert status["cacheNamespace"] == "ab12"
    token = base64.b64decode(bench.cluster.objects["Secret", "serving", "qwen-admin-token"]["data"]["token"])
    asked = [request for request in bench.requests if request.url.port == 8081]
    assert all(request.headers["authorization"] == f"Bearer {token.decode()}" for request in asked)
    assert all("authorization" not in request.headers for request in bench.requests if request not in asked)

    bench.cluster.writes.clear()
    count, bench.now = len(bench.requests), bench.now + timedelta(seconds=3)
    bench.run()
    assert len(bench.requests) == count
    # Half a minute later a few more hits are the same rounded number: nothing is written.
    bench.now += timedelta(seconds=30)
    bench.answers["/v1/stats"] = stats(hit_tokens=123499)
    bench.run()
    assert len(bench.requests) > count
    assert bench.cluster.writes == []
    # Silence leaves the numbers, and readiness, as they are.
    bench.now += timedelta(seconds=60)
    bench.answers = {}
    assert conditions(bench.run())["Ready"] == ("True", "AllPodsReady")
    assert bench.status["cache"]["hitRate"] == "61.4"


def test_a_tier_that_a_pod_has_not_is_named() -> None:
    bench = Bench()
    bench.answers = {"/v1/stats": stats(state="PinningUnavailable", detail="too little may be locked")}
    bench.run()
    bench.make_ready()
    status = bench.run()
    assert conditions(status)["CacheTiersReady"] == ("False", "PinnedMemoryUnavailable")
    assert conditions(status)["Ready"] == ("False", "PinnedMemoryUnavailable")
    bench.answers = {"/v1/stats": stats()}
    bench.now += timedelta(minutes=1)
    assert conditions(bench.run())["Ready"] == ("True", "AllPodsReady")
    assert bench.reasons[-2:] == ["TierUnavailable", "TierRecovered"]


def test_a_remote_tier_that_is_away_is_named_and_comes_back() -> None:
    remote = {"valkey": {"endpoints": ["v:6379"]}}
    bench = Bench(with_value(BODY, "spec.cache.tiers.remote", remote))
    answer = stats()
    down = {**answer["tiers"][0], "name": "remote", "state": "RemoteUnreachable"}
    bench.answers = {"/v1/stats": {**answer, "tiers": [*answer["tiers"], down]}}
    bench.run()
    bench.make_ready()
    assert conditions(bench.run())["CacheTiersReady"] == ("False", "RemoteUnreachable")
    assert conditions(bench.status)["Available"] == ("True", "PodsReady")
    up = {**down, "state": "Ready"}
    bench.answers = {"/v1/stats": {**answer, "tiers": [*answer["tiers"], up]}}
    bench.now += timedelta(minutes=1)
    assert conditions(bench.run())["Ready"] == ("True", "AllPodsReady")
    assert bench.reasons[-2:] == ["TierUnavailable", "TierRecovered"]


def test_a_connector_that_does_not_fit_is_named() -> None:
    bench = Bench()
    answer = stats()
    text = "vLLM 0.99 was read, which this connector is not tested with"
    answer["scheduler"] = {"ready": False, "reason": text}
    bench.answers = {"/v1/stats": answer}
    bench.run()
    bench.make_ready()
    status = bench.run()
    assert conditions(status)["CacheTiersReady"] == ("False", "ConnectorMismatch")
    assert conditions(status)["Degraded"] == ("True", "ConnectorMismatch")


def test_a_flush_reports_what_it_did() -> None:
    bench = Bench()
    bench.run()
    bench.make_ready()
    done = {"process": "rank0", "tier": "cpu", "complete": True}
    bench.answers = {"/v1/flush": {"complete": True, "results": [done]}}
    bench.annotate(**{FLUSH_ANNOTATION: "first"})
    status = bench.run()
    (request,) = (entry for entry in bench.requests if entry.url.path == "/v1/flush")
    assert json.loads(request.content)["tiers"] == ["gpu", "cpu"]
    assert status["lastFlush"]["complete"] is True
    assert status["lastFlush"]["requestID"] == "first"
    assert "FlushCompleted" in bench.reasons
    bench.run()
    assert len([entry for entry in bench.requests if entry.url.path == "/v1/flush"]) == 1

    # Another one that leaves something behind, and names a tier that is not there.
    failed = {"process": "rank0", "tier": "cpu", "complete": False, "reason": "3 objects are being read"}
    bench.answers = {"/v1/flush": {"complete": False, "results": [failed]}}
    bench.annotate(**{FLUSH_ANNOTATION: "second", TIERS_ANNOTATION: "cpu, disk"})
    status = bench.run()
    assert status["lastFlush"]["complete"] is False
    assert status["lastFlush"]["failedPods"] == ["qwen-0"]
    assert "3 objects are being read" in status["lastFlush"]["message"]
    assert "no tier disk" in status["lastFlush"]["message"]
    assert conditions(status)["Degraded"] == ("True", "FlushIncomplete")
    assert conditions(status)["Ready"] == ("True", "AllPodsReady")
    assert "FlushFailed" in bench.reasons
    bench.answers = {"/v1/flush": {"complete": True, "results": []}}
    bench.annotate(**{FLUSH_ANNOTATION: "third", TIERS_ANNOTATION: "cpu"})
    status = bench.run()
    assert conditions(status)["Degraded"] == ("False", "AsExpected")
    assert "message" not in status["lastFlush"]


def test_a_flush_that_the_operators_end_interrupted_is_done_again() -> None:
    bench = Bench()
    bench.run()
    bench.make_ready()
    bench.annotate(**{FLUSH_ANNOTATION: "x"})
    bench.set("status.lastFlush", {"requestID": "x", "requestedAt": "2030-01-01T12:00:00Z", "tiers": ["cpu"]})
    bench.answers = {"/v1/flush": {"complete": True, "results": []}}
    assert bench.run()["lastFlush"]["complete"] is True


def test_a_flush_without_a_pod_is_not_complete() -> None:
    bench = Bench()
    bench.annotate(**{FLUSH_ANNOTATION: "x"})
    status = bench.run()
    assert status["lastFlush"]["complete"] is False


def test_only_reclaim_delete_holds_a_resource() -> None:
    bench = Bench()
    bench.run()
    assert "finalizers" not in bench.cluster.objects[KEY]["metadata"]
    bench.run(reclaimPolicy="Delete")
    assert bench.cluster.objects[KEY]["metadata"]["finalizers"] == [FINALIZER]
    bench.run(reclaimPolicy="Retain")
    assert bench.cluster.objects[KEY]["metadata"]["finalizers"] == []


def reclaiming(**spec: Any) -> Bench:
    """A resource that is being deleted after it had been ready."""
    body = with_value(BODY, "spec.reclaimPolicy", "Delete")
    for path, value in spec.items():
        body = with_value(body, f"spec.{path.replace('__', '.')}", value)
    bench = Bench(body)
    bench.run()
    bench.cluster.objects[KEY]["metadata"]["deletionTimestamp"] = "2030-01-01T12:00:00Z"
    return bench


def test_claims_go_with_the_resource_whatever_its_generation() -> None:
    """Deletion raises no generation, so one that was seen must not end the reconcile early."""
    claims = {"claimTemplate": {"size": "20Gi"}}
    bench = reclaiming(cache__tiers__disk={"capacity": "10Gi", "volume": claims})
    labels = bench.cluster.objects["StatefulSet", "serving", "qwen"]["spec"]["selector"]["matchLabels"]
    for name, own in {"disk-qwen-0": labels, "other": {}}.items():
        bench.cluster.objects["PersistentVolumeClaim", "serving", name] = {
            "metadata": {"name": name, "namespace": "serving", "labels": own},
            "spec": {"resources": {"requests": {"storage": "20Gi"}}},
        }
    bench.run()
    left = [key[2] for key in bench.cluster.objects if key[0] == "PersistentVolumeClaim"]
    assert left == ["other"]
    assert bench.cluster.objects[KEY]["metadata"]["finalizers"] == []
    assert "Reclaimed" in bench.reasons


def test_a_purge_that_fails_holds_the_resource_until_it_is_forced() -> None:
    bench = reclaiming(cache__tiers__remote={"valkey": {"endpoints": ["v:6379"]}})
    for _ in range(7):
        assert bench.outcome().again_in_s is not None
    assert bench.cluster.objects[KEY]["metadata"]["finalizers"] == [FINALIZER]
    assert bench.reasons.count("ReclaimFailed") == 1
    bench.annotate(**{FORCE_ANNOTATION: "yes"})
    bench.outcome()
    assert bench.cluster.objects[KEY]["metadata"]["finalizers"] == []


def test_claims_grow_and_nothing_else_of_them_changes() -> None:
    def disk(size: str, **more: Any) -> dict[str, Any]:
        return {"capacity": "10Gi", "volume": {"claimTemplate": {"size": size, **more}}}

    bench = Bench(with_value(BODY, "spec.cache.tiers.disk", disk("20Gi")))
    bench.run()
    labels = bench.cluster.objects["StatefulSet", "serving", "qwen"]["spec"]["selector"]["matchLabels"]
    claim = ("PersistentVolumeClaim", "serving", "disk-qwen-0")
    bench.cluster.objects[claim] = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim[2], "namespace": "serving", "labels": labels, "resourceVersion": "1"},
        "spec": {"resources": {"requests": {"storage": "20Gi"}}},
    }
    bench.run(cache__tiers__disk=disk("30Gi"))
    assert bench.cluster.objects[claim]["spec"]["resources"]["requests"]["storage"] == "30Gi"
    template = bench.cluster.objects["StatefulSet", "serving", "qwen"]["spec"]["volumeClaimTemplates"][0]
    # The template of a StatefulSet cannot change: it stays, or every apply would be refused.
    assert template["spec"]["resources"]["requests"]["storage"] == "20Gi"
    status = bench.run(cache__tiers__disk=disk("15Gi"))
    assert conditions(status)["Accepted"] == ("False", "Immutable")
    status = bench.run(cache__tiers__disk=disk("30Gi", storageClassName="fast"))
    assert conditions(status)["Accepted"] == ("False", "Immutable")
    status = bench.run(cache__tiers__disk={"capacity": "10Gi"})
    assert conditions(status)["Accepted"] == ("False", "Immutable")


def test_a_resource_that_has_gone() -> None:
    bench = Bench()
    del bench.cluster.objects[KEY]
    assert bench.outcome() == Outcome()


def test_what_was_read_before_somebody_else_wrote_is_read_again() -> None:
    class Overtaken(FakeCluster):
        overtake = True

        def patch_status(self, manifest: Manifest, status: Mapping[str, Any]) -> Manifest:
            if self.overtake:
                self.overtake = False
                self.objects[KEY]["metadata"] |= {"resourceVersion": "77"}
            return super().patch_status(manifest, status)

    bench = Bench(cluster=Overtaken())
    assert conditions(bench.run())["Accepted"] == ("True", "Valid")


def test_endless_conflicts_are_an_error() -> None:
    class Contested(FakeCluster):
        def patch_status(self, manifest: Manifest, status: Mapping[str, Any]) -> Manifest:
            raise ClusterError("the object has been modified", 409)

    bench = Bench(cluster=Contested())
    with pytest.raises(ClusterError, match="modified"):
        bench.run()


@pytest.mark.parametrize("status", [409, 429, 500, 503, 403, 422, None])
def test_errors_of_the_api_server_are_shown_and_overcome(status: int | None) -> None:
    bench = Bench()
    bench.cluster.faults["apply NetworkPolicy"] = status
    failure = bench.outcome().failure
    assert failure is not None
    assert failure.is_final == (status == 422)
    shown = conditions(bench.status)
    assert shown["Accepted"] == ("True", "Valid")
    assert shown["Ready"] == ("False", "ApplyFailed")
    # The children before the refused one stand, the one after it does not.
    assert {key[0] for key in bench.cluster.objects} == {"KVCache", "Secret", "ConfigMap", "Service"}
    bench.cluster.faults.clear()
    assert bench.outcome().failure is None
    assert conditions(bench.status)["Ready"] == ("False", "RolloutUnderWay")
    assert WORKLOAD in bench.cluster.objects


def test_events_that_are_lost_change_nothing() -> None:
    bench = Bench()
    bench.cluster.faults["Event"] = 403
    assert conditions(bench.run())["Accepted"] == ("True", "Valid")
