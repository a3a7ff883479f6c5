# SPDX-License-Identifier: Apache-2.0
"""Metrics of the operator's own process, and how it logs."""

from __future__ import annotations

import logging

import kopf
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from kvcache_operator.settings import Settings

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Telemetry:
    """All metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.reconciles = Counter(
            "kvcache_operator_reconciles",
            "Passes over a resource, by how they ended: ok, api_error or error.",
            ["result"],
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "kvcache_operator_reconcile_seconds",
            "Time of one pass over a resource.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.requests = Counter(
            "kvcache_operator_api_requests",
            "Requests to the API server, by verb, kind and HTTP status (none without an answer).",
            ["verb", "kind", "status"],
            registry=self.registry,
        )
        self.queue_depth = Gauge(
            "kvcache_operator_queue_depth", "Resources that wait for a worker.", registry=self.registry
        )
        self.queue_adds = Counter(
            "kvcache_operator_queue_adds",
            "Times that a resource was asked for, those included that were waiting already.",
            registry=self.registry,
        )
        self.resources = Gauge(
            "kvcache_operator_resources", "Resources at the last look at all.", registry=self.registry
        )
        self.missed = Counter(
            "kvcache_operator_missed_changes",
            "Changes that a look at all resources found and the watch had not told.",
            registry=self.registry,
        )
        self.watch_restarts = Counter(
            "kvcache_operator_watch_restarts",
            "Times that the watch gave up and was started anew.",
            registry=self.registry,
        )
        self.leader = Gauge(
            "kvcache_operator_leader", "1 while this process works, 0 while it waits.", registry=self.registry
        )

    def count_request(self, verb: str, kind: str, status: int | None) -> None:
        """Counts a request to the API server."""
        self.requests.labels(verb, kind, "none" if status is None else str(status)).inc()


def configure_logging(settings: Settings) -> None:
    """One format for kopf's lines and for ours."""
    log_format = kopf.LogFormat.JSON if settings.log_format == "json" else kopf.LogFormat.FULL
    kopf.configure(log_format=log_format, debug=settings.log_level == "DEBUG")
    logging.getLogger().setLevel(settings.log_level)
    for name in ("httpx", "urllib3", "aiohttp.access", "kopf.objects", "kopf.activities"):
        logging.getLogger(name).setLevel(logging.WARNING)
