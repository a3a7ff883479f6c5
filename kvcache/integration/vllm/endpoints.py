# SPDX-License-Identifier: Apache-2.0
"""One route on vLLM's own server, by which the admin sidecar has vLLM forget its prefix cache on the GPU.

vLLM's own route for this exists only in its development mode, together with routes that run code. This one is
an endpoint plugin (vLLM 0.26 and later), in the project's metadata:

    [project.entry-points."vllm.endpoint_plugins"]
    kvcache_admin = "kvcache.integration.vllm.endpoints:create_plugin"

It is loaded only where `VLLM_PLUGINS` names it (`VLLM_PLUGINS=kvcache,kvcache_admin`), and asks for the token
in the file that `KVCACHE_ADMIN_TOKEN_FILE` names.
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from http import HTTPStatus
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import State

from kvcache.bearer import TokenFile

logger = logging.getLogger(__name__)

RESET_GPU_PATH = "/kvcache/v1/reset-gpu"
TOKEN_FILE_ENV = "KVCACHE_ADMIN_TOKEN_FILE"  # noqa: S105 (a name)


class EngineClient(Protocol):
    """The part of vLLM's engine client that is used here."""

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool: ...


class GpuCacheEndpoint:
    """`POST /kvcache/v1/reset-gpu` → `{"success": bool}`.

    False means that running requests still hold blocks; nothing was dropped then. The cache behind the
    connector is left alone.

    Args:
        token_file: the tokens that are let in. Without a usable one the route answers 503.
    """

    name = "kvcache_admin"
    required_tasks = ("generate",)

    def __init__(self, token_file: TokenFile) -> None:
        self._token_file = token_file
        self._engine_client: EngineClient | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Called by vLLM while it builds its server."""
        app.add_api_route(RESET_GPU_PATH, self._reset, methods=["POST"], include_in_schema=False)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Called by vLLM when its engine is there."""
        self._engine_client = engine_client

    async def _reset(self, request: Request) -> JSONResponse:
        given = request.headers.getlist("authorization")
        refusal = self._token_file.refuse(given[0].encode("latin-1") if len(given) == 1 else None)
        if refusal is not None:
            return _problem(refusal.status, refusal.code, refusal.detail, refusal.headers)
        if self._engine_client is None:
            return _problem(503, "EngineUnavailable", "This server has no engine yet; try again later.")
        try:
            success = await self._engine_client.reset_prefix_cache()
        except Exception:
            logger.exception("vLLM failed to reset its prefix cache")
            return _problem(500, "ResetFailed", "vLLM failed to reset its prefix cache; see its log.")
        return JSONResponse({"success": bool(success)})


def create_plugin() -> GpuCacheEndpoint:
    """The plugin, with the token file that the environment names. Called by vLLM."""
    return GpuCacheEndpoint(TokenFile(os.environ.get(TOKEN_FILE_ENV) or None))


def _problem(status: int, code: str, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """RFC 9457 problem details."""
    content = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": code,
        "detail": detail,
    }
    return JSONResponse(content, status, headers, media_type="application/problem+json")
