# SPDX-License-Identifier: Apache-2.0
"""`kvcache inspect`: lists the objects of a directory or a remote store, and verifies their checksums."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvcache.commands.output import AsJson, Right, console, count, fail, print_json, size, table

if TYPE_CHECKING:  # they need torch, which takes a while to come
    from kvcache.storage.inspection import InspectedObject, Inspection

DAMAGED = 2
"""Exit status: something would not be served."""
COLUMNS = (
    *("chunk", "namespace", "rank", "tokens", "bytes"),
    *("tenant", "form", "sealed by", "used", "state"),
)


def inspect(
    place: Annotated[str, typer.Argument(help="A directory of the disk tier, or the URL of a remote store.")],
    verify: Annotated[bool, typer.Option(help="Read payloads and compare their checksums.")] = True,
    key_file: Annotated[Path | None, typer.Option(help="Keys, to open sealed objects too.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Rows of the table; 0: all.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the objects that lie in a place and verify them; the exit status is 2 if one is damaged."""
    from kvcache.storage.inspection import inspect_place
    from kvcache.storage.sealing import Sealer

    try:
        sealer = Sealer(key_file) if key_file is not None else None
        found = inspect_place(place, verify=verify, sealer=sealer)
    except ValueError as error:
        fail(str(error))
    if as_json:
        print_json(msgspec.to_builtins(found) | {"damaged": len(found.bad)})
    else:
        _show(found, limit)
    if found.bad:
        raise typer.Exit(DAMAGED)


def _show(found: Inspection, limit: int) -> None:
    screen = console()
    # The damaged ones first: they are what somebody looks for.
    ordered = sorted(found.objects, key=lambda obj: (not obj.bad, -(obj.last_used or 0.0)))
    shown = ordered[:limit] if limit else ordered
    screen.print(table(found.place, COLUMNS, map(_row, shown)))
    if len(shown) < len(ordered):
        screen.print(f"... and {len(ordered) - len(shown):,} more; --limit 0 shows all")
    screen.print()
    screen.print(f"{len(ordered):,} objects, {size(found.stored_bytes)}, {len(found.bad):,} damaged")
    for label, names in (
        ("being written, or left by a writer that died", found.parts),
        ("none of ours, left alone", found.unknown),
        ("of another version, set aside", found.other_layouts),
    ):
        if names:
            few = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            screen.print(f"{label}: {len(names):,} ({few})", soft_wrap=True)


def _row(obj: InspectedObject) -> tuple[object, ...]:
    return (
        obj.chunk_hash[:12],
        obj.namespace[:8],
        count(obj.rank),
        count(obj.num_tokens),
        size(obj.stored_bytes),
        obj.tenant[:8] if obj.tenant.strip("0") else "-",
        obj.form or "-",
        obj.sealed_by or "-",
        _ago(obj.last_used),
        f"{obj.state}: {obj.detail}" if obj.detail else obj.state,
    )


def _ago(when: float | None) -> Right:
    if when is None:
        return Right("-")
    seconds = max(0.0, time.time() - when)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return Right(f"{seconds / length:.0f} {unit} ago")
    return Right(f"{seconds:.0f} s ago")
