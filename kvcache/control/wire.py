# SPDX-License-Identifier: Apache-2.0
"""Messages between the admin sidecar and the processes of vLLM: the scheduler and one worker a rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec

from kvcache.stats import RankStats, SchedulerStats

SCHEDULER = "scheduler"
MAX_TIERS = 8

_RANK = re.compile(r"rank(0|[1-9][0-9]{0,4})")

TierName = Annotated[str, msgspec.Meta(min_length=1, max_length=63)]


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Answered by `RankSnapshot` or `SchedulerSnapshot`."""


class RankSnapshot(msgspec.Struct, frozen=True, tag="rank"):
    stats: RankStats


class SchedulerSnapshot(msgspec.Struct, frozen=True, tag="scheduler"):
    stats: SchedulerStats


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Drop what these tiers hold. Answered by `Flushed`: a result for each tier that the process has."""

    tiers: Annotated[list[TierName], msgspec.Meta(min_length=1, max_length=MAX_TIERS)]


class FlushResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a flush did to one tier of one rank."""

    tier: TierName
    complete: bool
    """Nothing that was stored when the flush began is left."""
    removed_objects: int = 0
    removed_bytes: int = 0
    kept_objects: int = 0
    """Objects under a lease, which stay until it ends."""
    reason: str = ""
    """Why it is not complete; empty when it is."""


class Flushed(msgspec.Struct, frozen=True, tag="flushed"):
    results: list[FlushResult]


def rank_name(rank: int) -> str:
    """The name of a rank's process."""
    return f"rank{rank}"


def rank_of(name: str) -> int | None:
    """The rank that the name of a process stands for; None for any other name."""
    match = _RANK.fullmatch(name)
    return int(match[1]) if match else None


def socket_path(runtime_dir: str | Path, name: str) -> Path:
    """The control socket of the process `scheduler` or `rank<r>`."""
    return Path(runtime_dir) / f"control.{name}.sock"


def served_names(runtime_dir: str | Path) -> list[str]:
    """Names of the processes whose control sockets lie in the folder, dead or alive."""
    names = [path.name.split(".")[1] for path in Path(runtime_dir).glob("control.*.sock")]
    return sorted(name for name in names if name == SCHEDULER or rank_of(name) is not None)
