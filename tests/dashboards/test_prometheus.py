# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus scrapes a real vLLM with its admin sidecar under load: every panel has something to show.

`KVCACHE_PICTURES=docs/dashboards` keeps the pictures there (`make pictures`); else they go below build/.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.generate import FOLDER, PAGES
from dashboards.grafana import Panel
from kvcache.observability.definitions import DEFINITIONS
from tests.dashboards.appliance import Appliance
from tests.dashboards.pictures import draw
from tests.dashboards.prometheus import Prometheus, missing_program
from tests.dashboards.queries import rules

PICTURES = Path(os.environ.get("KVCACHE_PICTURES") or FOLDER.parent / "build" / "dashboards")
LOAD_S = float(os.environ.get("KVCACHE_LOAD_S") or 20)
RANGES = {"$__rate_interval": "10s", "$__range": "5m", "$__interval": "1s"}
WHOLE_LOAD = {**RANGES, "$__rate_interval": "5m"}
"""A busy machine may have no hit, or no miss, in any ten seconds."""
_POD = {
    "__meta_kubernetes_namespace": "models",
    "__meta_kubernetes_pod_name": "tiny-7d4c9-x2x5k",
    "__meta_kubernetes_pod_label_app_kubernetes_io_name": "kvcache",
    "__meta_kubernetes_pod_label_app_kubernetes_io_instance": "tiny",
    "__meta_kubernetes_pod_container_port_name": "admin",
}

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(500),
    pytest.mark.skipif(missing_program() is not None, reason=str(missing_program())),
]


@dataclass
class Scraped:
    prometheus: Prometheus
    started: float
    ended: float
    appliance: Appliance | None = None


@pytest.fixture(scope="module")
def scraped(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("appliance")
    sockets = Path(tempfile.mkdtemp(prefix="kvc-", dir="/tmp"))
    disk = {"directories": [str(tmp_path_factory.mktemp("disk"))], "capacity": "256Mi"}
    config = {"tiers": {"cpu": {"capacity": "16Mi"}, "disk": disk}}
    appliance = Appliance(tiny_model, folder, sockets, config)
    prometheus = None
    try:
        # Another port of the same pod, which the relabelling is to leave out.
        other = {**_POD, "__meta_kubernetes_pod_container_port_name": "http"}
        targets = {appliance.admin_address: _POD, appliance.vllm_url.removeprefix("http://"): other}
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), targets)
        # What happens before the first scrape is no increase.
        prometheus.wait_for("kvcache_requests_total")
        started = time.time()
        appliance.load(LOAD_S / 2)
        assert appliance.flush("gpu", "cpu")["complete"]
        appliance.load(LOAD_S / 2)
        time.sleep(2)  # the last counts are scraped
        yield Scraped(prometheus, started, time.time(), appliance)
    finally:
        if prometheus is not None:
            prometheus.close()
        appliance.close()
        shutil.rmtree(sockets, ignore_errors=True)


def _panels(page: str) -> list[Panel]:
    return PAGES[page].panels


def test_the_pod_s_labels_are_those_that_pages_choose_by(scraped: Scraped) -> None:
    for label, value in (
        ("namespace", "models"),
        ("resource", "tiny"),
        ("pod", _POD["__meta_kubernetes_pod_name"]),
    ):
        assert scraped.prometheus.label_values(label) == {value}
    assert len(scraped.prometheus.instant("up", RANGES)) == 1


@pytest.mark.parametrize(
    ("page", "panel"),
    [(page, panel) for page in ("overview", "tiers") for panel in _panels(page)],
    ids=lambda value: value if isinstance(value, str) else value.title,
)
def test_every_panel_has_something_to_show(scraped: Scraped, page: str, panel: Panel) -> None:
    for query in panel.queries:
        answers = scraped.prometheus.instant(query.expr, WHOLE_LOAD)
        assert answers, query.expr
        assert all(answer["value"][1] != "NaN" for answer in answers), query.expr


def test_every_metric_was_scraped(scraped: Scraped) -> None:
    found = scraped.prometheus.label_values("__name__")
    missing = {name for definition in DEFINITIONS for name in definition.series} - found
    # Nothing failed.
    assert missing <= {"kvcache_failures_total"}


def test_every_recorded_series_is_there(scraped: Scraped) -> None:
    recorded = {str(rule["record"]) for rule in rules("record")}
    # Rules are evaluated at their own times: a busy machine may not have come to them yet.
    deadline = time.monotonic() + 90
    while not recorded <= (found := scraped.prometheus.label_values("__name__")):
        assert time.monotonic() < deadline, recorded - found
        time.sleep(1)


def test_no_alert_fires_at_a_cache_that_is_well(scraped: Scraped) -> None:
    assert scraped.prometheus.instant('ALERTS{alertstate="firing"}', RANGES) == []


@pytest.mark.parametrize("page", ["overview", "tiers"])
def test_pictures_show_the_data(scraped: Scraped, page: str) -> None:
    target = PICTURES / f"{page}.png"
    draw(PAGES[page], scraped.prometheus, RANGES, scraped.started, scraped.ended, target)
    assert target.read_bytes().startswith(b"\x89PNG")
    assert target.stat().st_size < 400_000


def test_a_changed_configuration_takes_effect_in_all_processes(scraped: Scraped) -> None:
    """The last test of this appliance: what was scraped is looked at before."""
    appliance = scraped.appliance
    assert appliance is not None
    config = yaml.safe_load(appliance.config_file.read_text())

    def after(changed: dict[str, Any], holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        appliance.config_file.write_text(yaml.safe_dump({**config, **changed}))
        for _ in range(1200):
            report: dict[str, Any] = appliance.admin.get("/v1/config").json()
            if holds(report):
                return report
            time.sleep(0.1)
        raise AssertionError(report)

    def digest_is_new(report: dict[str, Any]) -> bool:
        return report["digest"] != before["digest"] and all(
            process["in_effect"] or process["restart"] for process in report["processes"].values()
        )

    def capacity(tier: str) -> int:
        return int(appliance.admin.get(f"/v1/stats/tiers/{tier}").json()["total"]["capacity_bytes"])

    before = after({}, lambda report: len(report["processes"]) == 2)
    assert all(process["in_effect"] for process in before["processes"].values())
    tiers = {
        "cpu": {"capacity": "8Mi"},
        "disk": {**config["tiers"]["disk"], "capacity": "64Mi", "eviction": "LFU"},
    }
    report = after({"tiers": tiers, "min_retrieve_tokens": 300}, digest_is_new)
    assert {name: found["restart"] for name, found in report["processes"].items()} == {
        "rank0": [],
        "scheduler": [],
    }
    assert (capacity("cpu") <= 8 << 20, capacity("disk")) == (True, 64 << 20)
    appliance.load(3)
    before = report
    tiers = {**config["tiers"], "cpu": {"capacity": "64Mi"}}
    report = after({"chunk_size": 512, "tiers": tiers}, digest_is_new)
    assert report["processes"]["rank0"]["restart"] == ["chunk_size", "tiers.cpu.capacity"]
    assert report["processes"]["scheduler"]["restart"] == ["chunk_size"]
    report = after({"chunk_size": 500}, lambda report: bool(report["problem"]))
    assert "chunk_size: 500 is no power of two" in report["problem"]
    assert report["config"]["chunk_size"] == 512
    appliance.load(2)
