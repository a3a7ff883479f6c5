# SPDX-License-Identifier: Apache-2.0
"""`local up` of a whole appliance: a real vLLM with the cache in it and the real sidecar, as rendered."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from kvcache_operator.local.down import stop
from kvcache_operator.local.report import RunReport, report
from kvcache_operator.local.state import Phase, StateFolder
from tests.operator.resources import ROOT
from tests.operator.toy_run import eventually, free_ports

pytestmark = pytest.mark.vllm

CHUNK_TOKENS = 128


@dataclass
class Appliance:
    """A local run."""

    folder: StateFolder
    output: str
    """What `local up` has printed."""

    @property
    def run(self) -> RunReport:
        found = report(self.folder)
        assert found is not None
        return found

    def complete(self, token_ids: list[int]) -> list[int]:
        """Greedy continuation of a prompt by eight tokens."""
        request = {
            "model": "tiny",
            "prompt": token_ids,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = httpx.post(f"{self.run.completions_url}/completions", json=request, timeout=120)
        response.raise_for_status()
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens

    def admin(self, method: str, path: str, **body: Any) -> httpx.Response:
        token = Path(self.run.token_file).read_text()
        return httpx.request(
            method,
            f"{self.run.admin_url}{path}",
            json=body or None,
            headers={"Authorization": f"Bearer {token}"},
            timeout=60,
        )


@pytest.fixture(scope="module")
def appliance(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Appliance]:
    base = tmp_path_factory.mktemp("appliance")
    engine_port, admin_port = free_ports(2)
    file = base / "tiny.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kvcache.dev/v1alpha1",
                "kind": "KVCache",
                "metadata": {"name": "tiny"},
                "spec": {
                    "model": {
                        "name": f"/models/{tiny_model.name}",
                        "servedName": "tiny",
                        "volume": {"claimName": "weights"},
                    },
                    "engine": {
                        "device": "CPU",
                        "dtype": "float32",
                        "maxModelLength": 2048,
                        "cpuKvSpace": "1Gi",
                        "port": engine_port,
                        "args": ["--num-gpu-blocks-override", "64"],
                    },
                    "cache": {"chunkTokens": CHUNK_TOKENS, "tiers": {"cpu": {"capacity": "256Mi"}}},
                    "admin": {"port": admin_port},
                },
            }
        )
    )
    folder = StateFolder(base / "state")
    command = [sys.executable, "-m", "kvcache_operator", "local", "up", "-f", str(file)]
    command += ["--claim", f"weights={tiny_model.parent}", "--state", str(folder.path)]
    try:
        up = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
        assert up.returncode == 0, up.stdout + up.stderr
        yield Appliance(folder, up.stdout)
    finally:
        stop(folder)


def test_it_says_where_everything_is(appliance: Appliance) -> None:
    run = appliance.run
    assert run.phase is Phase.READY
    for text in (run.completions_url, run.admin_url, run.token_file, run.logs):
        assert text in appliance.output


def test_a_flush_is_followed_by_a_hit_of_this_cache(appliance: Appliance) -> None:
    prompt = [(7 * index) % 500 for index in range(4 * CHUNK_TOKENS + 30)]
    first = appliance.complete(prompt)
    # Chunks are stored beside the computation and may come after the answer.
    eventually(lambda: total(appliance, "stored_tokens") >= 4 * CHUNK_TOKENS)
    flush = appliance.admin("POST", "/v1/flush", tiers=["gpu"], wait=True)
    assert (flush.status_code, flush.json()["complete"]) == (200, True)
    before = total(appliance, "hit_cache_tokens")
    assert appliance.complete(prompt) == first
    eventually(lambda: total(appliance, "hit_cache_tokens") - before == 4 * CHUNK_TOKENS)


def total(appliance: Appliance, name: str) -> int:
    """A total of the admin's statistics."""
    response = appliance.admin("GET", "/v1/stats")
    response.raise_for_status()
    return int(response.json()["totals"][name])


def test_a_killed_sidecar_does_not_disturb_the_engine(appliance: Appliance) -> None:
    engine, sidecar = (appliance.run.containers[name].pid for name in ("vllm", "admin"))
    assert sidecar is not None
    os.kill(sidecar, signal.SIGKILL)
    assert len(appliance.complete([1, 2, 3])) == 8
    eventually(lambda: appliance.run.containers["admin"].restarts == 1)
    eventually(lambda: appliance.run.phase is Phase.READY)
    assert appliance.run.containers["vllm"].pid == engine
    assert appliance.admin("GET", "/v1/stats").status_code == 200


def test_a_killed_engine_leaves_nothing_after_down(appliance: Appliance) -> None:
    """The last test of this module: it ends the appliance."""
    state = appliance.folder.read()
    assert state is not None
    engine = appliance.run.containers["vllm"].pid
    assert engine is not None
    family = [psutil.Process(engine), *psutil.Process(engine).children(recursive=True)]
    # The API server, the scheduler's process and the worker.
    assert len(family) >= 3
    memory = {file.path for file in state.shared_memory if Path(file.path).exists()}
    assert memory
    os.kill(engine, signal.SIGKILL)
    command = [
        sys.executable,
        "-m",
        "kvcache_operator",
        "local",
        "down",
        "--state",
        str(appliance.folder.path),
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    _, left = psutil.wait_procs(family, timeout=10)
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
    assert not any(Path(path).exists() for path in memory)
    assert not Path(state.volumes).exists()
    assert report(appliance.folder) is None
