# SPDX-License-Identifier: Apache-2.0
"""The scheduler's end of the lookup: asks every rank, and answers with what all of them hold.

It stands on the scheduler's critical path, so it never waits longer than one deadline a lookup, and not at
all for a rank that missed one until that rank answers again.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import zmq

from kvcache.ipc import Client, Done, IpcError, NoAnswerError, UnreachableError
from kvcache.lookup.wire import (
    DIGEST_BYTES,
    MAX_CHUNKS,
    MAX_ID_CHARS,
    Hello,
    LookupReply,
    LookupRequest,
    Release,
    lease_owner,
    socket_path,
)

logger = logging.getLogger(__name__)

NEVER_ASKED = -1
_MAX_UNRELEASED = 4096
"""Releases kept for a rank that takes no messages now; older ones are left to the lease's timeout."""
_RELEASE_BATCH = 256
"""Times the longest id, well below what one message may have."""
_PROBE_INTERVAL_S = 1.0


class LookupResult(NamedTuple):
    chunks: int
    """Chunks from the start on that every rank holds and has leased."""
    timed_out: bool
    """A rank did not answer: 0 chunks then says nothing about what is stored."""


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
class Backoff:
    """When a rank that missed a deadline may be asked again: after it answered a probe and a pause is over.

    The pause doubles with every miss up to `longest_s` and starts anew after a lookup was answered, so that a
    rank that answers probes but no lookups costs a deadline ever more rarely.
    """

    first_s: float = 0.1
    longest_s: float = 5.0
    pause_s: float = 0.0
    retry_at: float = 0.0
    waiting: bool = False

    def missed(self, now: float) -> None:
        self.pause_s = min(self.longest_s, max(self.first_s, 2 * self.pause_s))
        self.retry_at = now + self.pause_s
        self.waiting = True

    def probe_answered(self) -> None:
        self.waiting = False

    def answered(self) -> None:
        self.pause_s = 0.0

    def may_ask(self, now: float) -> bool:
        return not self.waiting and now >= self.retry_at


@dataclass
class _Rank:
    """One rank's server, as the scheduler sees it."""

    number: int
    client: Client
    session: str
    backoff: Backoff = field(default_factory=Backoff)
    greeted: bool = False
    probe_id: int | None = None
    probe_again_at: float = 0.0
    unreleased: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_UNRELEASED))

    def usable(self, now: float) -> bool:
        """Whether to send it lookups; probes it, without waiting, where not."""
        if self.backoff.waiting:
            self._read_probe()
        if self.backoff.waiting and now >= self.probe_again_at:
            self.probe_id = self.client.post(Hello(self.session), reply=True)
            if self.probe_id is not None:
                self.greeted = True
                self.probe_again_at = now + _PROBE_INTERVAL_S
        return self.backoff.may_ask(now)

    def ask(self, request: LookupRequest, deadline: float) -> int:
        if not self.greeted:
            self.client.send(Hello(self.session), deadline, reply=False)
            self.greeted = True
        # First, since what waits belongs to lookups before this one, perhaps under the same id.
        self._send_releases(lambda message: self.client.send(message, deadline, reply=False))
        return self.client.send(request, deadline)

    def missed(self, now: float, error: IpcError) -> None:
        if not self.backoff.pause_s:
            logger.warning("rank %d: %s; prompts count as not cached until it answers", self.number, error)
        self.backoff.missed(now)
        self.probe_id, self.probe_again_at = None, 0.0

    def release(self, *lookup_ids: str) -> None:
        """Ends the leases of these lookups, or does so when the rank takes messages again."""
        self.unreleased.extend(lookup_ids)
        self._send_releases(self.client.post)

    def _send_releases(self, send: Callable[[Release], int | None]) -> None:
        while self.unreleased:
            batch = list(islice(self.unreleased, _RELEASE_BATCH))
            if send(Release(self.session, batch)) is None:
                return
            for _ in batch:
                self.unreleased.popleft()

    def _read_probe(self) -> None:
        if self.probe_id is None:
            return
        try:
            self.client.receive(self.probe_id, Done, deadline=0.0)
        except NoAnswerError:
            return
        except IpcError as error:
            logger.debug("rank %d: %s", self.number, error)
            return
        self.backoff.probe_answered()
        self.release()


