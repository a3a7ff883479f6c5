# SPDX-License-Identifier: Apache-2.0
"""Messages between the admin sidecar and the processes of vLLM: the scheduler and one worker a rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvcache.stats import RankStats, SchedulerStats

SCHEDULER = "scheduler"
MAX_TIERS = 12
"""Host memory, a disk, a remote, and some of others."""
MAX_TOKENS = 1 << 19
"""Of a prefix: 2.5 MiB at most, which one message can hold."""
MAX_SALT_CHARS = 4096

_RANK = re.compile(r"rank(0|[1-9][0-9]{0,4})")

TierName = Annotated[str, msgspec.Meta(min_length=1, max_length=63)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
PinOwner = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Answered by `RankSnapshot` or `SchedulerSnapshot`."""


class RankSnapshot(msgspec.Struct, frozen=True, tag="rank"):
    stats: RankStats


class SchedulerSnapshot(msgspec.Struct, frozen=True, tag="scheduler"):
    stats: SchedulerStats


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of prompts, without adapters or images. Whole chunks of it count."""

    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_TOKENS)]
    salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARS)] = ""
    """`cache_salt` of the requests; without it those that have none."""


class FlushScope(msgspec.Struct, frozen=True, kw_only=True):
    """What to drop: chunks for which all that is given holds. Everything, if nothing is given."""

    own: bool = False
    """Of the process's own namespace alone: what its model may use."""
    namespace: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)] | None = None
    salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARS)] | None = None
    """Of the requests that stored them; empty for those without one."""
    prefix: Prefix | None = None
    """The chunks of a prompt and, as far as host memory knows them, all that continue them. What is left of
    those in slower tiers cannot be hit any more."""
    force: bool = False
    """Pinned chunks too."""


EVERYTHING = FlushScope()


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Drop what these tiers hold, all tiers if none is named. Answered by `Flushed`: a result for each tier
    that the process has."""

    tiers: Annotated[list[TierName], msgspec.Meta(max_length=MAX_TIERS)]
    scope: FlushScope = EVERYTHING


class Pin(msgspec.Struct, frozen=True, kw_only=True, tag="pin"):
    """Keep the chunks of a prefix, those to come included, until the owner lets go. Answered by `Pinned`."""

    owner: PinOwner
    prefix: Prefix
    check: bool = False
    """Only say whether it would be refused."""


class Pinned(msgspec.Struct, frozen=True, kw_only=True, tag="pinned"):
    chunks: int
    """Of the prefix, pinned from now on."""
    stored: int
    """How many of them, from the first on without a gap, are in host memory now."""


class Unpin(msgspec.Struct, frozen=True, kw_only=True, tag="unpin"):
    """Let go of all that an owner has pinned. Answered by `Unpinned`."""

    owner: PinOwner


class Unpinned(msgspec.Struct, frozen=True, tag="unpinned"):
    chunks: int
    """That the owner had pinned."""


class GetPins(msgspec.Struct, frozen=True, tag="get_pins"):
    """Answered by `Pins`."""


class PinnedChunks(msgspec.Struct, frozen=True, kw_only=True):
    owner: str
    chunks: int


class Pins(msgspec.Struct, frozen=True, tag="pins"):
    pins: list[PinnedChunks]


class Locate(msgspec.Struct, frozen=True, tag="locate"):
    """Which part of a prompt is stored, and where? Nothing is moved or kept. Answered by `Located`."""

    prefix: Prefix


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that follow each other and whose KV the same tier holds."""

    tier: TierName
    tokens: int


class Located(msgspec.Struct, frozen=True, tag="located"):
    parts: list[Part]
    """From the first token on up to the first chunk that no tier has; of each one the fastest tier."""


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """What the mounted configuration file says now. Answered by `Configured`."""

    file: dict[str, Any]


class Configured(msgspec.Struct, frozen=True, kw_only=True, tag="configured"):
    """What became of a configuration in one process."""

    applied: list[str] = []
    """Fields (dotted names) that have taken effect."""
    restart: list[str] = []
    """Fields that differ and wait for the next start of the process."""
    refused: str = ""
    """Why nothing of it was taken in; empty where it was."""


class FlushResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a flush did to one tier of one rank."""

    tier: TierName
    complete: bool
    """Nothing that was stored when the flush began is left."""
    removed_objects: int = 0
    removed_bytes: int = 0
    kept_objects: int = 0
    """Objects that are pinned, or under a lease, which stay until it ends."""
    reached: bool = True
    """Nothing of what is left can be hit any more, but what is pinned."""
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
