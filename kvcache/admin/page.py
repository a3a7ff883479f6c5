# SPDX-License-Identifier: Apache-2.0
"""The status page: one page of HTML without scripts and without anything from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

import kvcache
from kvcache.admin.flush import GPU_TIER
from kvcache.admin.models import FlushReport, StatsReport

_FOLDER = Path(__file__).parent
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:64rem;padding:1rem;color:#222}
body{background:#f6f7f9}
header{display:flex;justify-content:space-between;align-items:center}
h1{font-size:1.4rem}h2{font-size:.95rem;margin:0 0 .4rem}
.box{background:#fff;border:1px solid #dde;border-radius:6px;padding:.8rem 1rem;margin:.6rem 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(14rem,1fr));gap:.6rem}
.big{font-size:2rem;margin:0}.quiet{color:#667;font-size:.85rem;margin:.2rem 0}
.message,.warning{border-left:4px solid #c60}.message{background:#fff;padding:.6rem 1rem}
table{border-collapse:collapse;width:100%;margin-top:.5rem}
th,td{text-align:left;padding:.25rem .5rem;border-bottom:1px solid #eee;vertical-align:top}
.n{text-align:right;white-space:nowrap}fieldset{border:0;padding:0;margin:0 0 .5rem}
input:not([type=checkbox]){padding:.3rem;width:20rem;max-width:100%}button{padding:.3rem .9rem}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#dde}.box,.message{background:#1f2228;border-color:#333}
th,td{border-color:#333}.quiet{color:#99a}}
""".strip()
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; form-action 'self'; base-uri 'none';"
        " frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    # Not "no-referrer": with it browsers send the origin of our own forms as "null".
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class Status:
    """What the page shows to whoever may see it."""

    report: StatsReport
    waiting: Mapping[str, str] = field(default_factory=dict)
    """Processes that are not ready, and why."""
    flushes: Sequence[FlushReport] = ()
    config_problem: str = ""


def login(message: str = "") -> str:
    """The page of somebody who has not given the token yet."""
    return _template().render(style=_STYLE, message=message, report=None)


def status(shown: Status, message: str = "") -> str:
    """The page with the figures, the recent flushes, and the form for another one."""
    return _template().render(
        style=_STYLE,
        message=message,
        report=shown.report,
        waiting=shown.waiting,
        flushes=shown.flushes,
        config_problem=shown.config_problem,
        flushable=[GPU_TIER, *(tier.name for tier in shown.report.tiers)],
        version=kvcache.__version__,
    )


def _template() -> jinja2.Template:
    return _ENVIRONMENT.get_template("page.html")


def _percent(share: float | None) -> str:
    return "none yet" if share is None else f"{share:.1%}"


def _number(count: int) -> str:
    return f"{count:,}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined
)
_ENVIRONMENT.filters.update(percent=_percent, number=_number, bytes=_bytes)
