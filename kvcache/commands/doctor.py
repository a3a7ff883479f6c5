# SPDX-License-Identifier: Apache-2.0
"""`kvcache doctor`: looks at what the cache needs of this machine or container, and says what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvcache.commands.checkup import Finding, State, checkup
from kvcache.commands.facts import read_facts
from kvcache.commands.output import AsJson, console, fail, print_json, table

_COLOURS: dict[State, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "wrong": "red"}


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(envvar="LMCACHE_CONFIG_FILE", help="Configuration file whose tiers are to be checked."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check GPU, pinning limits, shared memory, vLLM's version and the tiers. Fails if something is wrong."""
    findings = checkup(read_facts(config))
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        _show(findings)
    wrong = [finding.check for finding in findings if finding.state == "wrong"]
    if wrong:
        fail(f"not in order: {', '.join(wrong)}")


def _show(findings: Sequence[Finding]) -> None:
    shown = table("", ["check", "", "found", "what to do"], [])
    for finding in findings:
        shown.add_row(
            Text(finding.check),
            Text(finding.state, _COLOURS[finding.state]),
            Text(finding.found),
            Text(finding.remedy),
        )
    console().print(shown)
