# SPDX-License-Identifier: Apache-2.0
"""Messages between the scheduler's lookup client and the ranks' lookup servers.

A *session* is one life of a scheduler. The leases of a lookup belong to the owner `<session>/<lookup id>`, so
that all leases of a scheduler that is gone can be ended together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

DIGEST_BYTES = 16
MAX_CHUNKS = 1 << 17
"""Of one lookup: 2 MiB of digests."""

MAX_ID_CHARS = 4096
NO_TENANT = bytes(DIGEST_BYTES)

Session = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
LookupId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_CHARS)]
"""A request id of vLLM; clients of vLLM may choose a part of it."""


Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_CHUNKS)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Opens a session, which ends the one before, or asks whether the rank answers. Answered by `Done`."""

    session: Session


class LookupRequest(msgspec.Struct, frozen=True, tag="lookup"):
    """Which of these chunks are stored? Those that are get a lease, at once where they are in host memory,
    else when they have been fetched there. Answered by `LookupReply`."""

    session: Session
    lookup_id: LookupId
    hashes: Annotated[bytes, msgspec.Meta(max_length=MAX_CHUNKS * DIGEST_BYTES)]
    """16 bytes a chunk, in the order of the prompt."""
    num_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """That the chunks stand for: all but the last one are full. 0: that one too."""
    tenant: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)] = NO_TENANT
    """Whose request it is."""
    seconds_per_token: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """What computing a token takes, which says what is worth fetching; 0 if not known."""
    skip: Count = 0
    """Leading chunks that need not be there, since vLLM has them."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far are these lookups? Answered by `ProgressReply`."""

    session: Session
    lookup_ids: list[LookupId]


class LookupReply(msgspec.Struct, frozen=True, tag="found"):
    chunks: Count
    """Chunks from the start on without a gap that are skipped, or in host memory and leased."""
    most: Count
    """How many that may become; as many as `chunks` once nothing more comes."""
    stored: Count
    """Chunks from the start on without a gap that are in host memory, skipped ones too."""
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """From the lookup's start: the longest that the slowest tier which is asked may take."""
    sources: list[tuple[str, Count]] = []
    """Where the chunks come from, in order: tiers and numbers of chunks. Empty: all from host memory."""


class ProgressReply(msgspec.Struct, frozen=True, tag="progressed"):
    lookups: list[LookupReply]
    """In the order of the question; one that is not known has nothing."""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Ends the leases of these lookups. Answered by `Done`."""

    session: Session
    lookup_ids: list[LookupId]


def lease_owner(session: str, lookup_id: str) -> str:
    """The name under which a rank holds the leases of a lookup."""
    return f"{session}/{lookup_id}"


def socket_path(runtime_dir: str | Path, rank: int) -> Path:
    """The socket of a rank's lookup server."""
    return Path(runtime_dir) / f"lookup.rank{rank}.sock"
