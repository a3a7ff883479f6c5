# SPDX-License-Identifier: Apache-2.0
"""Lookups inside one process: the ranks' real answers, without sockets and with faults.

It keeps the order that the sockets keep: what is sent to a rank arrives in the order in which it was sent. A
release that is posted may arrive late, but before the next lookup.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcache.lookup.client import LookupCounters, LookupResult, combined
from kvcache.lookup.server import LookupBackend
from kvcache.lookup.wire import NO_TENANT, LookupReply, LookupRequest, lease_owner


@dataclass
class SimulatedLookups:
    """Stands in for `LookupClient`.

    Args:
        backends: one a rank, filled in when the ranks start.
        times_out: whether a rank does not answer the next question.
    """

    backends: list[LookupBackend]
    times_out: Callable[[], bool]
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    counters: LookupCounters = field(default_factory=LookupCounters)
    _posted: list[str] = field(default_factory=list)
    _waiting: dict[str, LookupResult] = field(default_factory=dict)

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
        self.deliver()
        self.counters.lookups += 1
        request = LookupRequest(self.session, lookup_id, hashes, num_tokens, tenant, seconds_per_token, skip)
        owner = lease_owner(self.session, lookup_id)
        result = self._answer([backend.lookup(request, owner) for backend in self.backends])
        self._waiting.pop(lookup_id, None)
        if result.coming:
            self._waiting[lookup_id] = result
        elif not result.chunks:
            self._posted.append(lookup_id)
        return result

    def progress(self, lookup_id: str) -> LookupResult:
        self.deliver()
        owner = lease_owner(self.session, lookup_id)
        result = self._answer([backend.progress(owner) for backend in self.backends])
        self._waiting[lookup_id] = result
        return result

    def settle(self, lookup_id: str) -> None:
        result = self._waiting.pop(lookup_id, None)
        if result is not None and not result.chunks:
            self._posted.append(lookup_id)

    def _answer(self, replies: list[LookupReply]) -> LookupResult:
        missed = any([self.times_out() for _ in replies])  # noqa: C419 -- each rank may
        self.counters.timeouts += missed
        return LookupResult(0, True) if missed else combined(replies)

    def clear(self, lookup_id: str) -> None:
        self._waiting.pop(lookup_id, None)

    def cancel(self, lookup_id: str) -> None:
        self.clear(lookup_id)
        self._posted.append(lookup_id)

    def close(self) -> None:
        self.deliver()

    def deliver(self) -> None:
        """What was posted has arrived."""
        posted, self._posted = self._posted, []
        for lookup_id in posted:
            for backend in self.backends:
                backend.release(lease_owner(self.session, lookup_id))
