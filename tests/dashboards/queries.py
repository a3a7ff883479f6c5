# SPDX-License-Identifier: Apache-2.0
"""Expressions of PromQL as a dashboard or a rule has them, read by a parser of PromQL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from dashboards.generate import FOLDER, PAGES
from dashboards.grafana import Page
from kvcache.observability.definitions import DEFINITIONS
from kvcache_operator.telemetry import Telemetry

RULES = sorted((FOLDER / "rules").glob("*.yaml"))

_RANGES = {"$__rate_interval": "1m", "$__range": "1h", "$__interval": "15s"}
_VARIABLE = re.compile(r"\$\{?[a-z_]+\}?")


def substituted(expr: str, ranges: dict[str, str] = _RANGES) -> str:
    """The expression as Grafana sends it when everything is chosen."""
    for name, value in ranges.items():
        expr = expr.replace(name, value)
    return _VARIABLE.sub(".*", expr)


def parsed(expr: str) -> Any:
    """Raises ValueError for what is no PromQL."""
    return promql_parser.parse(substituted(expr))


def nodes(tree: Any) -> Iterator[Any]:
    """The tree's nodes, parents first."""
    yield tree
    for name in ("lhs", "rhs", "expr", "param", "args", "vector_selector"):
        below = getattr(tree, name, None)
        for node in below if isinstance(below, list) else [below]:
            if node is not None:
                yield from nodes(node)


def metrics_in(expr: str) -> set[str]:
    """Names of the series that it reads."""
    found = (node for node in nodes(parsed(expr)) if isinstance(node, promql_parser.VectorSelector))
    return {str(node.name) for node in found}


def rules(kind: str) -> list[dict[str, Any]]:
    """All rules of the kind `alert` or `record`."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def exported() -> dict[str, str]:
    """Every series that is exported or recorded, to its kind."""
    series: dict[str, str] = {}
    for definition in DEFINITIONS:
        series |= dict.fromkeys(definition.series, definition.kind)
    for family in Telemetry().registry.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
        for suffix in suffixes.get(family.type, ("",)):
            series[family.name + suffix] = family.type
    return series | {str(rule["record"]): "gauge" for rule in rules("record")}


def panel_queries() -> list[tuple[str, str, str]]:
    """Name of the page, title of the panel, expression."""
    return [
        (name, panel.title, query.expr)
        for name, page in PAGES.items()
        for panel in page.panels
        for query in panel.queries
    ]


def json_panels(page: Page) -> list[dict[str, Any]]:
    """What Grafana is given, without the headings."""
    return [panel for panel in page.to_json()["panels"] if panel["type"] != "row"]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())
