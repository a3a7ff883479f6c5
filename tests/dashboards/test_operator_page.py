# SPDX-License-Identifier: Apache-2.0
"""The operator's page before a real Prometheus that scrapes the operator's own server of metrics.

The test moves the counters as passes over resources do: an operator at work needs a cluster.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboards.generate import PAGES
from dashboards.grafana import Panel
from kvcache_operator.health import Health, serve
from kvcache_operator.telemetry import Telemetry
from tests.dashboards.pictures import draw
from tests.dashboards.prometheus import Prometheus, missing_program
from tests.dashboards.test_prometheus import PICTURES, RANGES, Scraped

WORK_S = float(os.environ.get("KVCACHE_LOAD_S") or 8)
OPERATOR = PAGES["operator"]

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(missing_program() is not None, reason=str(missing_program())),
]


class Operator:
    """The operator's server in a thread of its own, and passes that end as passes do."""

    def __init__(self) -> None:
        self.telemetry = Telemetry()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        health = Health(limit_s=60.0, leading=True)
        served = serve("127.0.0.1", 0, health, self.telemetry)
        self._runner = asyncio.run_coroutine_threadsafe(served, self._loop).result(30)
        host, port = self._runner.addresses[0][:2]
        self.address = f"{host}:{port}"

    def work(self, seconds: float) -> None:
        chosen = random.Random(3)
        self.telemetry.resources.set(3)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.telemetry.queue_adds.inc()
            self.telemetry.queue_depth.set(chosen.choice([0, 0, 1, 2]))
            self.telemetry.reconcile_seconds.observe(chosen.expovariate(8.0))
            self.telemetry.reconciles.labels(chosen.choice(["ok"] * 9 + ["api_error"])).inc()
            self.telemetry.count_request("get", "KVCache", 200)
            self.telemetry.count_request("patch", "Deployment", chosen.choice([200, 200, 409]))
            self.telemetry.missed.inc(chosen.random() < 0.02)
            time.sleep(0.05)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    operator = Operator()
    labels = {
        "__meta_kubernetes_namespace": "kvcache-system",
        "__meta_kubernetes_pod_name": "kvcache-operator-6b8f-q7wz4",
        "__meta_kubernetes_pod_label_app_kubernetes_io_name": "kvcache-operator",
        "__meta_kubernetes_pod_container_port_name": "metrics",
    }
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), {operator.address: labels})
    try:
        started = time.time()
        operator.work(WORK_S)
        time.sleep(1.5)  # the last counts are scraped
        yield Scraped(prometheus, started, time.time())
    finally:
        prometheus.close()
        operator.close()


@pytest.mark.parametrize("panel", OPERATOR.panels, ids=lambda panel: panel.title)
def test_every_panel_has_something_to_show(scraped: Scraped, panel: Panel) -> None:
    for query in panel.queries:
        assert scraped.prometheus.instant(query.expr, RANGES), query.expr


def test_the_operator_is_told_apart(scraped: Scraped) -> None:
    assert scraped.prometheus.label_values("namespace") == {"kvcache-system"}
    assert scraped.prometheus.label_values("pod") == {"kvcache-operator-6b8f-q7wz4"}


def test_the_picture_shows_the_data(scraped: Scraped) -> None:
    target = Path(PICTURES) / "operator.png"
    draw(OPERATOR, scraped.prometheus, RANGES, scraped.started, scraped.ended, target)
    assert target.read_bytes().startswith(b"\x89PNG")
