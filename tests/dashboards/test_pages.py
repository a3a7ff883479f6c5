# SPDX-License-Identifier: Apache-2.0
"""The dashboards: what is checked in, what every panel owes its reader, and that its queries can be asked."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from dashboards.generate import FOLDER, PAGES, outdated
from dashboards.grafana import Page, Panel, Query, Row
from tests.dashboards.queries import exported, json_panels, metrics_in, nodes, panel_queries, parsed

QUERIES = panel_queries()
UNITS = {"percentunit", "short", "s", "bytes", "Bps", "reqps"}


@pytest.fixture(params=list(PAGES.values()), ids=list(PAGES))
def page(request: pytest.FixtureRequest) -> Page:
    chosen: Page = request.param
    return chosen


def test_what_is_checked_in_is_what_is_generated() -> None:
    assert outdated() == []
    checked = subprocess.run(
        [sys.executable, FOLDER / "generate.py", "--check"], capture_output=True, text=True
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_what_is_out_of_date_is_named(tmp_path: Path) -> None:
    for path in FOLDER.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    assert outdated(tmp_path) == []
    (tmp_path / "tiers.json").write_text("{}")
    (tmp_path / "overview.json").unlink()
    (tmp_path / "left-over.json").write_text("{}")
    assert outdated(tmp_path) == ["left-over.json", "overview.json", "tiers.json"]


def test_pages_are_told_apart() -> None:
    pages = [json.loads((FOLDER / f"{name}.json").read_text()) for name in PAGES]
    for key in ("uid", "title", "description"):
        assert len({page[key] for page in pages}) == len(PAGES)
    assert all(page["description"].endswith(".") for page in pages)


def test_the_datasource_and_the_pods_are_chosen_by_variables(page: Page) -> None:
    data = page.to_json()
    names = [variable["name"] for variable in data["templating"]["list"]]
    assert names[0] == "datasource"
    assert len(set(names)) == len(names)
    if "overview" in page.uid or "tiers" in page.uid:
        assert names[1:4] == ["namespace", "resource", "pod"]
    sources = [variable["datasource"] for variable in data["templating"]["list"][1:]]
    for panel in json_panels(page):
        sources += [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert data["editable"] is False
    assert all(variable["refresh"] == 2 for variable in data["templating"]["list"][1:])


def test_variables_offer_labels_of_metrics_that_exist(page: Page) -> None:
    for variable in page.variables:
        assert metrics_in(variable.series) <= exported().keys()


def test_every_panel_says_what_it_is(page: Page) -> None:
    assert len({panel.title for panel in page.panels}) == len(page.panels)
    for panel in page.panels:
        assert panel.title
        assert len(panel.description) > 30
        assert panel.description.endswith(".")
        assert panel.unit in UNITS
        assert panel.queries
        assert all(query.legend for query in panel.queries)


def test_no_panel_covers_another(page: Page) -> None:
    cells: dict[tuple[int, int], str] = {}
    for panel in page.to_json()["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for cell in itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])):
            assert cells.setdefault(cell, panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in page.to_json()["panels"]}) == len(page.to_json()["panels"])


def test_panels_are_laid_out_in_lines_as_high_as_their_highest() -> None:
    def panel(title: str, width: int, height: int) -> Panel:
        return Panel(title, "", "short", (Query("up", "up"),), width=width, height=height)

    first = Row("first", (panel("a", 12, 4), panel("b", 12, 9), panel("c", 16, 5)))
    laid_out = Page("u", "t", "d", (), (first, Row("second", (panel("d", 24, 2),)))).to_json()["panels"]
    places: dict[str, Any] = {p["title"]: (p["gridPos"]["x"], p["gridPos"]["y"]) for p in laid_out}
    assert places == {
        "first": (0, 0),
        "a": (0, 1),
        "b": (12, 1),
        "c": (0, 10),
        "second": (0, 15),
        "d": (0, 16),
    }


@pytest.mark.parametrize(("name", "title", "expr"), QUERIES, ids=[f"{q[0]}: {q[1]}" for q in QUERIES])
def test_queries_are_right(name: str, title: str, expr: str) -> None:
    known = exported()
    assert metrics_in(expr) <= known.keys()
    for node in nodes(parsed(expr)):
        if isinstance(node, promql_parser.Call) and node.func.name in ("rate", "increase"):
            (matrix,) = node.args
            assert known[matrix.vector_selector.name] in ("counter", "histogram")
    ranges = [part.split("]")[0] for part in expr.split("[")[1:]]
    assert set(ranges) <= {"$__rate_interval", "$__range"}
    raw = [
        m for m in metrics_in(expr) if known[m] == "counter" and f"({m}{{" not in expr and f"{m}{{" in expr
    ]
    assert not raw, "a counter is shown as it is"
    for matchers in ("namespace", "resource", "pod") if name != "operator" else ("namespace",):
        assert expr.count(f'{matchers}=~"${matchers}"') >= len(metrics_in(expr))
