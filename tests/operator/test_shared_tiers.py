# SPDX-License-Identifier: Apache-2.0
"""Flushes and reclaims touch what a resource's own pods can read, and nothing of others in the same store."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcache_operator.flush import FLUSH_ANNOTATION, TIERS_ANNOTATION
from kvcache_operator.reclaim import FINALIZER, sharer
from tests.operator.full import BIG, SHARED
from tests.operator.resources import plan_of, with_value
from tests.operator.test_reconcile import BODY, KEY, Bench, conditions, stats

REMOTE = {"valkey": {"endpoints": ["v:6379"]}}
OURS, SECOND = "ab" * 16, "cd" * 16
CONFIG = {"version": "1", "namespaces": {"rank0": OURS, "rank1": SECOND, "rank2": OURS}}


def bench_with(**spec: Any) -> Bench:
    """A resource with a remote tier and a ready pod of three ranks."""
    body = with_value(BODY, "spec.cache.tiers.remote", REMOTE)
    for path, value in spec.items():
        body = with_value(body, f"spec.{path.replace('__', '.')}", value)
    bench = Bench(body)
    bench.run()
    bench.make_ready()
    bench.answers = {"/v1/flush": {"complete": True, "results": []}, "/v1/config": CONFIG}
    return bench


def flushes(bench: Bench) -> list[tuple[list[str], str | None]]:
    """Tiers and namespace of each flush that a pod was asked for."""
    bodies = [json.loads(entry.content) for entry in bench.requests if entry.url.path == "/v1/flush"]
    return [(body["tiers"], body.get("scope", {}).get("namespace")) for body in bodies]


def test_of_a_tier_that_others_use_a_flush_takes_the_pods_own_namespaces() -> None:
    bench = bench_with()
    bench.annotate(**{FLUSH_ANNOTATION: "x"})
    status = bench.run()
    assert flushes(bench) == [(["gpu", "cpu"], None), (["remote"], OURS), (["remote"], SECOND)]
    assert status["lastFlush"]["complete"] is True
    assert status["lastFlush"]["tiers"] == ["gpu", "cpu", "remote"]


def test_without_a_rank_nothing_of_a_shared_tier_is_touched_and_that_is_said() -> None:
    bench = bench_with()
    bench.answers["/v1/config"] = {"version": "1", "namespaces": {}}
    bench.annotate(**{FLUSH_ANNOTATION: "x", TIERS_ANNOTATION: "remote"})
    status = bench.run()
    assert flushes(bench) == []
    assert status["lastFlush"]["complete"] is False
    assert "remote: no rank says which objects are its own" in status["lastFlush"]["message"]


@pytest.mark.parametrize(
    ("document", "shared"), [(BIG, ("remote", "nvme")), (SHARED, ("disk", "remote", "nvme"))]
)
def test_which_tiers_others_may_use(document: dict[str, Any], shared: tuple[str, ...]) -> None:
    assert plan_of(document).shared_tiers == shared


def deleted(bench: Bench) -> Bench:
    bench.cluster.objects[KEY]["metadata"]["deletionTimestamp"] = "2030-01-01T12:00:00Z"
    bench.requests.clear()
    bench.outcome()
    return bench


def test_a_reclaim_takes_the_resources_own_namespaces() -> None:
    bench = deleted(bench_with(reclaimPolicy="Delete"))
    assert flushes(bench) == [(["remote"], OURS), (["remote"], SECOND)]
    assert bench.cluster.objects[KEY]["metadata"]["finalizers"] == []
    assert "Reclaimed" in bench.reasons


def other(**changes: Any) -> dict[str, Any]:
    """Another resource that reads the same objects."""
    document = with_value(BODY, "metadata.name", "other")
    document = with_value(document, "metadata.uid", "4-5-6")
    document = with_value(document, "spec.cache.tiers.remote", REMOTE)
    document = with_value(document, "status.cacheNamespace", OURS)
    for path, value in changes.items():
        document = with_value(document, path.replace("__", "."), value)
    return document


def test_a_reclaim_leaves_what_another_resource_reads() -> None:
    bench = bench_with(reclaimPolicy="Delete")
    bench.set("status.cacheNamespace", OURS)
    bench.cluster.objects["KVCache", "serving", "other"] = other()
    deleted(bench)
    assert flushes(bench) == []
    assert FINALIZER not in bench.cluster.objects[KEY]["metadata"]["finalizers"]
    (event,) = (entry for entry in bench.cluster.events if entry["reason"] == "Reclaimed")
    assert "serving/other reads them too" in event["message"]


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({}, True),
        ({"status__cacheNamespace": SECOND}, False),
        ({"status": {}}, False),
        ({"spec__cache__tiers": {"cpu": {"capacity": "1Gi"}}}, False),
        ({"metadata__deletionTimestamp": "2030-01-01T12:00:00Z"}, False),
        ({"metadata__uid": "1-2-3"}, False),
    ],
)
def test_who_shares(changes: dict[str, Any], shares: bool) -> None:
    mine = with_value(BODY, "status.cacheNamespace", OURS)
    assert sharer(mine, [mine, other(**changes)]) == ("serving/other" if shares else "")
    # Who never told what it reads has nothing there that could be known.
    assert sharer(BODY, [other(status={})]) == ""


def test_a_configuration_that_a_pod_refuses_is_said() -> None:
    bench = Bench()
    bench.run()
    bench.make_ready()
    refused = {"version": "0.0.9", "problem": "tiers.disk.deadline_ms: unknown key"}
    bench.answers = {"/v1/stats": stats(), "/v1/config": refused}
    status = bench.run()
    assert conditions(status)["Degraded"] == ("True", "ConfigRefused")
    assert conditions(status)["Ready"] == ("True", "AllPodsReady")
    (event,) = (entry for entry in bench.cluster.events if entry["reason"] == "ConfigRefused")
    assert event["message"] == "pod qwen-0: tiers.disk.deadline_ms: unknown key"
    # A process that was not handed it yet refuses nothing.
    waiting = {"rank0": {"in_effect": False, "restart": [], "problem": "it was not handed over yet"}}
    bench.answers["/v1/config"] = CONFIG | {"problem": "", "processes": waiting}
    bench.now = bench.now.replace(hour=14)
    assert conditions(bench.run())["Degraded"] == ("False", "AsExpected")


def test_what_waits_for_a_restart_is_in_the_status_and_an_event() -> None:
    bench = Bench()
    bench.run()
    bench.make_ready()
    ranks = stats()["ranks"]
    waiting = ranks[0] | {"config_restart": ["tiers.cpu.capacity"]}
    scheduler = {"ready": True, "reason": "", "config_restart": ["chunk_size"]}
    bench.answers = {"/v1/stats": stats() | {"ranks": [waiting], "scheduler": scheduler}}
    bench.now = bench.now.replace(hour=13)
    status = bench.run()
    assert status["pendingRestart"] == ["chunk_size", "tiers.cpu.capacity"]
    (event,) = (entry for entry in bench.cluster.events if entry["reason"] == "RestartNeeded")
    assert "chunk_size, tiers.cpu.capacity" in event["message"]
    assert conditions(status)["Ready"] == ("True", "AllPodsReady")
    # Said once; and it goes with the pods, or when they have it.
    bench.now = bench.now.replace(hour=14)
    bench.run()
    assert bench.reasons.count("RestartNeeded") == 1
    bench.answers = {"/v1/stats": stats()}
    bench.now = bench.now.replace(hour=15)
    assert bench.run()["pendingRestart"] == []
    assert bench.reasons.count("RestartNeeded") == 1
