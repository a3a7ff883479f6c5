# SPDX-License-Identifier: Apache-2.0
"""`kvcache stats`: what the cache has done, and how its tiers and processes are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from kvcache.commands.client import DEFAULT_URL, AdminClient, TokenPath, Url
from kvcache.commands.output import AsJson, Right, console, count, print_json, share, size, table


def stats(url: Url = DEFAULT_URL, token_file: TokenPath = None, as_json: AsJson = False) -> None:
    """Hit rate, tiers and processes of one vLLM with its cache."""
    report = AdminClient(url, token_file).get("/v1/stats")
    if as_json:
        print_json(report)
        return
    screen = console()
    for part in tables(report):
        screen.print(part)
        screen.print()


def tables(report: dict[str, Any]) -> Iterator[Table]:
    """The answer of /v1/stats as tables."""
    totals, window = report["totals"], report["window"]
    yield table(
        "Prompt tokens",
        ["", "since the start", f"last {window['seconds']:.0f} s"],
        [
            ("hit rate", share(totals["hit_rate"]), share(window["hit_rate"])),
            ("all", count(totals["prompt_tokens"]), count(window["prompt_tokens"])),
            (
                "given back by this cache",
                count(totals["hit_cache_tokens"]),
                count(window["hit_cache_tokens"]),
            ),
            ("found in vLLM's own cache", count(totals["hit_gpu_tokens"]), count(window["hit_gpu_tokens"])),
            ("computed", count(totals["computed_tokens"]), Right("")),
        ],
    )
    yield table(
        "Tiers",
        ["tier", "state", "used", "capacity", "objects", "tokens given back", "evictions"],
        [
            (
                tier["name"],
                tier["state"] + (f": {tier['detail']}" if tier.get("detail") else ""),
                size(tier["used_bytes"]),
                size(tier["capacity_bytes"]) if tier["capacity_bytes"] else Right("-"),
                count(tier["objects"]),
                count(tier["hit_tokens"]),
                count(tier["evictions"]),
            )
            for tier in report["tiers"]
        ],
    )
    yield table("Processes", ["process", "state", "failures"], _processes(report))


def _processes(report: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    found = {f"rank{rank['rank']}": rank for rank in report["ranks"]}
    if report["scheduler"] is not None:
        found = {"scheduler": report["scheduler"], **found}
    for name, process in found.items():
        failures = ", ".join(f"{reason} {number:,}" for reason, number in sorted(process["failures"].items()))
        yield name, "ready" if process["ready"] else process["reason"], failures
    for name, reason in report["missing"].items():
        yield name, f"missing: {reason}", ""
