# SPDX-License-Identifier: Apache-2.0
"""The program `kvcache`, a real admin sidecar before doubles of vLLM's processes, and one of its server."""

from __future__ import annotations

import http.server
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvcache.cli import app
from kvcache.control.server import ControlServer
from tests.admin.sidecar import sidecar
from tests.control.processes import Process, rank_stats, scheduler_stats, tier_stats

TOKEN = "a token of tests"

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the program on a wide screen, with nothing of this machine's environment."""
    for name in (
        "KVCACHE_ADMIN_URL",
        "KVCACHE_ADMIN_TOKEN",
        "KVCACHE_ADMIN_TOKEN_FILE",
        "LMCACHE_CONFIG_FILE",
    ):
        monkeypatch.delenv(name, raising=False)

    def running(*arguments: object, **environ: str) -> Result:
        return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", **environ})

    return running


@pytest.fixture(scope="module")
def shared_rank() -> Process:
    tiers = [
        tier_stats(capacity_bytes=4 << 30, used_bytes=1 << 30, objects=4096, hit_tokens=700, evictions=5),
        tier_stats("disk", state="Unwritable", detail="no space left"),
    ]
    return Process(rank_stats(0, tiers=tiers, failures={"StoreNoRoom": 3}))


@pytest.fixture
def rank(shared_rank: Process) -> Iterator[Process]:
    """The rank behind the sidecar, which nobody has asked to flush anything yet."""
    shared_rank.flushed.clear()
    yield shared_rank
    shared_rank.go.set()


@pytest.fixture(scope="module")
def admin(shared_rank: Process, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment that names a running sidecar."""
    socket_dir = Path(tempfile.mkdtemp(prefix="kvc-", dir="/tmp"))
    scheduler = scheduler_stats(
        prompt_tokens=1000, hit_gpu_tokens=200, hit_cache_tokens={"cpu": 600}, computed_tokens=200
    )
    servers = [
        ControlServer(socket_dir, "rank0", shared_rank),
        ControlServer(socket_dir, "scheduler", Process(scheduler)),
    ]
    token_file = tmp_path_factory.mktemp("admin") / "token"
    token_file.write_text(TOKEN)
    try:
        with sidecar(socket_dir, token_file) as url:
            yield {"KVCACHE_ADMIN_URL": url, "KVCACHE_ADMIN_TOKEN_FILE": str(token_file)}
    finally:
        for server in servers:
            server.close()
        shutil.rmtree(socket_dir, ignore_errors=True)


class Vllm(http.server.ThreadingHTTPServer):
    """A double of vLLM's server that counts words as tokens."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Vllm

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        words = body["prompt"].split() if isinstance(body["prompt"], str) else body["prompt"]
        if "bad" in words:
            self._answer(400, {"error": "the prompt is too long"})
        elif self.path == "/tokenize":
            self._answer(200, {"tokens": [len(word) for word in words]})
        else:
            self.server.asked.append(body)
            self._answer(200, {"usage": {"prompt_tokens": len(words)}})

    def _answer(self, status: int, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def vllm() -> Iterator[Vllm]:
    server = Vllm()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
