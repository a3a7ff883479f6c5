# SPDX-License-Identifier: Apache-2.0
"""The commands of `kvcache`, one module each. `register` adds them to the program."""

from __future__ import annotations

import typer

from kvcache.commands import bench, doctor, flush, inspect, lookup, stats, warm


def register(app: typer.Typer) -> None:
    """Adds all commands of this package."""
    app.command("stats")(stats.stats)
    app.command("flush")(flush.flush)
    app.command("lookup")(lookup.lookup)
    app.command("warm")(warm.warm)
    app.command("inspect")(inspect.inspect)
    app.command("doctor")(doctor.doctor)
    app.command("bench", context_settings=bench.PASS_ON, add_help_option=False)(bench.bench)
