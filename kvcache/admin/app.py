# SPDX-License-Identifier: Apache-2.0
"""The routes of the admin sidecar.

`/healthz`, `/readyz` and `/metrics` are open; all others need the bearer token. No route runs code or shows
the environment.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, Request, Response

import kvcache
from kvcache.admin import problems
from kvcache.admin.gate import Gate
from kvcache.admin.models import ConfigReport, FlushReport, FlushRequest, StatsReport, TierDetail
from kvcache.admin.problems import Problem
from kvcache.admin.report import redacted, stats_report, tier_detail
from kvcache.admin.service import AdminService, Settings
from kvcache.bearer import TokenFile
from kvcache.config import ConfigError, load_config
from kvcache.control.wire import rank_name
from kvcache.observability.metrics import render

OPEN_PATHS = ("/healthz", "/readyz", "/metrics")


def create_app(settings: Settings, transport: httpx.AsyncBaseTransport | None = None) -> FastAPI:
    """The ASGI application. Its connections open and close with its lifespan.

    Args:
        settings: how the sidecar was started.
        transport: to vLLM, in place of the network.
    """
    token_file = TokenFile(settings.token_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = service = AdminService(settings, token_file, transport)
        service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="KV cache admin",
        version=kvcache.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    problems.install(app)
    app.add_middleware(Gate, token_file=token_file, open_paths=OPEN_PATHS)
    _add_open_routes(app)
    _add_stats_routes(app)
    _add_flush_routes(app)
    return app


def _service(request: Request) -> AdminService:
    service: AdminService = request.app.state.service
    return service


def _add_open_routes(app: FastAPI) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The sidecar lives."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz(request: Request) -> dict[str, str]:
        """The scheduler and every rank answer and are ready."""
        waiting = (await _service(request).snapshot()).not_ready()
        if waiting:
            detail = "; ".join(f"{name}: {reason}" for name, reason in waiting.items())
            raise Problem(503, "NotReady", detail, not_ready=waiting)
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """All metrics in the text format of Prometheus."""
        body, content_type = render(await _service(request).snapshot(), request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})


def _add_stats_routes(app: FastAPI) -> None:
    @app.get("/v1/stats")
    async def stats(request: Request) -> StatsReport:
        """Totals, the last five minutes, and every tier, rank and the scheduler."""
        service = _service(request)
        return stats_report(await service.snapshot(), service.window)

    @app.get("/v1/stats/tiers/{tier}")
    async def tier_stats(request: Request, tier: str) -> TierDetail:
        """One tier, in total and by rank."""
        snapshot = await _service(request).snapshot()
        known = snapshot.tier_names()
        if tier not in known:
            detail = (
                f"{tier!r} was read; the tiers of the ranks that answer are: {', '.join(known) or 'none'}."
            )
            raise Problem(404, "UnknownTier", detail, known_tiers=known, missing=dict(snapshot.missing))
        return tier_detail(snapshot, tier)

    @app.get("/v1/config")
    async def config(request: Request) -> ConfigReport:
        """The configuration that this container was given, without secrets."""
        try:
            shown = redacted(load_config())
        except ConfigError as error:
            raise Problem(503, "InvalidConfig", str(error)) from error
        ranks = (await _service(request).snapshot()).ranks
        namespaces = {rank_name(rank): stats.namespace for rank, stats in sorted(ranks.items())}
        return ConfigReport(version=kvcache.__version__, config=shown, namespaces=namespaces)


def _add_flush_routes(app: FastAPI) -> None:
    @app.post("/v1/flush", status_code=202)
    async def flush(request: Request, response: Response, body: FlushRequest) -> FlushReport:
        """Drops what the tiers hold: 202 while it runs, 200 with the result when asked to wait."""
        service = _service(request)
        report = await service.flush(body)
        response.headers["Location"] = f"/v1/flush/{report.id}"
        if body.wait:
            await service.flushes.wait()
            response.status_code = 200
        return report

    @app.get("/v1/flush/{flush_id}")
    async def flush_report(request: Request, flush_id: str) -> FlushReport:
        """One of the last 32 flushes."""
        return _service(request).flushes.get(flush_id)
