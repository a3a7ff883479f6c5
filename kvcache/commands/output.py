# SPDX-License-Identifier: Apache-2.0
"""What commands print: tables for people, JSON for programs, one sentence for what went wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]

FAILED = 1
"""Exit status: asked for and not done."""


def console() -> Console:
    """The standard output, for tables. Made anew, since tests and pipes replace it."""
    return Console(highlight=False, soft_wrap=False)


def progress_console() -> Console:
    """The standard error, for progress: what is piped on holds results alone."""
    return Console(stderr=True, highlight=False)


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


def fail(text: str, status: int = FAILED) -> NoReturn:
    """Ends the command with a sentence on the standard error."""
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(status)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Numbers stand to the right, all else to the left; what is shown is never taken for markup."""
    result = Table(title=Text(title), title_justify="left", title_style="bold", show_edge=False)
    listed = [list(row) for row in rows]
    for index, name in enumerate(columns):
        right = bool(listed) and all(isinstance(row[index], Right) for row in listed)
        result.add_column(Text(name), justify="right" if right else "left")
    for row in listed:
        result.add_row(*(Text(str(cell)) for cell in row))
    return result


class Right(str):
    """A cell that stands to the right."""

    __slots__ = ()


def count(number: int) -> Right:
    return Right(f"{number:,}")


def share(number: float | None) -> Right:
    return Right("-" if number is None else f"{number:.1%}")


def size(number: float) -> Right:
    """Bytes, in the unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return Right(f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}")
        number /= 1024
    return Right(f"{number:,.1f} TiB")
