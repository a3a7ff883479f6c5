# SPDX-License-Identifier: Apache-2.0
"""/healthz, /readyz and /metrics of the operator's process."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvcache_operator.telemetry import Telemetry

log = logging.getLogger(__name__)


@dataclass
class Health:
    """What the probes are answered from."""

    limit_s: float
    """How long the look at all resources may be overdue before the process counts as dead."""
    leading: bool = False
    resynced_at: float = field(default_factory=time.monotonic)
    """Of the last look at all resources that succeeded."""
    deaf: bool = False
    """Two looks in a row found changes that the watch had not told."""

    def problem(self) -> str:
        """Why the process should be started anew; empty where it should not."""
        if self.deaf:
            return "the watch does not tell of changes any more"
        silence = time.monotonic() - self.resynced_at
        if self.leading and silence > self.limit_s:
            return f"no look at all resources has succeeded for {silence:.0f} s"
        return ""


async def serve(host: str, port: int, health: Health, telemetry: Telemetry) -> web.AppRunner:
    """Starts the server; clean the runner up to end it.

    Raises:
        OSError: the address cannot be had.
    """

    async def healthz(_: web.Request) -> web.Response:
        problem = health.problem()
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    async def readyz(_: web.Request) -> web.Response:
        # One that waits for the lease is ready to take over.
        return web.Response(text="leading" if health.leading else "waiting for the lease")

    async def metrics(_: web.Request) -> web.Response:
        telemetry.leader.set(health.leading)
        body = generate_latest(telemetry.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    log.info("health and metrics at http://%s:%s", *runner.addresses[0][:2])
    return runner
