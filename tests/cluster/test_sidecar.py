# SPDX-License-Identifier: Apache-2.0
"""The operator, the API server, real admin sidecars, and behind each one a real engine over a real Valkey:
what a flush, a reclaim and the numbers of the status are worth. The pods themselves are played."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import valkey

from tests.cluster.api import Api, die_with_parent
from tests.cluster.engine import CHUNKS
from tests.cluster.kubectl import Kubectl, eventually
from tests.cluster.operators import ROOT, Operators
from tests.cluster.test_life import conditions, make_ready
from tests.operator.resources import SMALLEST, with_value
from tests.ports import free_port
from tests.storage.remote.servers import valkey_binaries, valkey_server

OURS, OTHERS = "ab" * 16, "cd" * 16
OBJECTS = 2 * CHUNKS
"""That one engine stores at its start."""


class Pod:
    """One pod: the processes of its two containers, on an address of its own."""

    def __init__(self, name: str, address: str, port: int, folder: Path, token: str, config: str) -> None:
        self.name, self.address, self.port = name, address, port
        self._folder, self._sockets = folder, Path(tempfile.mkdtemp(prefix="kvc-", dir="/tmp"))
        folder.mkdir()
        (folder / "token").write_text(token)
        self.mount(config)
        self._engine = self._start_engine()
        admin = ("-m", "kvcache.admin", "--host", address, "--port", str(port))
        files = ("--token-file", str(folder / "token"), "--config-file", str(folder / "config.yaml"))
        vllm = f"http://{address}:{free_port()}"  # where nobody listens: vLLM's own cache cannot be had
        more = ("--runtime-dir", str(self._sockets), "--vllm-url", vllm, "--expected-ranks", "1")
        self._admin = self._start("admin", *admin, *files, *more)

    def mount(self, config: str) -> None:
        """What the kubelet does when a ConfigMap has changed."""
        fresh = self._folder / "fresh"
        fresh.write_text(config)
        fresh.replace(self._folder / "config.yaml")

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://{self.address}:{self.port}/readyz", trust_env=False).is_success
        return False

    def kill_engine(self) -> None:
        self._engine.kill()
        self._engine.wait()

    def restart_engine(self) -> None:
        self._engine = self._start_engine()

    def end(self) -> None:
        for process in (self._admin, self._engine):
            process.kill()
            process.wait()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _start_engine(self) -> subprocess.Popen[bytes]:
        arguments = (str(self._folder / "config.yaml"), str(self._sockets), OURS)
        return self._start("engine", "-m", "tests.cluster.engine", *arguments)

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, *arguments]
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, preexec_fn=die_with_parent)


class World:
    """A resource of two pods that are ready."""

    def __init__(self, kubectl: Kubectl, namespace: str, store: valkey.Valkey, pods: list[Pod]) -> None:
        self.kubectl, self.namespace, self.store, self.pods = kubectl, namespace, store, pods

    @property
    def status(self) -> dict[str, Any]:
        found = self.kubectl.get("kvc", "qwen", self.namespace)
        assert found is not None
        return found.get("status") or {}

    @property
    def config(self) -> str:
        """What the operator has the pods mount."""
        found = self.kubectl.get("cm", "qwen-config", self.namespace)
        assert found is not None
        return str(found["data"]["config.yaml"])

    def stored(self, namespace: str) -> int:
        return sum(1 for _ in self.store.scan_iter(match=f"*{namespace}/*"))

    def flush(self, request: str, tiers: str) -> dict[str, Any]:
        """The status of a flush that is done."""
        asked = (f"kvcache.dev/flush-requested-at={request}", f"kvcache.dev/flush-tiers={tiers}")
        self.kubectl("annotate", "kvc", "qwen", "--overwrite", "-n", self.namespace, *asked)

        def completed() -> dict[str, Any] | None:
            last: dict[str, Any] = self.status.get("lastFlush") or {}
            return last if last.get("requestID") == request and last.get("completedAt") else None

        return eventually(completed) or {}

    def events(self, reason: str) -> list[str]:
        found = self.kubectl.items("events", self.namespace)
        return [entry["message"] for entry in found if entry["reason"] == reason]


@pytest.fixture
def world(
    api: Api, kubectl: Kubectl, namespace: str, operators: Operators, tmp_path: Path
) -> Iterator[World]:
    binaries = valkey_binaries()
    if not binaries:
        pytest.skip("no server of Valkey or Redis on this machine")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(valkey_server(next(iter(binaries.values())), tmp_path / "valkey"))
        store = valkey.Valkey(port=server.port)
        stack.callback(store.close)
        port = free_port()
        document = with_value(SMALLEST, "spec.replicas", 2)
        for path, value in {
            "cache.tiers.cpu.capacity": "256Mi",
            "cache.tiers.remote": {"valkey": {"endpoints": [server.endpoint]}},
            "admin.port": port,
            "engine.port": free_port(),
            "reclaimPolicy": "Delete",
            # Fixed, so that a larger tier is no other pod.
            "resources": {"requests": {"memory": "16Gi"}, "limits": {"memory": "16Gi"}},
        }.items():
            document = with_value(document, f"spec.{path}", value)
        operators.start(namespaces=f'["{namespace}"]', stats_s="1", flush_timeout_s="30")
        kubectl.apply(document, "-n", namespace)
        found = eventually(lambda: (pods := kubectl.items("pod", namespace))[1:] and pods)
        secret = kubectl.get("secret", "qwen-admin-token", namespace)
        config = kubectl.get("cm", "qwen-config", namespace)
        assert secret is not None
        assert config is not None
        token = base64.b64decode(secret["data"]["token"]).decode()
        pods = []
        for number, entry in enumerate(found, start=2):
            name = entry["metadata"]["name"]
            folder, address = tmp_path / name, f"127.0.0.{number}"
            pods.append(Pod(name, address, port, folder, token, config["data"]["config.yaml"]))
            stack.callback(pods[-1].end)
        for pod in pods:
            eventually(pod.is_ready)
            make_ready(kubectl, namespace, pod.address, pod.name)
        yield World(kubectl, namespace, store, pods)


def test_what_the_status_says_of_the_cache_is_so(world: World) -> None:
    first, second = world.pods
    # Each engine found one of two prompts, each time that it was asked.
    eventually(lambda: world.status.get("cache", {}).get("hitRate") == "50.0", "hit rate")

    def tiers() -> list[tuple[str, str]]:
        return [(tier["name"], tier["state"]) for tier in world.status["cache"]["tiers"]]

    eventually(lambda: tiers() == [("cpu", "Ready"), ("remote", "Ready")])
    # Of both pods together.
    eventually(lambda: world.status["cache"]["tiers"][0]["capacity"] == "512Mi")
    assert world.status["cacheNamespace"] == OURS
    eventually(lambda: conditions(world.kubectl, world.namespace)["Ready"] == ("True", "AllPodsReady"))
    assert world.kubectl("get", "kvc", "-n", world.namespace).split()[12] == "50.0"

    # Somebody else's objects in the same store: another model's, and what is no object at all.
    eventually(lambda: world.stored(OURS) == 2 * OBJECTS, "both engines have written to Valkey")
    for name in list(world.store.scan_iter(match=f"*{OURS}/*")):
        payload = world.store.get(name)
        assert isinstance(payload, bytes)
        world.store.set(name.replace(OURS.encode(), OTHERS.encode()), payload)
    world.store.set("somebody", "else")

    # A flush empties every tier of every pod, and of the shared one what is its own.
    done = world.flush("first", "cpu,remote")
    assert (done["complete"], done["tiers"]) == (True, ["cpu", "remote"])
    assert (world.stored(OURS), world.stored(OTHERS)) == (0, 2 * OBJECTS)
    # Events are written after the status.
    emptied = ["flush first emptied cpu, remote of all pods"]
    eventually(lambda: world.events("FlushCompleted") == emptied)
    eventually(lambda: {tier["used"] for tier in world.status["cache"]["tiers"]} == {"0Mi"})

    # vLLM's own cache cannot be had: that one tier, of both pods, is what is missing.
    done = world.flush("second", "gpu,cpu")
    assert not done["complete"]
    assert done["failedPods"] == sorted(pod.name for pod in world.pods)
    assert f"{first.name}: gpu of vllm: vLLM at" in done["message"]
    assert "cpu of" not in done["message"]

    # A rank is gone: its pod and each of its tiers are named, and the other pod is not.
    second.kill_engine()
    done = world.flush("third", "cpu,remote")
    assert (done["complete"], done["failedPods"]) == (False, [second.name])
    assert f"{second.name}: cpu of rank0: " in done["message"]
    assert "remote: no rank says which objects are its own" in done["message"]
    assert conditions(world.kubectl, world.namespace)["Degraded"] == ("True", "FlushIncomplete")
    eventually(lambda: world.events("FlushFailed"))
    second.restart_engine()
    eventually(second.is_ready)
    assert world.flush("fourth", "cpu,remote")["complete"]
    assert world.stored(OURS) == 0

    # A larger tier than the engines have set aside: the pods stay, and what waits is said.
    before = world.kubectl.get("deployment", "qwen", world.namespace)
    larger = {"spec": {"cache": {"tiers": {"cpu": {"capacity": "300Mi"}}}}}
    world.kubectl.patch("kvc", "qwen", world.namespace, larger)
    eventually(lambda: "capacity: 300Mi" in world.config)
    for pod in world.pods:
        pod.mount(world.config)
    eventually(lambda: world.status["pendingRestart"] == ["tiers.cpu.capacity"])
    eventually(lambda: len(world.events("RestartNeeded")) == 1)
    after = world.kubectl.get("deployment", "qwen", world.namespace)
    assert before is not None
    assert after is not None
    assert before["spec"]["template"] == after["spec"]["template"]
    for pod in world.pods:
        pod.kill_engine()
        pod.restart_engine()
        eventually(pod.is_ready)
    eventually(lambda: world.status["pendingRestart"] == [])

    # Deleted: its objects go with it, and nobody else's.
    eventually(lambda: world.stored(OURS) == 2 * OBJECTS, "both engines have written all")
    world.kubectl("delete", "kvc", "qwen", "-n", world.namespace)
    assert (world.stored(OURS), world.stored(OTHERS)) == (0, 2 * OBJECTS)
    assert world.store.get("somebody") == b"else"
    eventually(lambda: world.events("Reclaimed"))
    assert world.events("ConfigRefused") == []
