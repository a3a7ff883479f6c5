# SPDX-License-Identifier: Apache-2.0
"""`kvcache bench`: the same as `python -m kvcache.bench`, whose options it passes on."""

from __future__ import annotations

import importlib.util

import typer

from kvcache.commands.output import fail

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def bench(context: typer.Context) -> None:
    """Measure transfers, hashing, allocation, serving; see: kvcache bench --help."""
    if importlib.util.find_spec("torch") is None:
        fail("torch is not installed here, and every bench needs it; run it in the engine's image")
    from kvcache.bench.__main__ import main

    raise typer.Exit(main(context.args))
