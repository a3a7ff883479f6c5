# SPDX-License-Identifier: Apache-2.0
"""`kvcache flush`: has the cache forget what it holds, and shows what came of it."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from kvcache.commands.client import DEFAULT_URL, AdminClient, TokenPath, Url
from kvcache.commands.output import (
    AsJson,
    Right,
    console,
    count,
    fail,
    print_json,
    progress_console,
    size,
    table,
)

_POLL_S = 0.2


def flush(
    tiers: Annotated[
        list[str], typer.Argument(help="Tiers to empty: gpu is vLLM's own cache; cpu, disk, remote.")
    ],
    reason: Annotated[str, typer.Option(help="For whoever reads the history.")] = "",
    salt: Annotated[
        str | None, typer.Option(help="Only what requests with this cache_salt have stored.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Only of this namespace, as GET /v1/config shows them.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Pinned chunks too.")] = False,
    wait: Annotated[bool, typer.Option(help="Wait until it is done; without, print its id.")] = True,
    url: Url = DEFAULT_URL,
    token_file: TokenPath = None,
    as_json: AsJson = False,
) -> None:
    """Forget what tiers hold. Fails if something of it is left."""
    admin = AdminClient(url, token_file)
    scope = {"salt": salt, "namespace": namespace, "force": force}
    report = admin.post("/v1/flush", {"tiers": tiers, "reason": reason, "scope": scope})
    with progress_console().status(f"flushing {', '.join(tiers)}"):
        while wait and report["state"] == "Running":
            time.sleep(_POLL_S)
            report = admin.get(f"/v1/flush/{report['id']}")
    if as_json:
        print_json(report)
    elif not wait:
        typer.echo(report["id"])
    else:
        console().print(
            table(
                f"Flush {report['id']}",
                ["process", "tier", "complete", "objects", "bytes", "kept", "reason"],
                [_row(result) for result in report["results"]],
            )
        )
    if wait and not report["complete"]:
        fail("the flush is not complete; its results say what is left and why")


def _row(result: dict[str, Any]) -> tuple[object, ...]:
    def shown(name: str, form: Any) -> Right:
        return Right("") if result.get(name) is None else form(result[name])

    return (
        result["process"],
        result["tier"],
        "yes" if result["complete"] else "no",
        shown("removed_objects", count),
        shown("removed_bytes", size),
        shown("kept_objects", count),
        result["reason"],
    )
