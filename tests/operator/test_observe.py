# SPDX-License-Identifier: Apache-2.0
"""Why a pod does not serve, as its status tells."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_operator.observe import Observed, masked, observe, pod_state
from kvcache_operator.plan import in_mebibytes
from kvcache_operator.verdicts import Sight, verdicts
from tests.operator.resources import SMALLEST, plan_of


def pod(*containers: dict[str, Any], **status: Any) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": "1", "memory": "40Gi"}
    return {
        "metadata": {"name": "qwen-0", "namespace": "serving"},
        "spec": {"nodeName": "n1", "containers": [{"name": "vllm", "resources": {"limits": limits}}]},
        "status": {"containerStatuses": list(containers), **status},
    }


def container(name: str = "vllm", **state: Any) -> dict[str, Any]:
    return {"name": name, "image": "example.org/vllm:1", "ready": False, "restartCount": 1, **state}


def ended(message: str = "", code: int = 1, reason: str = "Error") -> dict[str, Any]:
    terminated = {"exitCode": code, "reason": reason, "message": message}
    return {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": terminated}}


def unschedulable(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return pod(conditions=[condition])


CASES: list[tuple[dict[str, Any], str, str]] = [
    (unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."), "InsufficientGPU", "0/3"),
    (unschedulable("0/3 nodes are available: 3 Insufficient memory."), "Unschedulable", "memory"),
    (
        pod(container(state={"waiting": {"reason": "ImagePullBackOff", "message": "back-off"}})),
        "ImagePullError",
        "example.org/vllm:1 cannot be pulled",
    ),
    (
        pod(container(state={"waiting": {"reason": "CreateContainerConfigError", "message": "secret x"}})),
        "ContainerConfigError",
        "secret x",
    ),
    (pod(container(**ended(code=137, reason="OOMKilled"))), "OOMKilled", "memory limit of 40Gi"),
    (
        pod(container(**ended("RuntimeError: Failed to infer device type"))),
        "GPUNotVisible",
        "spec.runtimeClassName",
    ),
    (pod(container(**ended("UnspecifiedPlatform has no attribute"))), "GPUNotVisible", "driver"),
    (
        pod(container(**ended("ImportError: cannot import name KVConnectorBase_V1"))),
        "ConnectorMismatch",
        "do not fit",
    ),
    (pod(container(**ended("ValueError: no"))), "CrashLoop", "code 1 (1 restarts): ValueError: no"),
    (pod(container(state={"running": {}}, restartCount=0)), "ModelLoading", "loading"),
    (
        pod(
            container(state={"running": {}}, ready=True),
            container("admin", state={"running": {}}),
        ),
        "Starting",
        "waiting for admin",
    ),
    (pod(), "Starting", "being made"),
]


@pytest.mark.parametrize(("manifest", "reason", "text"), CASES, ids=[case[1] for case in CASES])
def test_reasons(manifest: dict[str, Any], reason: str, text: str) -> None:
    state = pod_state(manifest)
    assert (state.ready, state.reason) == (False, reason)
    assert text in state.message


def test_a_pod_that_goes_is_not_ready() -> None:
    manifest = pod(conditions=[{"type": "Ready", "status": "True"}])
    assert pod_state(manifest).ready
    manifest["metadata"]["deletionTimestamp"] = "2030-01-01T12:00:00Z"
    assert not pod_state(manifest).ready


@pytest.mark.parametrize(
    "text",
    [
        "token=abcdefgh failed",
        "HF_TOKEN: hf_abcdefghijkl",
        "redis://user:hunter2@host:6379",
        "Authorization: Bearer abcdef",
        'password="hunter2"',
    ],
)
def test_secrets_do_not_get_into_a_status(text: str) -> None:
    shown = masked(text)
    assert "***" in shown
    assert not any(secret in shown for secret in ("abcdef", "hunter2"))


def workload(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"generation": 1},
        "spec": {"replicas": 1},
        "status": {"observedGeneration": 1, **status},
    }


def shown(observed: Observed) -> dict[str, tuple[str, str]]:
    found = verdicts(plan_of(SMALLEST), Sight(observed))
    return {verdict.type: (verdict.status, verdict.reason) for verdict in found}


@pytest.mark.parametrize(
    ("reason", "progressing", "degraded"),
    [
        ("InsufficientGPU", "False", "False"),
        ("ImagePullError", "False", "False"),
        ("ModelLoading", "True", "False"),
        ("OOMKilled", "True", "True"),
        ("GPUNotVisible", "True", "True"),
        ("CrashLoop", "True", "True"),
    ],
)
def test_a_pods_reason_becomes_the_resources(reason: str, progressing: str, degraded: str) -> None:
    manifest = next(case[0] for case in CASES if case[1] == reason)
    found = shown(observe(workload(replicas=1, updatedReplicas=1), [manifest]))
    assert found["Ready"] == ("False", reason)
    assert found["Progressing"][0] == progressing
    assert found["Degraded"][0] == degraded


def test_a_pod_out_of_memory_is_told_with_what_its_tiers_take() -> None:
    manifest = next(case[0] for case in CASES if case[1] == "OOMKilled")
    plan = plan_of(SMALLEST)
    found = verdicts(plan, Sight(observe(workload(replicas=1, updatedReplicas=1), [manifest])))
    message = next(verdict.message for verdict in found if verdict.type == "Degraded")
    assert "container vllm went beyond its memory limit of 40Gi" in message
    assert f"of the {in_mebibytes(plan.budget.computed)}" in message
    assert "32768Mi are the cpu tier" in message


def test_pods_that_cannot_be_made() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    found = shown(observe(workload(conditions=[failure])))
    assert found["Progressing"] == ("False", "QuotaExceeded")
    assert found["Degraded"] == ("True", "PodsFail")
    stuck = {"type": "Progressing", "status": "False", "message": "timed out"}
    assert shown(observe(workload(conditions=[stuck])))["Progressing"] == ("False", "RolloutStuck")


def test_scaled_to_zero() -> None:
    manifest = workload()
    manifest["spec"]["replicas"] = 0
    assert shown(observe(manifest))["Ready"] == ("False", "ScaledToZero")
