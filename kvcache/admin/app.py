# SPDX-License-Identifier: Apache-2.0
"""The routes of the admin sidecar.

`/healthz`, `/readyz` and `/metrics` are open and answer from the last round of questions, so that nobody
without the token makes a process of vLLM do anything; all others need the bearer token (the status page takes
it by a form too). No route runs code or shows the environment.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

import kvcache
from kvcache.admin import cache_routes, openapi, page_routes, problems
from kvcache.admin.gate import Gate
from kvcache.admin.models import (
    ConfigReport,
    FlushHistory,
    FlushReport,
    FlushRequest,
    ProcessConfigReport,
    StatsReport,
    TierDetail,
)
from kvcache.admin.problems import Problem, documented
from kvcache.admin.report import redacted, stats_report, tier_detail
from kvcache.admin.service import AdminService, Settings
from kvcache.admin.sessions import Sessions
from kvcache.bearer import TokenFile
from kvcache.config import load_config
from kvcache.control.wire import rank_name
from kvcache.observability.metrics import render

OPEN_PATHS = ("/healthz", "/readyz", "/metrics")


_FLUSH_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": FlushReport, "description": "It was to be waited for and is done."},
    **documented(408, 409, 415, 422),
}


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
        openapi_url="/v1/openapi.json",
        responses=documented(401, 413, 503),
    )
    app.state.requests = requests = Counter[tuple[str, int]]()
    problems.install(app)
    openapi.install(app, OPEN_PATHS)
    app.add_middleware(
        Gate,
        token_file=token_file,
        open_paths=(*OPEN_PATHS, *page_routes.PATHS),
        answered=lambda route, status: requests.update([(route, status)]),
    )
    _add_open_routes(app)
    _add_stats_routes(app)
    _add_flush_routes(app)
    cache_routes.add(app)
    page_routes.add(app, Sessions(token_file))
    return app


def _service(request: Request) -> AdminService:
    service: AdminService = request.app.state.service
    return service


def _add_open_routes(app: FastAPI) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The sidecar lives."""
        return {"status": "ok"}

    @app.get("/readyz", responses=documented(503))
    async def readyz(request: Request) -> dict[str, str]:
        """The scheduler and every rank answer and are ready."""
        waiting = _service(request).rounds.latest.not_ready()
        if waiting:
            detail = "; ".join(f"{name}: {reason}" for name, reason in waiting.items())
            raise Problem(503, "NotReady", detail, not_ready=waiting)
        return {"status": "ready"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """All metrics in the text format of Prometheus."""
        service, accept = _service(request), request.headers.get("accept", "")
        counted = service.sidecar_stats(request.app.state.requests)
        body, content_type = render(service.rounds.latest, accept, counted)
        return Response(body, headers={"Content-Type": content_type})


def _add_stats_routes(app: FastAPI) -> None:
    @app.get("/v1/stats")
    async def stats(request: Request) -> StatsReport:
        """Totals, the last five minutes, and every tier, rank and the scheduler."""
        service = _service(request)
        return stats_report(await service.rounds.snapshot(), service.window)

    @app.get("/v1/stats/tiers/{tier}", responses=documented(404))
    async def tier_stats(request: Request, tier: str) -> TierDetail:
        """One tier, in total and by rank."""
        snapshot = await _service(request).rounds.snapshot()
        known = snapshot.tier_names()
        if tier not in known:
            detail = (
                f"{tier!r} was read; the tiers of the ranks that answer are: {', '.join(known) or 'none'}."
            )
            raise Problem(404, "UnknownTier", detail, known_tiers=known, missing=dict(snapshot.missing))
        return tier_detail(snapshot, tier)

    @app.get("/v1/config")
    async def config(request: Request) -> ConfigReport:
        """The mounted configuration without secrets, and how far each process is with it."""
        service = _service(request)
        service.mounted.look()
        ranks = (await service.rounds.snapshot()).ranks
        return ConfigReport(
            version=kvcache.__version__,
            config=redacted(load_config(environ={}, file=service.mounted.good or {})),
            digest=service.mounted.digest,
            problem=service.mounted.problem,
            processes={
                name: ProcessConfigReport(**dataclasses.asdict(found))
                for name, found in sorted(service.mounted.processes.items())
            },
            namespaces={rank_name(rank): stats.namespace for rank, stats in sorted(ranks.items())},
        )


def _add_flush_routes(app: FastAPI) -> None:
    @app.get("/v1/flush")
    async def flush_history(request: Request) -> FlushHistory:
        """The last 32 flushes, the latest first."""
        return FlushHistory(flushes=_service(request).flushes.history)

    @app.post("/v1/flush", status_code=202, responses=_FLUSH_RESPONSES)
    async def flush(request: Request, response: Response, body: FlushRequest) -> FlushReport:
        """Drops what the tiers hold: 202 while it runs, 200 with the result when asked to wait."""
        service = _service(request)
        report = await service.flush(body)
        response.headers["Location"] = f"/v1/flush/{report.id}"
        if body.wait:
            await service.flushes.wait()
            response.status_code = 200
        return report

    @app.get("/v1/flush/{flush_id}", responses=documented(404))
    async def flush_report(request: Request, flush_id: str) -> FlushReport:
        """One of the last 32 flushes."""
        return _service(request).flushes.get(flush_id)
