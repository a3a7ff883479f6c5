# SPDX-License-Identifier: Apache-2.0
"""One rank's lookup server, as the scheduler sees it: whether it answers, and what it must still be told."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from kvcache.ipc import Client, Done, IpcError, NoAnswerError
from kvcache.lookup.local import LocalClient
from kvcache.lookup.wire import Hello, Release

logger = logging.getLogger(__name__)

_MAX_UNRELEASED = 4096
"""Releases kept for a rank that takes no messages now; older ones are left to the lease's timeout."""
_RELEASE_BATCH = 256
"""Times the longest id, well below what one message may have."""
_PROBE_INTERVAL_S = 1.0


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
class Rank:
    """One rank's server, as the scheduler sees it."""

    number: int
    client: Client | LocalClient
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

    def ask(self, request: msgspec.Struct, deadline: float) -> int:
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
