# SPDX-License-Identifier: Apache-2.0
"""Writes chunks from host memory to one tier below, behind the backs of those who store them.

What is to be written is leased until it is. Only so many bytes may wait: what comes beyond them is dropped
and counted, and so is what continues a dropped chunk, since it could not be hit without it.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from kvcache.storage.background import RunSoon
from kvcache.storage.lane import Lane
from kvcache.storage.tier import ClearScope, PutOutcome, StoredObject
from kvcache.storage.tiers.cpu import CpuTier
from kvcache.tokens.keys import CacheEngineKey

BATCH_BYTES = 32 << 20
BATCH_OBJECTS = 64
MOST_BATCHES = 4
"""With the tier at a time: enough for a deep queue of a disk or a pipeline over a network."""
_MOST_DROPPED = 4096
"""Dropped chunks that are remembered for the sake of those that continue them."""


@dataclass(eq=False)
class _Item:
    owner: str
    """Of the lease."""
    object: StoredObject


@dataclass(eq=False)
class _Barrier:
    """Done when the batches that were with the tier are."""

    batches: set[int]
    future: Future[None] = field(default_factory=Future)


class Writer:
    """Of one tier. Thread-safe; nothing here waits.

    Args:
        lane: the tier.
        cpu: where the chunks are.
        run_soon: how batches are handed to the tier: not by whoever stores.
        limit_bytes: what may wait to be written, what is under way included.
    """

    def __init__(self, lane: Lane, cpu: CpuTier, run_soon: RunSoon, limit_bytes: int) -> None:
        self.lane = lane
        self.limit_bytes = limit_bytes
        self._cpu = cpu
        self._run_soon = run_soon
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: deque[_Item] = deque()
        self._pending: set[CacheEngineKey] = set()
        """Keys that wait or are under way."""
        self._pending_bytes = 0
        self._batches: set[int] = set()
        self._barriers: list[_Barrier] = []
        self._dropped: OrderedDict[CacheEngineKey, None] = OrderedDict()
        self.ending = False
        """The engine is: what is not written from now on never will be."""
        self.lost_at_end = 0
        """Chunks that were to be written when the engine ended and were not."""

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    def offer(self, keys: Iterable[CacheEngineKey]) -> None:
        """Chunks in host memory that are to be written. One that is to leave and is not taken is gone. A tier
        that is down costs those who store nothing: it is not asked."""
        if self.lane.accepts():
            refused = [key for key in keys if not self._take_in(key)]
        else:
            refused = list(keys)
            with self._lock:
                self._failed(len(refused))
        for key in refused:
            self._cpu.left(key)
        if self._waiting:
            self._run_soon(self._pump)

    def discard(self, scope: ClearScope) -> Future[None]:
        """Does not write what waits and is in the scope. The future is done when nothing that was handed to
        the tier before is being written any more."""
        barrier = _Barrier(set())
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            dropped: list[_Item] = []
            for item in waiting:
                covered = scope.covers(item.object.key, item.object.tenant)
                (dropped if covered else self._waiting).append(item)
            barrier.batches = set(self._batches)
            if barrier.batches:
                self._barriers.append(barrier)
        for item in dropped:
            self._finish(item)
        if not barrier.batches:
            barrier.future.set_result(None)
        return barrier.future

    def give_up(self) -> None:
        """What waits is not written any more, and counted."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            self.lane.count.writes_dropped += len(waiting)
            self.lost_at_end += len(waiting)
        for item in waiting:
            self._finish(item)

    def _take_in(self, key: CacheEngineKey) -> bool:
        """False if the chunk will not be written, or is not there any more."""
        owner = f"writing/{self.lane.name}/{next(self._numbers)}"
        lent = self._cpu.lend(key, owner)
        if lent is None:
            return False
        with self._lock:
            taken = key in self._pending
            new = not taken and self._admit(lent)
            if new:
                self._waiting.append(_Item(owner, lent))
        if not new:
            self._cpu.release(owner)
        return taken or new

    def _admit(self, lent: StoredObject) -> bool:
        """Whether to write it, if there is room in the queue and its chain is not broken."""
        key = lent.key
        parent = CacheEngineKey(lent.parent, key.namespace, key.rank, key.kv_group)
        size = len(lent.payload)
        if parent in self._dropped or self._pending_bytes + size > self.limit_bytes:
            self.lane.count.writes_dropped += 1
            self._dropped[lent.key] = None
            if len(self._dropped) > _MOST_DROPPED:
                self._dropped.popitem(last=False)
            return False
        if not self.lane.admits(lent.key):
            self.lane.count.writes_declined += 1
            return False
        self._dropped.pop(lent.key, None)
        self._pending.add(lent.key)
        self._pending_bytes += size
        return True

    def _pump(self) -> None:
        """Hands batches to the tier."""
        while True:
            with self._lock:
                if not self._waiting or len(self._batches) >= MOST_BATCHES:
                    return
                number, batch = next(self._numbers), self._next_batch()
                self._batches.add(number)
            future = self.lane.put([item.object for item in batch])
            future.add_done_callback(partial(self._written, number, batch))

    def _next_batch(self) -> list[_Item]:
        batch = [self._waiting.popleft()]
        size = len(batch[0].object.payload)
        while self._waiting and len(batch) < BATCH_OBJECTS:
            size += len(self._waiting[0].object.payload)
            if size > BATCH_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _written(self, number: int, batch: Sequence[_Item], future: Future[list[PutOutcome]]) -> None:
        outcomes = [PutOutcome.FAILED] * len(batch)
        if not future.cancelled() and future.exception() is None and len(future.result()) == len(batch):
            outcomes = future.result()
        for item, outcome in zip(batch, outcomes, strict=True):
            if outcome in (PutOutcome.STORED, PutOutcome.PRESENT):
                self._cpu.taken_below(item.object.key, self.lane.bit)
            with self._lock:
                self.lane.count.writes_declined += outcome is PutOutcome.DECLINED
                self._failed(outcome is PutOutcome.FAILED)
            self._finish(item)
        with self._lock:
            self._batches.discard(number)
            for barrier in self._barriers:
                barrier.batches.discard(number)
            passed = [barrier for barrier in self._barriers if not barrier.batches]
            self._barriers = [barrier for barrier in self._barriers if barrier.batches]
        for barrier in passed:
            barrier.future.set_result(None)
        self._run_soon(self._pump)

    def _failed(self, count: int) -> None:
        """Counts, under the lock."""
        self.lane.count.write_failures += count
        self.lost_at_end += count if self.ending else 0

    def _finish(self, item: _Item) -> None:
        """The chunk waits no more, written or not."""
        with self._lock:
            self._pending.discard(item.object.key)
            self._pending_bytes -= len(item.object.payload)
        self._cpu.release(item.owner)
        self._cpu.left(item.object.key)