class LookupClient:
    """Asks all ranks of one engine. For the scheduler's thread only; no method raises for what the ranks do.

    Args:
        runtime_dir: folder of the sockets.
        world_size: number of ranks; rank r listens on `lookup.rank<r>.sock`.
        timeout_s: the longest that one lookup takes, for all ranks together.
        session: names this life of the scheduler; random if left out.

    Raises:
        IpcError: the sockets' path is too long.
    """

    def __init__(
        self,
        runtime_dir: str | Path,
        world_size: int,
        timeout_s: float = 0.5,
        session: str | None = None,
    ) -> None:
        self.session = session or secrets.token_hex(8)
        self.counters = LookupCounters()
        self._timeout_s = timeout_s
        self._answers: dict[str, int] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                client = Client(socket_path(runtime_dir, rank), self._context)
                self._ranks.append(_Rank(rank, client, self.session))
        except IpcError:
            self.close()
            raise

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

    def lookup(self, lookup_id: str, hashes: bytes) -> LookupResult:
        """How many of a prompt's chunks every rank holds.

        They stay leased until `cancel`, or until the worker that loads them ends the lease of
        `owner(lookup_id)`. The answer is kept for `lookup_cache`.

        Args:
            lookup_id: the request's id.
            hashes: 16 bytes a chunk, in the prompt's order.

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
            result = self._lookup(lookup_id, hashes[: MAX_CHUNKS * DIGEST_BYTES], started)
        else:
            self.counters.failures += 1
            result = LookupResult(0, False)
        self.counters.seconds += time.monotonic() - started
        self._answers[lookup_id] = result.chunks
        return result

    def lookup_cache(self, lookup_id: str) -> int:
        """The chunks that the last lookup of this request found; -1 if it was never asked or is cleared."""
        return self._answers.get(lookup_id, NEVER_ASKED)

    def clear(self, lookup_id: str) -> None:
        """Forgets the answer. Its leases are left to the worker that loads."""
        self._answers.pop(lookup_id, None)

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

    def _lookup(self, lookup_id: str, hashes: bytes, now: float) -> LookupResult:
        away = [rank for rank in self._ranks if not rank.usable(now)]  # asks all, so that each gets its probe
        if away:
            self.counters.skipped += 1
            return LookupResult(0, True)
        request = LookupRequest(self.session, lookup_id, hashes)
        deadline = now + self._timeout_s
        found = len(hashes) // DIGEST_BYTES
        most = 0
        missed = failed = False
        asked: list[tuple[_Rank, int]] = []
        for rank in self._ranks:
            try:
                asked.append((rank, rank.ask(request, deadline)))
            except (UnreachableError, NoAnswerError) as error:
                rank.missed(time.monotonic(), error)
                missed = True
                break  # the answer is 0 whatever the others hold
        if not missed:
            for rank, request_id in asked:
                try:
                    chunks = rank.client.receive(request_id, LookupReply, deadline).chunks
                    rank.backoff.answered()
                    found, most = min(found, chunks), max(most, chunks)
                except NoAnswerError as error:
                    rank.missed(time.monotonic(), error)
                    missed = True
                except IpcError as error:
                    logger.debug("rank %d: %s", rank.number, error)
                    failed = True
        self.counters.timeouts += missed
        self.counters.failures += failed
        if missed or failed or (found == 0 and most > 0):
            # Follows the lookup on the same connection, so it ends also the lease of one answered late.
            for rank, _ in asked:
                rank.release(lookup_id)
            found = 0
        return LookupResult(found, missed)


def _fits(lookup_id: str) -> bool:
    return 0 < len(lookup_id) <= MAX_ID_CHARS
