# SPDX-License-Identifier: Apache-2.0
"""The route on vLLM's own server that resets its prefix cache."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.datastructures import State

from kvcache.integration.vllm.endpoints import RESET_GPU_PATH, TOKEN_FILE_ENV, create_plugin
from tests.admin.conftest import AUTH
from tests.admin.test_access import WRONG, problem


class Engine:
    """vLLM's engine client, as far as the route uses it."""

    def __init__(self, answer: bool | Exception = True) -> None:
        self.answer = answer
        self.calls: list[tuple[bool, bool]] = []

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self.calls.append((reset_running_requests, reset_connector))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


Ask = Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]


@pytest.fixture(autouse=True)
def _token_in_environment(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_FILE_ENV, str(token_file))


def answered(engine: Engine | None, ask: Ask) -> httpx.Response:
    """The answer of a server that has loaded the plugin as vLLM does."""

    async def run() -> httpx.Response:
        app = FastAPI()
        plugin = create_plugin()
        plugin.attach_router(app)
        await plugin.init_state(engine, State(), Namespace())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://vllm") as client:
            return await ask(client)

    return asyncio.run(run())


@pytest.mark.parametrize("success", [True, False])
def test_the_engine_is_asked_for_the_gpu_cache_only(success: bool) -> None:
    engine = Engine(success)
    answer = answered(engine, lambda client: client.post(RESET_GPU_PATH, headers=AUTH))
    assert (answer.status_code, answer.json()) == (200, {"success": success})
    assert engine.calls == [(False, False)]


@pytest.mark.parametrize("headers", WRONG)
def test_without_the_token_the_engine_is_not_asked(headers: list[tuple[bytes, bytes]]) -> None:
    engine = Engine()
    answer = answered(engine, lambda client: client.post(RESET_GPU_PATH, headers=headers))
    problem(answer, 401, "Unauthorized")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert engine.calls == []


@pytest.mark.parametrize("content", [None, b"", b"\n"])
def test_without_a_usable_token_the_route_is_shut(token_file: Path, content: bytes | None) -> None:
    token_file.unlink()
    if content is not None:
        token_file.write_bytes(content)
    engine = Engine()
    for headers in (AUTH, {"Authorization": "Bearer "}):
        answer = answered(engine, lambda client: client.post(RESET_GPU_PATH, headers=headers))  # noqa: B023
        problem(answer, 503, "TokenUnavailable")
    assert engine.calls == []


def test_no_token_file_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_FILE_ENV)
    engine = Engine()
    problem(
        answered(engine, lambda client: client.post(RESET_GPU_PATH, headers=AUTH)), 503, "TokenUnavailable"
    )
    assert engine.calls == []


def test_a_server_without_an_engine_and_an_engine_that_fails() -> None:
    answer = answered(None, lambda client: client.post(RESET_GPU_PATH, headers=AUTH))
    problem(answer, 503, "EngineUnavailable")
    broken = Engine(RuntimeError("engine is dead"))
    answer = answered(broken, lambda client: client.post(RESET_GPU_PATH, headers=AUTH))
    problem(answer, 500, "ResetFailed")
    assert "engine is dead" not in answer.text


def test_it_is_not_in_vllms_document_and_takes_no_other_method() -> None:
    app = FastAPI()
    create_plugin().attach_router(app)
    assert RESET_GPU_PATH not in app.openapi()["paths"]
    answer = answered(Engine(), lambda client: client.get(RESET_GPU_PATH, headers=AUTH))
    assert answer.status_code == 405


@pytest.mark.vllm
def test_vllm_takes_it_for_an_endpoint_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own loader, from the project's entry points, and only where it is named."""
    plugins = pytest.importorskip("vllm.plugins")
    interface = pytest.importorskip("vllm.plugins.endpoint_plugins.interface")
    monkeypatch.setenv("VLLM_PLUGINS", "kvcache")
    assert plugins.load_endpoint_plugins(("generate",)) == []
    monkeypatch.setenv("VLLM_PLUGINS", "kvcache,kvcache_admin")
    assert plugins.load_endpoint_plugins(("embed",)) == []
    (plugin,) = plugins.load_endpoint_plugins(("generate",))
    assert isinstance(plugin, interface.EndpointPlugin)
    app = FastAPI()
    interface.attach_endpoint_plugins(app, ("generate",))
    engine = Engine()
    asyncio.run(interface.init_endpoint_plugins_state(engine, app.state, Namespace()))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://vllm") as client:
            return await client.post(RESET_GPU_PATH, headers=AUTH)

    assert asyncio.run(ask()).json() == {"success": True}
    assert engine.calls == [(False, False)]
