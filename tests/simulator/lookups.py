# SPDX-License-Identifier: Apache-2.0
"""Lookups inside one process: the ranks' real answers, without sockets and with faults.

It keeps the order that the sockets keep: what is sent to a rank arrives in the order in which it was sent. A
release that is posted may arrive late, but before the next lookup.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcache.lookup.client import LookupCounters, LookupResult
from kvcache.lookup.server import LookupBackend
from kvcache.lookup.wire import DIGEST_BYTES, lease_owner


@dataclass
class SimulatedLookups:
    """Stands in for `LookupClient`.

    Args:
        backends: one a rank, filled in when the ranks start.
        times_out: whether a rank does not answer the next lookup.
    """

    backends: list[LookupBackend]
    times_out: Callable[[], bool]
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    counters: LookupCounters = field(default_factory=LookupCounters)
    _posted: list[str] = field(default_factory=list)

    def lookup(self, lookup_id: str, hashes: bytes) -> LookupResult:
        self.deliver()
        self.counters.lookups += 1
        owner = lease_owner(self.session, lookup_id)
        found = [len(hashes) // DIGEST_BYTES]
        missed = False
        for backend in self.backends:
            chunks = backend.lookup_and_lease(hashes, owner)
            if self.times_out():
                missed = True
            else:
                found.append(chunks)
        self.counters.timeouts += missed
        least = 0 if missed else min(found)
        if missed or not least:
            self._posted.append(lookup_id)
        return LookupResult(least, missed)

    def clear(self, lookup_id: str) -> None:
        pass

    def cancel(self, lookup_id: str) -> None:
        self._posted.append(lookup_id)

    def close(self) -> None:
        self.deliver()

    def deliver(self) -> None:
        """What was posted has arrived."""
        posted, self._posted = self._posted, []
        for lookup_id in posted:
            for backend in self.backends:
                backend.release(lease_owner(self.session, lookup_id))
