# SPDX-License-Identifier: Apache-2.0
"""An admin application before real control sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcache.admin.app import create_app
from kvcache.admin.service import Settings
from kvcache.control.server import ControlServer
from tests.control.processes import Process

TOKEN = "s3cret-Tok+en/="
AUTH = {"Authorization": f"Bearer {TOKEN}"}

Serve = Callable[[str, Process], ControlServer]
Admin = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture
def serve(socket_dir: Path) -> Iterator[Serve]:
    """Starts a process's control server."""
    started: list[tuple[ControlServer, Process]] = []

    def start(name: str, process: Process) -> ControlServer:
        server = ControlServer(socket_dir, name, process)
        started.append((server, process))
        return server

    yield start
    for server, process in started:
        process.go.set()
        server.close()


@pytest.fixture
def admin(socket_dir: Path, token_file: Path) -> Admin:
    """Opens a client of a running application; `vllm` answers in place of vLLM's server."""

    @asynccontextmanager
    async def running(
        vllm: Callable[[httpx.Request], httpx.Response] | None = None, **settings: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        defaults: dict[str, Any] = {
            "runtime_dir": str(socket_dir),
            "token_file": str(token_file),
            "vllm_url": "http://vllm:8000/",
            "timeout_s": 5.0,
            "gpu_patience_s": 0.0,
            "rounds_at_once": 1_000_000,
        }
        app = create_app(Settings(**{**defaults, **settings}), vllm and httpx.MockTransport(vllm))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://admin") as client,
        ):
            yield client

    return running
