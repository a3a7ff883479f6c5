# SPDX-License-Identifier: Apache-2.0
"""Panels and pages as data, and their JSON for Grafana 10 and later (schema version 39)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]
Kind = Literal["stat", "timeseries", "table"]

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_SCHEMA_VERSION = 39


@dataclass(frozen=True)
class Query:
    """One expression of PromQL and how its series are called.

    Attributes:
        legend: with labels in double braces, as Grafana has it.
    """

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: names what is shown.
        description: says what it means and what to make of it.
        unit: Grafana's name of the unit, such as `bytes`, `s`, `percentunit` or `short`.
        queries: what is shown.
        kind: a stat shows the last value of each series, a table its labels and value.
        width: of 24 columns.
        height: in Grafana's rows.
        stacked: series are parts of a whole.
        at_zero: the axis begins at zero.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 12
    height: int = 8
    stacked: bool = False
    at_zero: bool = True


@dataclass(frozen=True)
class Row:
    """Panels below one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A choice at the top of the page, of the values that a label has.

    Attributes:
        series: the expression whose labels are offered.
    """

    name: str
    label: str
    series: str


@dataclass(frozen=True)
class Page:
    """One dashboard."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
    tags: tuple[str, ...] = field(default=("kvcache",))

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]

    def to_json(self) -> Json:
        """The dashboard as Grafana imports it."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": list(self.tags),
            "schemaVersion": _SCHEMA_VERSION,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "timepicker": {},
            "annotations": {"list": []},
            "links": [_link_to_pages(self.tags)],
            "templating": {"list": [_datasource(), *map(_variable, self.variables)]},
            "panels": _laid_out(self.rows),
        }


def _link_to_pages(tags: Sequence[str]) -> Json:
    return {
        "type": "dashboards",
        "title": "KV cache",
        "tags": list(tags),
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
    }


def _datasource() -> Json:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(variable: Variable) -> Json:
    query = f"label_values({variable.series}, {variable.name})"
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": variable.name},
        # 2: when the time range changes, since pods come and go.
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _laid_out(rows: Sequence[Row]) -> list[Json]:
    """Panels from left to right, each row of them as high as its highest."""
    result: list[Json] = []
    y = 0
    for row in rows:
        result.append(
            {
                "id": len(result) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            }
        )
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y, height = 0, y + height, 0
            position = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            result.append(_panel(panel, len(result) + 1, position))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return result


def _panel(panel: Panel, number: int, position: dict[str, int]) -> Json:
    defaults: Json = {"unit": panel.unit, "color": {"mode": "palette-classic"}}
    if panel.at_zero:
        defaults["min"] = 0
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 20 if panel.stacked else 5,
            "lineWidth": 1,
            "showPoints": "never",
            "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
        }
    result: Json = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [
            _target(panel.kind, query, "ABCDEFGH"[index]) for index, query in enumerate(panel.queries)
        ],
    }
    if panel.kind == "table":
        result["transformations"] = [
            {"id": "labelsToFields", "options": {"mode": "columns"}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}}},
        ]
    return result


def _options(kind: Kind) -> Json:
    if kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    if kind == "table":
        return {"showHeader": True}
    legend = {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _target(kind: Kind, query: Query, letter: str) -> Json:
    instant = kind == "table"
    return {
        "refId": letter,
        "datasource": DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "range": not instant,
        "instant": instant,
        "format": "table" if instant else "time_series",
    }
