# SPDX-License-Identifier: Apache-2.0
"""Pictures of pages: what Grafana would show of them, drawn by matplotlib from what a Prometheus answers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dashboards.grafana import Page, Panel
from tests.dashboards.prometheus import Prometheus

_COLUMNS = 3
_UNITS = {
    "percentunit": "share",
    "s": "s",
    "bytes": "bytes",
    "Bps": "bytes/s",
    "reqps": "requests/s",
    "short": "",
}
_INCH = {"width": 5.0, "height": 2.6}


def draw(
    page: Page, prometheus: Prometheus, ranges: dict[str, str], start: float, end: float, target: Path
) -> None:
    """Writes one picture with a field for each panel."""
    mpl.rcParams.update({"svg.fonttype": "path", "font.size": 7})
    rows = math.ceil(len(page.panels) / _COLUMNS)
    figure = Figure(figsize=(_COLUMNS * _INCH["width"], rows * _INCH["height"]), layout="constrained")
    fields = figure.subplots(rows, _COLUMNS, squeeze=False).flatten()
    for panel, axes in zip(page.panels, fields, strict=False):
        axes.set_title(panel.title, fontsize=9, loc="left", fontweight="bold")
        if panel.kind == "timeseries":
            _draw_lines(panel, axes, prometheus, ranges, start, end)
        else:
            _draw_values(panel, axes, prometheus, ranges)
    for axes in fields[len(page.panels) :]:
        axes.axis("off")
    figure.suptitle(page.title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=80)


def _draw_lines(
    panel: Panel, axes: Axes, prometheus: Prometheus, ranges: dict[str, str], start: float, end: float
) -> None:
    lines: list[tuple[str, list[float], list[float]]] = []
    for query in panel.queries:
        for series in prometheus.over_time(query.expr, ranges, start, end):
            at, values = zip(*series["values"], strict=True)
            name = _named(query.legend, series["metric"])
            lines.append((name, [float(t) - start for t in at], [float(value) for value in values]))
    # Few series are a picture of many; the fullest ones tell most.
    lines.sort(key=lambda line: -max((value for value in line[2] if math.isfinite(value)), default=0.0))
    for name, at_s, numbers in lines[:8]:
        axes.plot(at_s, numbers, linewidth=1.2, label=name)
    axes.set_ylabel(_UNITS[panel.unit])
    axes.set_xlim(0, end - start)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5))
    if panel.at_zero:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize=6, frameon=False, loc="upper left")


def _draw_values(panel: Panel, axes: Axes, prometheus: Prometheus, ranges: dict[str, str]) -> None:
    axes.axis("off")
    values = [
        (_named(query.legend, series["metric"]), float(series["value"][1]))
        for query in panel.queries
        for series in prometheus.instant(query.expr, ranges)
    ]
    if panel.kind == "stat":
        text = "\n".join(_written(number, panel.unit) for _, number in values)
        axes.text(0.5, 0.5, text, fontsize=26, ha="center", va="center", color="tab:green")
    else:
        axes.text(0.0, 0.95, "\n".join(name for name, _ in values), fontsize=8, va="top", family="monospace")


def _written(number: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{number:.0%}"
    return f"{number:,.0f}" if number >= 100 else f"{number:.2f}{' s' if unit == 's' else ''}"


def _named(legend: str, labels: dict[str, Any]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: str(labels.get(found[1], "")), legend).strip()
