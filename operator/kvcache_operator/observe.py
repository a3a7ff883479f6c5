# SPDX-License-Identifier: Apache-2.0
"""What became of the children of a resource: facts about the workload and about each pod. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcache_operator.render import Manifest

OOM_KILLED = "OOMKilled"
GPU_NOT_VISIBLE = "GPUNotVisible"
CRASH_LOOP = "CrashLoop"
CONNECTOR_MISMATCH = "ConnectorMismatch"
CONTAINER_CONFIG = "ContainerConfigError"
IMAGE_PULL = "ImagePullError"
INSUFFICIENT_GPU = "InsufficientGPU"
UNSCHEDULABLE = "Unschedulable"
MODEL_LOADING = "ModelLoading"
STARTING = "Starting"
TERMINATING = "Terminating"

HUMAN_NEEDED = (OOM_KILLED, GPU_NOT_VISIBLE, CONNECTOR_MISMATCH, CRASH_LOOP, CONTAINER_CONFIG)
"""Reasons of pods that do not go away by waiting, the most telling first."""
BLOCKED = (IMAGE_PULL, INSUFFICIENT_GPU, UNSCHEDULABLE)
"""Reasons for which a rollout waits."""

_ENGINE = "vllm"
_TAIL = 200
_GPU_SIGNS = re.compile(
    r"UnspecifiedPlatform|Failed to infer device type|No CUDA GPUs are available|libcuda\.so|"
    r"NVIDIA driver|NVML|CUDA driver version is insufficient|no CUDA-capable device",
    re.IGNORECASE,
)
_MISMATCH_SIGNS = re.compile(
    r"kvcache\b.*(does not (support|fit)|untested|needs vLLM)|KVConnectorBase", re.IGNORECASE
)
_SECRETS = re.compile(
    r"(hf_[A-Za-z0-9]{8,}|Bearer\s+\S+|://[^/\s:]+:[^@\s]+@|(password|token|secret|key)[\"']?\s*[=:]\s*\S+)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class PodState:
    """One pod."""

    name: str
    node: str
    address: str
    """IP; empty while it has none."""
    ready: bool
    reason: str
    message: str
    is_going: bool
    """It is being deleted."""


@dataclass(frozen=True)
class Observed:
    """The workload and its pods as far as the status of their resource depends on them."""

    is_current: bool
    """The numbers are about the newest template; before its controller has seen it they are not."""
    wanted: int
    replicas: int
    updated: int
    ready: int
    stuck: str
    """Why the rollout does not go on, empty while it does."""
    failure: str
    """Why pods cannot be created, empty when they can."""
    pods: tuple[PodState, ...] = ()

    @property
    def is_complete(self) -> bool:
        """All pods are of the newest template and ready."""
        return self.is_current and self.replicas == self.updated == self.ready == self.wanted


def observe(workload: Manifest, pods: Iterable[Manifest] = ()) -> Observed:
    """The state of a Deployment or StatefulSet, and of its pods, as the API server gives them."""
    spec, status = workload["spec"], workload.get("status") or {}
    conditions: dict[str, dict[str, Any]] = {entry["type"]: entry for entry in status.get("conditions") or ()}
    progressing, failing = conditions.get("Progressing", {}), conditions.get("ReplicaFailure", {})
    return Observed(
        is_current=(status.get("observedGeneration") or 0) >= workload["metadata"].get("generation", 0),
        wanted=spec.get("replicas", 1),
        replicas=status.get("replicas") or 0,
        updated=status.get("updatedReplicas") or 0,
        ready=status.get("readyReplicas") or 0,
        stuck=progressing.get("message", "") if progressing.get("status") == "False" else "",
        failure=failing.get("message", "") if failing.get("status") == "True" else "",
        pods=tuple(sorted((pod_state(pod) for pod in pods), key=lambda pod: pod.name)),
    )


def pod_state(pod: Manifest) -> PodState:
    """One pod, with the reason why it does not serve."""
    status, meta = pod.get("status") or {}, pod["metadata"]
    conditions = {entry["type"]: entry for entry in status.get("conditions") or ()}
    ready = conditions.get("Ready", {}).get("status") == "True"
    is_going = meta.get("deletionTimestamp") is not None
    reason, message = ("", "") if ready else _why(pod, status, conditions)
    if is_going:
        ready, reason, message = False, TERMINATING, "it is being replaced or removed"
    return PodState(
        name=meta["name"],
        node=pod["spec"].get("nodeName") or "",
        address=status.get("podIP") or "",
        ready=ready,
        reason=reason,
        message=masked(message),
        is_going=is_going,
    )


def _why(
    pod: Manifest, status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]
) -> tuple[str, str]:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        text = str(scheduled.get("message", ""))
        return (INSUFFICIENT_GPU if _lacks_gpu(pod, text) else UNSCHEDULABLE), text
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    for container in containers:
        found = _trouble(pod, container)
        if found is not None:
            return found
    if status.get("reason") == "Evicted":
        return CRASH_LOOP, f"evicted: {status.get('message', '')}"
    engine: Mapping[str, Any] = next((entry for entry in containers if entry["name"] == _ENGINE), {})
    if "running" in (engine.get("state") or {}) and not engine.get("ready"):
        return MODEL_LOADING, "vLLM is loading the model"
    waiting = [entry["name"] for entry in containers if not entry.get("ready")]
    if waiting and any("running" in (entry.get("state") or {}) for entry in containers):
        return STARTING, f"waiting for {', '.join(waiting)}"
    return STARTING, "its containers are being made"


def _trouble(pod: Manifest, container: Mapping[str, Any]) -> tuple[str, str] | None:
    """What ails a container, if something does."""
    name, state = container["name"], container.get("state") or {}
    waiting, image = state.get("waiting") or {}, container.get("image", "")
    reason = waiting.get("reason", "")
    if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
        return IMAGE_PULL, f"{image} cannot be pulled for container {name}: {waiting.get('message', reason)}"
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        return CONTAINER_CONFIG, f"container {name} cannot be made: {waiting.get('message', reason)}"
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    if not ended or ended.get("exitCode") == 0:
        return None
    if ended.get("reason") == OOM_KILLED:
        limit = _memory_limit(pod, name)
        return OOM_KILLED, f"container {name} went beyond its memory limit of {limit}"
    text = " ".join(str(ended.get("message") or ended.get("reason") or "").split())[-_TAIL:]
    if _GPU_SIGNS.search(text):
        return GPU_NOT_VISIBLE, (
            f"container {name} sees no GPU; check the driver of the node and spec.runtimeClassName: {text}"
        )
    if _MISMATCH_SIGNS.search(text):
        return CONNECTOR_MISMATCH, f"the cache and vLLM of {image} do not fit together: {text}"
    times = container.get("restartCount", 0)
    if times or reason == "CrashLoopBackOff" or state.get("terminated"):
        return (
            CRASH_LOOP,
            f"container {name} ended with code {ended.get('exitCode')} ({times} restarts): {text}",
        )
    return None


def _memory_limit(pod: Manifest, name: str) -> str:
    for container in pod["spec"].get("containers", ()):
        if container["name"] == name:
            return str(((container.get("resources") or {}).get("limits") or {}).get("memory", "the node"))
    return "the node"


def _lacks_gpu(pod: Manifest, text: str) -> bool:
    """Whether the scheduler names one of the extended resources that the pod asks for."""
    asked = {
        resource
        for container in pod["spec"].get("containers", ())
        for resource in ((container.get("resources") or {}).get("limits") or {})
        if "/" in resource
    }
    return any(f"Insufficient {resource}" in text for resource in asked)


def masked(text: str) -> str:
    """`text` without what looks like a secret."""
    return _SECRETS.sub("***", text)[:1024]
