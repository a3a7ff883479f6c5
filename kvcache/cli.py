# SPDX-License-Identifier: Apache-2.0
"""The program `kvcache`."""

from __future__ import annotations

import typer

from kvcache.commands import register

app = typer.Typer(
    name="kvcache",
    help="Looks after a KV cache for vLLM: statistics, flushes, lookups, and checks of the machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
register(app)


def main() -> None:
    """The entry point."""
    app()
