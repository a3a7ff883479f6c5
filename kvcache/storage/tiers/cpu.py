# SPDX-License-Identifier: Apache-2.0
"""The tier in host memory: chunks in one pre-allocated region, an index, leases and an eviction policy.

A chunk is written in three steps: `reserve` takes memory that nobody can see, the caller copies, and
`publish` makes it visible; `abandon` gives the memory back. Nothing waits for memory: where all else is under
a lease, `reserve` says `FULL`.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcache.memory.allocator import ChunkAllocator
from kvcache.memory.lease import LeaseBook
from kvcache.memory.objects import MemoryObj
from kvcache.stats import TierStats
from kvcache.storage.policies import EvictionPolicy
from kvcache.tokens.keys import CacheEngineKey


class Outcome(enum.Enum):
    """What `reserve` found."""

    RESERVED = enum.auto()
    PRESENT = enum.auto()
    """Visible already: nothing to copy."""
    IN_FLIGHT = enum.auto()
    """Somebody is writing it: nothing to copy, but not there yet."""
    FULL = enum.auto()
    """No room, since everything else is under a lease or being written."""


class Reservation(NamedTuple):
    outcome: Outcome
    obj: MemoryObj | None
    """Memory to copy into if `RESERVED`, else None."""


class Flushed(NamedTuple):
    """What a flush did. Kept objects are invisible already and go when their readers end."""

    removed_objects: int
    removed_bytes: int
    kept_objects: int


@dataclass
class _Entry:
    obj: MemoryObj
    visible: bool


@dataclass
class _Counters:
    evictions: int = 0
    rejected: int = 0
    hit_tokens: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    write_bytes: int = 0
    write_seconds: float = 0.0


class CpuTier:
    """Thread-safe. Owns the allocator and closes it.

    Args:
        allocator: memory for chunks.
        policy: who leaves first.
        lease_timeout_s: life of a lease whose owner is never heard of again.
        state: `Ready`, or what the memory is still waiting for.
        clock: seconds, monotonic.
    """

    name = "cpu"

    def __init__(
        self,
        allocator: ChunkAllocator,
        policy: EvictionPolicy[CacheEngineKey],
        lease_timeout_s: float,
        state: Callable[[], str] = lambda: "Ready",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allocator = allocator
        self._policy = policy
        self._state = state
        self._lock = threading.RLock()
        self._index: dict[CacheEngineKey, _Entry] = {}
        self._writing: dict[CacheEngineKey, _Entry] = {}
        self._leases: LeaseBook[CacheEngineKey, _Entry] = LeaseBook(self._lease_ended, lease_timeout_s, clock)
        self._count = _Counters()

    # Writing

    def reserve(self, key: CacheEngineKey, num_tokens: int) -> Reservation:
        """Memory for a chunk of `num_tokens` tokens, evicting others if need be."""
        with self._lock:
            if key in self._index:
                return Reservation(Outcome.PRESENT, None)
            if key in self._writing:
                return Reservation(Outcome.IN_FLIGHT, None)
            obj = self._allocator.allocate(num_tokens)
            while obj is None and self._evict_one():
                obj = self._allocator.allocate(num_tokens)
            if obj is None:
                self._count.rejected += 1
                return Reservation(Outcome.FULL, None)
            self._writing[key] = _Entry(obj, visible=True)
            return Reservation(Outcome.RESERVED, obj)

    def publish(self, keys: Iterable[CacheEngineKey], seconds: float = 0.0) -> None:
        """Makes reserved chunks visible: their bytes are complete. A chunk flushed meanwhile is dropped.

        Args:
            seconds: what the copy took, for the statistics.

        Raises:
            KeyError: a key that is not reserved.
        """
        with self._lock:
            for key in keys:
                entry = self._writing.pop(key)
                self._count.write_bytes += entry.obj.nbytes
                if entry.visible:
                    self._index[key] = entry
                    self._policy.admit(key)
                else:
                    self._allocator.free(entry.obj)
            self._count.write_seconds += seconds

    def abandon(self, keys: Iterable[CacheEngineKey]) -> None:
        """Gives reserved memory back unseen. Raises KeyError for a key that is not reserved."""
        with self._lock:
            for key in keys:
                self._allocator.free(self._writing.pop(key).obj)

    # Reading

    def lookup(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many of the keys, from the first on without a gap, are visible."""
        with self._lock:
            return self._prefix(keys)

    def lookup_and_lease(self, keys: Sequence[CacheEngineKey], owner: str) -> int:
        """As `lookup`; what is found is leased to `owner` and counts as used now."""
        with self._lock:
            self._leases.expire()
            found = self._prefix(keys)
            if found:
                self._leases.take(owner, ((key, self._index[key]) for key in keys[:found]))
                # The end of a chain is of no use without its start: touched last, the start leaves last.
                for key in reversed(keys[:found]):
                    self._policy.touch(key)
            return found

    def leased(self, keys: Sequence[CacheEngineKey], owner: str) -> list[MemoryObj]:
        """The chunks of the owner's lease, from the first key on up to the first that it does not hold."""
        objs: list[MemoryObj] = []
        with self._lock:
            for key in keys:
                entry = self._leases.get(owner, key)
                if entry is None:
                    break
                objs.append(entry.obj)
        return objs

    def hand_over(self, owner: str, to: str) -> None:
        """The owner's lease is `to`'s from now on: nobody else who names the owner ends it."""
        with self._lock:
            self._leases.hand_over(owner, to)

    def release(self, owner: str) -> int:
        """Ends the owner's lease; the number of chunks it held."""
        with self._lock:
            return self._leases.end(owner)

    def release_where(self, ended: Callable[[str], bool]) -> int:
        """Ends the leases of all owners that `ended` says so of; their number."""
        with self._lock:
            return self._leases.end_where(ended)

    def count_read(self, num_bytes: int, seconds: float, tokens: int) -> None:
        """Adds a finished load to the statistics."""
        with self._lock:
            self._count.read_bytes += num_bytes
            self._count.read_seconds += seconds
            self._count.hit_tokens += tokens

    # Upkeep

    def flush(self) -> Flushed:
        """Makes everything invisible at once, chunks that are being written included."""
        with self._lock:
            removed = removed_bytes = kept = 0
            for key, entry in list(self._index.items()):
                size = entry.obj.nbytes
                if self._remove(key):
                    removed, removed_bytes = removed + 1, removed_bytes + size
                else:
                    kept += 1
            for entry in self._writing.values():
                kept += entry.visible
                entry.visible = False
            return Flushed(removed, removed_bytes, kept)

    def stats(self) -> TierStats:
        with self._lock:
            self._leases.expire()
            return TierStats(
                name=self.name,
                state=self._state(),
                capacity_bytes=self._allocator.capacity_bytes,
                used_bytes=self._allocator.used_bytes,
                objects=len(self._index),
                leases=len(self._leases),
                evictions=self._count.evictions,
                rejected=self._count.rejected,
                hit_tokens=self._count.hit_tokens,
                read_bytes=self._count.read_bytes,
                read_seconds=self._count.read_seconds,
                write_bytes=self._count.write_bytes,
                write_seconds=self._count.write_seconds,
            )

    def close(self) -> None:
        """Frees everything. Nothing may copy to or from its memory any more."""
        with self._lock:
            self._index.clear()
            self._writing.clear()
            self._allocator.close()

    def _prefix(self, keys: Sequence[CacheEngineKey]) -> int:
        for count, key in enumerate(keys):
            if key not in self._index:
                return count
        return len(keys)

    def _evict_one(self) -> bool:
        victim = self._policy.victim(lambda key: not self._leases.held(self._index[key]))
        if victim is None:
            return False
        self._take_out(victim)
        self._count.evictions += 1
        return True

    def _remove(self, key: CacheEngineKey) -> bool:
        """Takes a chunk out; True if its memory is free at once, not when its readers end."""
        self._policy.remove(key)
        return self._take_out(key)

    def _take_out(self, key: CacheEngineKey) -> bool:
        """As `_remove`, of a key that the policy has dropped."""
        entry = self._index.pop(key)
        entry.visible = False
        if self._leases.held(entry):
            return False
        self._allocator.free(entry.obj)
        return True

    def _lease_ended(self, key: CacheEngineKey, entry: _Entry) -> None:
        if not entry.visible:
            self._allocator.free(entry.obj)
