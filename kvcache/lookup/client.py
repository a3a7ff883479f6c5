# SPDX-License-Identifier: Apache-2.0
"""The scheduler's end of the lookup: asks every rank, and answers with what all of them hold.

It stands on the scheduler's critical path, so it never waits longer than one deadline a lookup, and not at
all for a rank that missed one until that rank answers again.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple

import msgspec
import zmq

from kvcache.ipc import Client, Done, IpcError, NoAnswerError, ReplyT, UnreachableError
from kvcache.lookup.local import LocalClient
from kvcache.lookup.ranks import Backoff, Rank
from kvcache.lookup.server import served_here
from kvcache.lookup.wire import (
    DIGEST_BYTES,
    MAX_CHUNKS,
    MAX_ID_CHARS,
    NO_TENANT,
    Hello,
    LookupReply,
    LookupRequest,
    Progress,
    ProgressReply,
    lease_owner,
    socket_path,
)

__all__ = ["NEVER_ASKED", "Backoff", "LookupClient", "LookupCounters", "LookupResult", "combined"]

logger = logging.getLogger(__name__)

NEVER_ASKED = -1
PROGRESS_INTERVAL_S = 1e-3
"""Between two questions how far waiting lookups are: what vLLM sleeps in a step with nothing to compute."""
_PROGRESS_BATCH = 256
"""Lookups in one question."""


class LookupResult(NamedTuple):
    chunks: int
    """Chunks from the start on that every rank holds and has leased."""
    timed_out: bool
    """A rank did not answer: 0 chunks then says nothing about what is stored."""
    stored: int = 0
    """Chunks from the start on that every rank holds, skipped ones too."""
    coming: int = 0
    """Chunks behind these that may come from slower tiers: `progress` says when they have."""
    wait_s: float = 0.0
    """From the lookup's start: the longest to wait for them."""
    sources: tuple[tuple[str, int], ...] = ()
    """Where the chunks come from, in order: tiers and numbers of chunks. Empty: all from host memory."""


@dataclass
class LookupCounters:
    """What the client did since it was made."""

    lookups: int = 0
    seconds: float = 0.0
    timeouts: int = 0
    """Lookups in which a rank did not answer or was not there."""
    skipped: int = 0
    """Lookups answered at once since a rank had not answered before."""
    failures: int = 0
    """Lookups that a rank answered with a failure."""


@dataclass
class _Answers(Generic[ReplyT]):
    """What all ranks answered to one question."""

    replies: list[ReplyT]
    """One a rank, unless `missed` or `failed`."""
    asked: list[Rank]
    missed: bool = False
    failed: bool = False


