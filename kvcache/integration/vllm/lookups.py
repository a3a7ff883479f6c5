# SPDX-License-Identifier: Apache-2.0
"""The lookups of requests: what the ranks have of a prompt, and the wait for what slower tiers bring.

A lookup takes what is in host memory on all ranks. Where slower tiers have more that is worth fetching, the
request waits outside of vLLM's batch until it has come, nothing more comes, or the tier's deadline is over;
then it takes what has come. A slow or failing tier so makes a hit shorter, and never a load fail. However
often a request has to ask, since its lease ran out or it was preempted, it waits one deadline in all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from kvcache.integration.vllm.counters import Sources
from kvcache.integration.vllm.trackers import RequestTracker
from kvcache.lookup.client import LookupClient, LookupResult


@dataclass
class WaitCounters:
    """Lookups that waited for slower tiers."""

    waits: int = 0
    seconds: float = 0.0
    expired: int = 0
    """Of them, those that took what was there since the deadline was over."""


class Lookups:
    """Of all requests. One thread.

    Args:
        client: asks the ranks.
        chunk_size: tokens.
        lease_timeout_s: life of a lease that is not renewed.
        seconds_per_token: what computing a token takes, as measured; 0 if that is not known.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        client: LookupClient,
        chunk_size: int,
        lease_timeout_s: float,
        seconds_per_token: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.waited = WaitCounters()
        self._chunk_size = chunk_size
        self.lease_timeout_s = lease_timeout_s
        self._seconds_per_token = seconds_per_token
        self._clock = clock
        self._waiting: dict[str, tuple[float, int]] = {}
        """Lookups that wait: when they began, and tokens that they are about."""

    def due(self, tracker: RequestTracker, own_tokens: int) -> bool:
        """Whether the ranks are to be asked anew: for the first time, before the lease runs out, or since
        vLLM has less itself than it had."""
        if tracker.waits_until is not None:
            return own_tokens < tracker.hit_from
        if tracker.hit_tokens is None:
            return True
        expires = self._clock() > tracker.ask_again_at
        return tracker.hit_tokens > 0 and (expires or own_tokens < tracker.hit_from)

    def begin(
        self, tracker: RequestTracker, digests: bytes, num_tokens: int, own_tokens: int, least: int = 1
    ) -> None:
        """Asks what the ranks have of a sequence.

        Args:
            digests: 16 bytes a chunk.
            num_tokens: that they stand for.
            own_tokens: of them, from the first on, that vLLM has itself.
            least: how many more must come for the request to wait.
        """
        now = self._clock()
        self._wait_ends(tracker, now)
        tracker.ask_again_at = now + self.lease_timeout_s / 2
        skipped = own_tokens // self._chunk_size
        tracker.hit_from = skipped * self._chunk_size
        result = self.client.lookup(
            tracker.lookup_id,
            digests,
            num_tokens=num_tokens,
            skip=skipped,
            tenant=tracker.tenant,
            seconds_per_token=self._seconds_per_token(),
        )
        most = self._tokens(result.chunks + result.coming, num_tokens)
        if result.coming and most - own_tokens >= least:
            tracker.waits_until = now + max(0.0, result.wait_s - tracker.waited_s)
            self._waiting[tracker.lookup_id] = (now, num_tokens)
            self.waited.waits += 1
        else:
            self._settle(tracker, result, num_tokens)

    def waits(self, tracker: RequestTracker) -> bool:
        """Whether the request has to wait; if not, its lookup is settled."""
        if tracker.waits_until is None:
            return False
        result = self.client.progress(tracker.lookup_id)
        now = self._clock()
        expired = now >= tracker.waits_until
        if result.coming and not expired:
            return True
        num_tokens = self._wait_ends(tracker, now)
        self.waited.expired += bool(result.coming)
        self._settle(tracker, result, num_tokens)
        return False

    def cancel(self, tracker: RequestTracker) -> None:
        """The request does not want what the lookup found or waits for: its leases end, now."""
        if tracker.hit_tokens or tracker.waits_until is not None:
            self.client.cancel(tracker.lookup_id)
        else:
            self.client.clear(tracker.lookup_id)
        self._wait_ends(tracker, self._clock())

    def drop(self, tracker: RequestTracker) -> None:
        """The request wants nothing of it any more; somebody else ends its leases."""
        self.client.clear(tracker.lookup_id)
        self._wait_ends(tracker, self._clock())
        tracker.hit_tokens = 0

    def _wait_ends(self, tracker: RequestTracker, now: float) -> int:
        """If the lookup waits, it does no more; the tokens that it is about."""
        began, num_tokens = self._waiting.pop(tracker.lookup_id, (now, 0))
        self.waited.seconds += now - began
        tracker.waited_s += now - began
        tracker.waits_until = None
        return num_tokens

    def _settle(self, tracker: RequestTracker, result: LookupResult, num_tokens: int) -> None:
        """The request takes what is there."""
        self.client.settle(tracker.lookup_id)
        tracker.hit_tokens = self._tokens(result.chunks, num_tokens)
        tracker.sources = self._sources(result)
        stored = self._tokens(result.stored, num_tokens)
        tracker.asked_tokens = max(tracker.asked_tokens, stored // self._chunk_size * self._chunk_size)

    def _sources(self, result: LookupResult) -> Sources:
        ends = accumulate(count * self._chunk_size for _, count in result.sources)
        return tuple((tier, end) for (tier, _), end in zip(result.sources, ends, strict=True))

    def _tokens(self, chunks: int, num_tokens: int) -> int:
        return min(chunks * self._chunk_size, num_tokens)
