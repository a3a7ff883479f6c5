# SPDX-License-Identifier: Apache-2.0
"""The storage manager: the tiers of one rank and the order between them.

Host memory is where copies to and from the GPU start and end. What is stored there is written to the tiers
below at once (write-through) or when it leaves (write-back); what a lookup finds below is fetched into host
memory before it is loaded. Lookups follow the tiers' order, the fastest first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import msgspec

from kvcache.config.tiers import WriteMode
from kvcache.stats import TierStats
from kvcache.storage.background import Background, RunSoon
from kvcache.storage.fetch import Fetcher, Query, Standing
from kvcache.storage.futures import done, gathered, mapped, then
from kvcache.storage.lane import Lane
from kvcache.storage.pins import Pin, PinBook
from kvcache.storage.room import Demotion
from kvcache.storage.tenants import Quotas
from kvcache.storage.tier import Cleared, ClearScope
from kvcache.storage.tiers.cpu import CpuTier
from kvcache.storage.write import Writer
from kvcache.tokens.keys import CacheEngineKey

logger = logging.getLogger("vllm.kvcache")

_MOST_QUEUED = 4
"""Part (one in so many) of host memory that may wait to be written below: what waits cannot be evicted."""
_AHEAD = 16
"""Part of host memory that is kept free where what leaves is written below."""
_CLOSE_TIMEOUT_S = 10.0
_LAST_WRITES_S = 3.0
"""For what waits to be written when the engine ends: vLLM ends a worker that takes much longer."""


class StorageManager:
    """All tiers of one rank, the fastest first. Thread-safe.

    Args:
        cpu: the tier in host memory.
        lanes: the tiers below, the fastest first; each one's index is its place.
        pins: chunks that stay.
        quotas: of tenants, as the tiers know them.
        forget_after_s: life of a lookup that is never heard of again.
        run_soon: how work for the tiers below leaves the threads that make it; a thread of its own if None.
        clock: seconds, monotonic.
        writes_below: False where another rank writes the same chunks to the tiers below.
    """

    def __init__(
        self,
        cpu: CpuTier,
        lanes: Sequence[Lane] = (),
        *,
        pins: PinBook | None = None,
        quotas: Quotas | None = None,
        forget_after_s: float = 300.0,
        run_soon: RunSoon | None = None,
        clock: Callable[[], float] = time.monotonic,
        writes_below: bool = True,
    ) -> None:
        self.cpu = cpu
        self.lanes = list(lanes)
        self.pins = PinBook(lambda: 0) if pins is None else pins
        self.quotas = Quotas({}) if quotas is None else quotas
        self._background = Background("kvcache writer")
        self._own_background = run_soon is None
        self._fetcher = Fetcher(cpu, self.lanes, self._arrived, forget_after_s, clock)
        self._writes_below = writes_below
        self._writers = [Writer(lane, cpu, run_soon or self._background.run_soon, 0) for lane in self.lanes]
        self.fit_queues()

    # Storing

    def publish(self, keys: Sequence[CacheEngineKey], seconds: float) -> None:
        """Reserved chunks are complete: makes them visible, and has them written below."""
        shown = self.cpu.publish(keys, seconds)
        for writer in self._through():
            writer.offer(shown)

    # Looking up

    def lookup(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many of the keys, from the first on without a gap, are in host memory."""
        return self.cpu.lookup(keys)

    def lookup_and_lease(self, keys: Sequence[CacheEngineKey], owner: str) -> int:
        """As `lookup`, and what is found stays until the owner's lease ends."""
        return self.cpu.lookup_and_lease(keys, owner)

    def begin_lookup(self, owner: str, query: Query) -> Standing:
        """As `lookup_and_lease`, and what the tiers below have is fetched and added to the owner's lease."""
        keys = query.keys
        found, stored = self.cpu.lease_from(keys, owner, query.skip)
        for writer in self._through():
            # Dropped before, or declined since nobody had asked for it yet.
            lacking = self.cpu.lacking(keys[:found], writer.lane.bit)
            if lacking and writer.lane.writable():
                writer.offer(lacking)
        if found == len(keys) or not self.lanes:
            return Standing(found, found, stored=stored)
        return self._fetcher.begin(owner, query, found, stored)

    def standing(self, owner: str) -> Standing:
        """How far the owner's lookup is."""
        return self._fetcher.standing(owner)

    def hand_over(self, owner: str, to: str) -> dict[CacheEngineKey, Lane]:
        """The owner's lease is `to`'s from now on, and its lookup has ended. Which chunks came from below."""
        sources = self._fetcher.end(owner)
        self.cpu.hand_over(owner, to)
        return sources

    def release(self, owner: str) -> int:
        """Ends the owner's lookup and lease; the number of chunks it held."""
        self._fetcher.end(owner)
        return self.cpu.release(owner)

    def release_where(self, ended: Callable[[str], bool]) -> int:
        """Ends the lookups and leases of all owners that `ended` says so of; the number of leases."""
        self._fetcher.end_where(ended)
        return self.cpu.release_where(ended)

    def locate(self, keys: Sequence[CacheEngineKey]) -> Future[list[str]]:
        """The fastest tier that has each of the leading chunks, up to the first one that none has. Leases
        and fetches nothing."""
        here = [key in self.cpu for key in keys]
        heads = [lane.head(keys) if lane.readable() else done([None] * len(keys)) for lane in self.lanes]

        def first_tiers(answers: list[list[int | None]]) -> list[str]:
            names: list[str] = []
            for at in range(len(keys)):
                below = (lane.name for lane, sizes in zip(self.lanes, answers, strict=True) if sizes[at])
                name = self.cpu.name if here[at] else next(below, None)
                if name is None:
                    break
                names.append(name)
            return names

        return mapped(gathered(heads, lambda error: [None] * len(keys)), first_tiers)

    # Pins

    def pin(self, owner: str, keys: Collection[CacheEngineKey], *, check: bool = False) -> None:
        """Keeps chunks, those to come included, until `unpin`; only checks that where told so.

        Raises:
            PinRefusedError: they are too many.
        """
        self.pins.pin(owner, keys, check=check)

    def unpin(self, owner: str) -> int:
        """The number of chunks that the owner had pinned."""
        return self.pins.unpin(owner)

    def pinned(self) -> list[Pin]:
        return self.pins.pins()

    # Upkeep

    def tier_names(self) -> list[str]:
        return [self.cpu.name, *(lane.name for lane in self.lanes)]

    def clear(self, scope: ClearScope, tiers: Collection[str] | None = None) -> dict[str, Future[Cleared]]:
        """Removes what is in the scope from those of the named tiers that are there, from all if None. A
        scope that names keys takes in what continues them, as far as host memory knows."""
        scope = self.cpu.behind(scope)
        names = self.tier_names() if tiers is None else tiers
        results: dict[str, Future[Cleared]] = {}
        if self.cpu.name in names:
            results[self.cpu.name] = done(self.cpu.clear(scope))
        for writer in self._writers:
            if writer.lane.name in names:
                results[writer.lane.name] = self._clear_below(writer, scope)
        below = [result for name, result in results.items() if name != self.cpu.name]
        if below and self.cpu.name in results:
            # What came up from a tier before that was cleared.
            gathered(below, lambda error: Cleared(0, 0, 0)).add_done_callback(lambda _: self.cpu.clear(scope))
        return results

    def fit_queues(self) -> None:
        """Measures what may wait to be written by the tiers' configuration and the size of host memory."""
        capacity = self.cpu.stats().capacity_bytes
        chunk = self.cpu.shape.chunk_bytes
        for writer in self._writers:
            share = max(chunk, capacity // _MOST_QUEUED // len(self._writers))
            writer.limit_bytes = min(writer.lane.write_queue_bytes, share)
        back = self._writing("Back")
        demotion = None
        if back:
            ahead = max(chunk, min(capacity // _AHEAD, *(writer.limit_bytes for writer in back)))
            demotion = Demotion(sum(writer.lane.bit for writer in back), ahead, self._demote)
        self.cpu.set_demotion(demotion)

    def stats(self) -> list[TierStats]:
        cpu = msgspec.structs.replace(self.cpu.stats(), pinned_objects=len(self.pins))
        return [cpu, *(self._lane_stats(lane) for lane in self.lanes)]

    def close(self, *, free: bool = True) -> None:
        """Has what waits to be written below, and what only host memory has (write-back), written within some
        seconds, ends the tiers below, then frees host memory. What is not written by then is counted and
        logged. Host memory is left as it is where a tier does not end: the tier may still write there.

        Args:
            free: False leaves host memory as it is in any case: copies still run.
        """
        deadline = time.monotonic() + _LAST_WRITES_S
        for writer in self._writers:
            writer.ending = True
        for writer in self._writing("Back"):
            writer.limit_bytes = self.cpu.stats().capacity_bytes  # it is of no other use any more
            writer.offer(self.cpu.lacking(self.cpu.newest_chains(), writer.lane.bit))
        while self._own_background and self._writes_wait() and time.monotonic() < deadline:
            time.sleep(_LAST_WRITES_S / 1000)
        self._background.close(_CLOSE_TIMEOUT_S)
        states = [lane.tier.health().state for lane in self.lanes]
        for writer in self._writers:
            writer.give_up()
        closing = [threading.Thread(target=lane.tier.close, daemon=True) for lane in self.lanes]
        for thread in closing:
            thread.start()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in closing:
            thread.join(max(0.0, deadline - time.monotonic()))
        for writer, state in zip(self._writers, states, strict=True):
            if writer.lost_at_end:
                text = "KV cache: %d chunks were not written to the tier %s (%s) before the end"
                logger.warning(text, writer.lost_at_end, writer.lane.name, state)
        if any(thread.is_alive() for thread in closing):
            logger.warning("KV cache: a tier did not close within %g s; its memory is left", _CLOSE_TIMEOUT_S)
        elif free:
            self.cpu.close()

    def _writes_wait(self) -> bool:
        return any(writer.pending_bytes and writer.lane.writable() for writer in self._writers)

    def _through(self) -> list[Writer]:
        return self._writing("Through")

    def _writing(self, mode: WriteMode) -> list[Writer]:
        return [writer for writer in self._writers if self._writes_below and writer.lane.write == mode]

    def _demote(self, keys: list[CacheEngineKey]) -> None:
        for writer in self._writing("Back"):
            writer.offer(self.cpu.lacking(keys, writer.lane.bit))

    def _arrived(self, keys: list[CacheEngineKey], lane: Lane) -> None:
        """Fetched chunks are in host memory: the tiers between are to have them too."""
        for key in keys:
            self.cpu.taken_below(key, lane.bit)
        for writer in self._through():
            if writer.lane.index < lane.index:
                writer.offer(keys)

    def _clear_below(self, writer: Writer, scope: ClearScope) -> Future[Cleared]:
        lane = writer.lane
        cleared = then(writer.discard(scope), lambda _: lane.tier.clear(scope))
        cleared.add_done_callback(lambda _: self.cpu.lost_below(lane.bit, scope))
        return cleared

    def _lane_stats(self, lane: Lane) -> TierStats:
        stats = lane.stats()
        if lane.write == "Back":
            dropped = stats.writes_dropped + self.cpu.unsaved
            return msgspec.structs.replace(stats, writes_dropped=dropped)
        return stats
