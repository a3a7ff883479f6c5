# SPDX-License-Identifier: Apache-2.0
"""The operator's process: health, lease, and the loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket

from kvcache_operator import API_VERSION, KIND
from kvcache_operator.cluster import Cluster, ClusterError
from kvcache_operator.handlers import Loop, until_signal
from kvcache_operator.health import Health, serve
from kvcache_operator.lease import Lease, LeaseLostError
from kvcache_operator.pods import Pods
from kvcache_operator.reconcile import Reconciler
from kvcache_operator.settings import Settings
from kvcache_operator.telemetry import Telemetry, configure_logging

log = logging.getLogger(__name__)

_DEFAULT_NAMESPACE = "default"


async def run(settings: Settings) -> int:
    """Runs the operator until a signal ends it. Returns the exit code.

    Raises:
        ClusterError: there is no cluster to connect to, or it does not know the resource.
    """
    configure_logging(settings)
    telemetry, health = Telemetry(), Health(limit_s=3 * settings.resync_s)
    cluster = await asyncio.to_thread(Cluster.connect, settings.api_timeout_s, telemetry.count_request)
    if not await asyncio.to_thread(cluster.has, API_VERSION, KIND):
        raise ClusterError(
            f"the cluster has no {KIND} of {API_VERSION}; apply manifests/crd, then start the operator", None
        )
    server = await serve(settings.health_host, settings.health_port, health, telemetry)
    pods = Pods(settings.stats_timeout_s, settings.flush_timeout_s)
    loop = Loop(cluster, Reconciler(cluster, settings, pods), settings, telemetry, health)
    work = asyncio.create_task(_lead(loop, cluster, settings, health))
    try:
        with until_signal(work):
            await work
    except asyncio.CancelledError:
        log.info("stopped")
        return 0
    except LeaseLostError as error:
        log.error("%s; this process ends so that one operator works", error)
        return 1
    finally:
        await pods.close()
        await server.cleanup()
    return 0


async def _lead(loop: Loop, cluster: Cluster, settings: Settings, health: Health) -> None:
    if not settings.leader_election:
        health.leading = True
        await loop.run()
        return
    lease = Lease(
        cluster,
        settings.namespace or _DEFAULT_NAMESPACE,
        f"{os.environ.get('HOSTNAME') or socket.gethostname()}-{secrets.token_hex(4)}",
        settings.lease_s,
    )
    await lease.acquire()
    health.leading = True
    try:
        async with asyncio.TaskGroup() as tasks:
            holding = tasks.create_task(lease.hold())
            await loop.run()
            holding.cancel()
    except ExceptionGroup as group:
        if (lost := group.subgroup(LeaseLostError)) is not None:
            raise LeaseLostError(str(lost.exceptions[0])) from group
        raise
    finally:
        health.leading = False
        with contextlib.suppress(asyncio.CancelledError):
            await lease.release()