class LookupClient:
    """Asks all ranks of one engine. For the scheduler's thread only; no method raises for what the ranks do.

    Args:
        runtime_dir: folder of the sockets.
        world_size: number of ranks; rank r listens on `lookup.rank<r>.sock`.
        timeout_s: the longest that one lookup takes, for all ranks together.
        session: names this life of the scheduler; random if left out.
        call_own: ranks that this process serves itself are called instead of asked over their sockets.

    Raises:
        IpcError: the sockets' path is too long.
    """

    def __init__(
        self,
        runtime_dir: str | Path,
        world_size: int,
        timeout_s: float = 0.5,
        session: str | None = None,
        *,
        call_own: bool = False,
    ) -> None:
        self.session = session or secrets.token_hex(8)
        self.counters = LookupCounters()
        self.timeout_s = timeout_s
        self._answers: dict[str, int] = {}
        self._waiting: dict[str, LookupResult] = {}
        self._next_progress = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ranks: list[Rank] = []
        try:
            for rank in range(world_size):
                path = socket_path(runtime_dir, rank)
                own = call_own and served_here(path) is not None
                client = LocalClient(path) if own else Client(path, self._context)
                self._ranks.append(Rank(rank, client, self.session))
        except IpcError:
            self.close()
            raise

    def set_timeout(self, timeout_s: float) -> None:
        """The longest that one lookup takes from now on."""
        self.timeout_s = timeout_s

    def hello(self, timeout_s: float) -> list[int]:
        """Opens the session on every rank, which ends the leases of a scheduler before this one.

        Returns:
            The ranks that did not answer. Lookups find them by themselves once they are there.
        """
        deadline = time.monotonic() + timeout_s
        asked = []
        missing = []
        for rank in self._ranks:
            try:
                asked.append((rank, rank.client.send(Hello(self.session), deadline)))
            except IpcError:
                missing.append(rank.number)
        for rank, request_id in asked:
            try:
                rank.client.receive(request_id, Done, deadline)
                rank.greeted = True
            except IpcError:
                missing.append(rank.number)
        return sorted(missing)

    def lookup(
        self,
        lookup_id: str,
        hashes: bytes,
        *,
        num_tokens: int = 0,
        skip: int = 0,
        tenant: bytes = NO_TENANT,
        seconds_per_token: float = 0.0,
    ) -> LookupResult:
        """How many of a prompt's chunks every rank holds.

        They stay leased until `cancel`, or until the worker that loads them ends the lease of
        `owner(lookup_id)`. The answer is kept for `lookup_cache`. While more is `coming`, ask `progress` and
        end with `settle`.

        Args:
            lookup_id: the request's id.
            hashes: 16 bytes a chunk, in the prompt's order.
            num_tokens: that they stand for, if the last chunk is not full.
            skip: leading chunks that need not be there; they count as found.
            tenant: 16 bytes, whose request it is.
            seconds_per_token: what computing a token takes; 0 if not known.

        Raises:
            ValueError: `hashes` is no whole number of digests.
        """
        if len(hashes) % DIGEST_BYTES:
            raise ValueError(f"{len(hashes)} bytes of hashes were given; give {DIGEST_BYTES} a chunk")
        started = time.monotonic()
        self.counters.lookups += 1
        if not hashes:
            result = LookupResult(0, False)
        elif _fits(lookup_id):
            hashes = hashes[: MAX_CHUNKS * DIGEST_BYTES]
            request = LookupRequest(
                self.session, lookup_id, hashes, num_tokens, tenant, seconds_per_token, skip
            )
            result = self._lookup(request, started)
        else:
            self.counters.failures += 1
            result = LookupResult(0, False)
        self.counters.seconds += time.monotonic() - started
        self._answers[lookup_id] = result.chunks
        self._waiting.pop(lookup_id, None)
        if result.coming:
            self._waiting[lookup_id] = result
        return result

    def progress(self, lookup_id: str) -> LookupResult:
        """How far a lookup is of which more was coming. The ranks are asked for all such lookups at once, and
        not more often than each millisecond."""
        started = time.monotonic()
        if started >= self._next_progress:
            self._progress(started)
            ended = time.monotonic()
            self._next_progress = ended + PROGRESS_INTERVAL_S
            self.counters.seconds += ended - started
        return self._waiting.get(lookup_id, LookupResult(self._answers.get(lookup_id, 0), False))

    def settle(self, lookup_id: str) -> int:
        """Waits no more: the chunks that every rank holds and has leased now. What else comes is not for this
        lookup."""
        result = self._waiting.pop(lookup_id, None)
        if result is not None:
            self._answers[lookup_id] = result.chunks
            if not result.chunks:
                for rank in self._ranks:
                    rank.release(lookup_id)
        return self._answers.get(lookup_id, 0)

    def lookup_cache(self, lookup_id: str) -> int:
        """The chunks that the last lookup of this request found; -1 if it was never asked or is cleared."""
        return self._answers.get(lookup_id, NEVER_ASKED)

    def clear(self, lookup_id: str) -> None:
        """Forgets the answer. Its leases are left to the worker that loads."""
        self._answers.pop(lookup_id, None)
        self._waiting.pop(lookup_id, None)

    def cancel(self, lookup_id: str) -> None:
        """Forgets the answer and ends its leases on every rank, also that of a lookup not answered yet."""
        self.clear(lookup_id)
        if _fits(lookup_id):
            for rank in self._ranks:
                rank.release(lookup_id)

    def owner(self, lookup_id: str) -> str:
        """The name under which the ranks hold this lookup's leases."""
        return lease_owner(self.session, lookup_id)

    def close(self) -> None:
        for rank in self._ranks:
            rank.client.close()
        self._context.term()

    def __enter__(self) -> LookupClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lookup(self, request: LookupRequest, now: float) -> LookupResult:
        away = [rank for rank in self._ranks if not rank.usable(now)]  # asks all, so that each gets its probe
        if away:
            self.counters.skipped += 1
            return LookupResult(0, True)
        answers = self._ask(request, LookupReply, now + self.timeout_s)
        self.counters.timeouts += answers.missed
        self.counters.failures += answers.failed
        result = LookupResult(0, answers.missed)
        if not (answers.missed or answers.failed):
            result = combined(answers.replies)
        held = any(reply.chunks or reply.most for reply in answers.replies)
        if answers.missed or answers.failed or (held and not (result.chunks or result.coming)):
            # Follows the lookup on the same connection, so it ends also the lease of one answered late.
            for rank in answers.asked:
                rank.release(request.lookup_id)
        return result

    def _progress(self, now: float) -> None:
        """Asks how far all waiting lookups are. Where a rank does not say, nothing is there."""
        waiting = [lookup_id for lookup_id, result in self._waiting.items() if result.coming]
        if waiting and not all(rank.usable(now) for rank in self._ranks):
            self._waiting.update(dict.fromkeys(waiting, LookupResult(0, True)))
            return
        for start in range(0, len(waiting), _PROGRESS_BATCH):
            batch = waiting[start : start + _PROGRESS_BATCH]
            answers = self._ask(Progress(self.session, batch), ProgressReply, now + self.timeout_s)
            whole = not (answers.missed or answers.failed)
            if whole and all(len(reply.lookups) == len(batch) for reply in answers.replies):
                by_lookup = zip(*(reply.lookups for reply in answers.replies), strict=True)
                self._waiting.update(zip(batch, map(combined, by_lookup), strict=True))
            else:
                self.counters.timeouts += answers.missed
                self.counters.failures += not answers.missed
                self._waiting.update(dict.fromkeys(batch, LookupResult(0, answers.missed)))

    def _ask(self, request: msgspec.Struct, reply: type[ReplyT], deadline: float) -> _Answers[ReplyT]:
        """Asks all ranks at once. One that does not answer is left alone for a while."""
        answers: _Answers[ReplyT] = _Answers([], [])
        ids: list[int] = []
        for rank in self._ranks:
            try:
                ids.append(rank.ask(request, deadline))
                answers.asked.append(rank)
            except (UnreachableError, NoAnswerError) as error:
                rank.missed(time.monotonic(), error)
                answers.missed = True
                return answers  # the answer is nothing whatever the others hold
        for rank, request_id in zip(answers.asked, ids, strict=True):
            try:
                answers.replies.append(rank.client.receive(request_id, reply, deadline))
                rank.backoff.answered()
            except NoAnswerError as error:
                rank.missed(time.monotonic(), error)
                answers.missed = True
            except IpcError as error:
                logger.debug("rank %d: %s", rank.number, error)
                answers.failed = True
        return answers


def combined(replies: Sequence[LookupReply]) -> LookupResult:
    """What all ranks hold: the least of them, now and later."""
    chunks, most = min(reply.chunks for reply in replies), min(reply.most for reply in replies)
    stored = min(reply.stored for reply in replies)
    coming = max(0, most - chunks)
    wait_s = max(reply.wait_s for reply in replies) if coming else 0.0
    return LookupResult(chunks, False, stored, coming, wait_s, tuple(replies[0].sources))


def _fits(lookup_id: str) -> bool:
    return 0 < len(lookup_id) <= MAX_ID_CHARS
