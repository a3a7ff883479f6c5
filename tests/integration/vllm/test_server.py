# SPDX-License-Identifier: Apache-2.0
"""vLLM's server as it runs in a pod: processes of their own, hits over HTTP, statistics over the sockets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvcache.control.client import ControlClient
from kvcache.control.snapshot import Snapshot
from kvcache_operator.local.memory import remove_unused, shared_files
from tests.integration.vllm.conftest import MakePrompt
from tests.integration.vllm.engines import ANSWER, CHUNK, Reference, Tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

_TOKEN = "a token"


class Server:
    """`vllm serve` of the tiny model with the connector."""

    def __init__(self, model: Path, runtime_dir: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        token_file = log.parent / "token"
        token_file.write_text(_TOKEN)
        transfer = {
            "kv_connector": "LMCacheConnectorV1Dynamic",
            "kv_role": "kv_both",
            "kv_connector_module_path": "kvcache.integration.vllm.connector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "runtime_dir": str(runtime_dir),
                "tiers": {"cpu": {"capacity": "64Mi"}},
            },
        }
        arguments = {
            "model": model,
            "served-model-name": "tiny",
            "host": "127.0.0.1",
            "port": self._port,
            "max-model-len": 4096,
            "dtype": "float32",
            "num-gpu-blocks-override": 64,
            "kv-transfer-config": json.dumps(transfer),
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        command += [f"--{name}={value}" for name, value in arguments.items()]
        self._log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ
                | {
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                    "VLLM_PLUGINS": "kvcache,kvcache_admin",
                    "KVCACHE_ADMIN_TOKEN_FILE": str(token_file),
                },
                start_new_session=True,
            )
        self.pids = {self.process.pid}

    def wait_until_ready(self) -> None:
        for _ in range(1200):
            assert self.process.poll() is None, self._log.read_text()[-4000:]
            try:
                self._call("/health")
                break
            except OSError:
                time.sleep(0.1)
        self.pids |= {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}

    def complete(self, prompt: Tokens) -> Tokens:
        """The ids of the answer."""
        asked = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return list(json.loads(self._call("/v1/completions", asked))["choices"][0]["token_ids"])

    def forget_gpu(self) -> None:
        assert json.loads(self._call("/kvcache/v1/reset-gpu", {})) == {"success": True}

    def external_hits(self) -> float:
        lines = self._call("/metrics").decode().splitlines()
        (line,) = [line for line in lines if line.startswith("vllm:external_prefix_cache_hits_total{")]
        return float(line.split()[-1])

    def kill(self) -> None:
        """All of its processes at once, as the kernel does when memory is short."""
        left_behind = shared_files(self.pids)
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        _eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in self.pids))
        remove_unused(left_behind)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.kill()

    def _call(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {_TOKEN}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return bytes(answer.read())


def _snapshot(runtime_dir: Path) -> Snapshot:
    async def ask() -> Snapshot:
        client = ControlClient(runtime_dir, expected_ranks=1, timeout_s=10)
        try:
            return await client.snapshot()
        finally:
            client.close()

    return asyncio.run(ask())


def _eventually(holds: Callable[[], bool]) -> bool:
    for _ in range(100):
        if holds():
            return True
        time.sleep(0.1)
    return False


def test_a_server_is_killed_and_another_takes_its_place(
    tiny_model: Path, reference: Reference, make_prompt: MakePrompt, socket_dir: Path, tmp_path: Path
) -> None:
    prompt = make_prompt(4 * CHUNK + 77)
    expected = reference(prompt)
    sockets = {"control.rank0.sock", "control.scheduler.sock", "lookup.rank0.sock"}
    first = Server(tiny_model, socket_dir, tmp_path / "log")
    second = None
    try:
        first.wait_until_ready()
        assert first.complete(prompt) == expected
        first.forget_gpu()
        assert first.complete(prompt) == expected
        assert first.external_hits() == 4 * CHUNK

        snapshot = _snapshot(socket_dir)
        assert (snapshot.missing, snapshot.not_ready()) == ({}, {})
        scheduler = snapshot.scheduler
        assert scheduler is not None
        assert scheduler.hit_cache_tokens == {"cpu": 4 * CHUNK}
        assert scheduler.prompt_tokens == 2 * len(prompt) == 4 * CHUNK + scheduler.computed_tokens
        (tier,) = snapshot.ranks[0].tiers
        assert (tier.objects, tier.leases) == (4, 0)
        assert {snapshot.ranks[0].pid, scheduler.pid} <= first.pids

        first.kill()
        assert {path.name for path in socket_dir.iterdir() if path.suffix == ".sock"} == sockets
        second = Server(tiny_model, socket_dir, tmp_path / "log")
        second.wait_until_ready()
        assert second.complete(prompt) == expected
        second.forget_gpu()
        assert second.complete(prompt) == expected
        assert second.external_hits() == 4 * CHUNK
        assert _snapshot(socket_dir).not_ready() == {}
    finally:
        for server in (first, second):
            if server is not None:
                server.stop()
    assert second is not None
    assert _eventually(lambda: not any(psutil.pid_exists(pid) for pid in first.pids | second.pids))
