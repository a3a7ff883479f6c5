# SPDX-License-Identifier: Apache-2.0
"""vLLM's server as it runs in a pod: processes of their own."""

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

from kvcache.control.client import ControlClient
from kvcache.control.snapshot import Snapshot
from kvcache_operator.local.memory import remove_unused, shared_files
from tests.integration.vllm.engines import ANSWER, Tokens

_TOKEN = "a token"
_VLLMS_LABELS = ("engine", "model_name")


class Server:
    """`vllm serve` of the tiny model with the connector.

    Args:
        model: folder.
        runtime_dir: of the connector's sockets.
        log: file for what it prints.
        role: `kv_role`.
        extra: more of the cache's configuration.
        environment: more of it.
        more: further arguments, without their dashes.
    """

    def __init__(
        self,
        model: Path,
        runtime_dir: Path,
        log: Path,
        role: str = "kv_both",
        extra: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        token_file = log.parent / "token"
        token_file.write_text(_TOKEN)
        transfer = {
            "kv_connector": "LMCacheConnectorV1Dynamic",
            "kv_role": role,
            "kv_connector_module_path": "kvcache.integration.vllm.connector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "runtime_dir": str(runtime_dir),
                "tiers": {"cpu": {"capacity": "64Mi"}},
                **(extra or {}),
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
            **{name.replace("_", "-"): value for name, value in more.items()},
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
                }
                | (environment or {}),
                start_new_session=True,
            )
        self.pids = {self.process.pid}

    def wait_until_ready(self, timeout_s: float = 120) -> None:
        for _ in range(int(timeout_s * 10)):
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
        (value,) = self.metrics("vllm:external_prefix_cache_hits_total").values()
        return value

    def metrics(self, prefix: str) -> dict[str, float]:
        """Samples whose name starts with `prefix`: name and labels, without vLLM's own, to value."""
        found = {}
        for line in self._call("/metrics").decode().splitlines():
            if line.startswith(prefix):
                sample, value = line.rsplit(" ", 1)
                name, _, labels = sample.rstrip("}").partition("{")
                kept = [label for label in labels.split(",") if label.split("=")[0] not in _VLLMS_LABELS]
                found[name + "".join(f"{{{label}}}" for label in kept)] = float(value)
        return found

    def kill(self) -> None:
        """All of its processes at once, as the kernel does when memory is short."""
        left_behind = shared_files(self.pids)
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in self.pids))
        remove_unused(left_behind)

    def stop(self) -> None:
        if self.process.poll() is None:
            left_behind = shared_files(self.pids)  # by ranks of tensor parallelism on the CPU
            self.process.terminate()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.kill()
            remove_unused(left_behind)

    def _call(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {_TOKEN}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return bytes(answer.read())


def snapshot_of(runtime_dir: Path, ranks: int = 1) -> Snapshot:
    """What the processes of a server say of themselves."""

    async def ask() -> Snapshot:
        client = ControlClient(runtime_dir, expected_ranks=ranks, timeout_s=10)
        try:
            return await client.snapshot()
        finally:
            client.close()

    return asyncio.run(ask())


def eventually(holds: Callable[[], bool]) -> bool:
    for _ in range(100):
        if holds():
            return True
        time.sleep(0.1)
    return False
