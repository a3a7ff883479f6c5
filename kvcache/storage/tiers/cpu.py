# SPDX-License-Identifier: Apache-2.0
"""The tier in host memory: chunks in one pre-allocated region, an index, leases and an eviction policy.

A chunk that is computed is written in three steps: `reserve` takes memory that nobody can see, the caller
copies, and `publish` makes it visible; `abandon` gives the memory back. A chunk that is read from a tier
below is claimed by whoever waits for it, and leased to all of those at once when it has arrived. Nothing
waits for memory: where all else is under a lease, there is none.

Chains are given up from their ends (`kvcache.storage.room`), so that what is here can be hit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvcache.memory.allocator import ChunkAllocator, KVShape
from kvcache.memory.lease import LeaseBook
from kvcache.memory.objects import MemoryObj
from kvcache.stats import TierStats
from kvcache.storage.changes import ChangeLog
from kvcache.storage.claims import Claims
from kvcache.storage.plan import HOST
from kvcache.storage.policies import AdmissionPolicy, EvictionPolicy
from kvcache.storage.reservation import IN_FLIGHT, PRESENT, REFUSED, Outcome, Reservation
from kvcache.storage.residents import Entry
from kvcache.storage.room import Demotion, Refusal, Room
from kvcache.storage.tier import NO_PARENT, NO_TENANT, Cleared, ClearScope, StoredObject
from kvcache.tokens.keys import CacheEngineKey

__all__ = ["CpuTier", "Outcome", "Reservation"]


@dataclass
class _Traffic:
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
        changes: what becomes visible here, and what goes, is noted there.
        admission: which computed chunk is let in; all if None.
        quota: bytes that a tenant's chunks may take; None without a limit.
        pinned: chunks that are not evicted.
    """

    name = "cpu"

    def __init__(
        self,
        allocator: ChunkAllocator,
        policy: EvictionPolicy[CacheEngineKey],
        lease_timeout_s: float,
        state: Callable[[], str] = lambda: "Ready",
        clock: Callable[[], float] = time.monotonic,
        changes: ChangeLog | None = None,
        *,
        admission: AdmissionPolicy[CacheEngineKey] | None = None,
        quota: Callable[[bytes], int | None] = lambda tenant: None,
        pinned: Callable[[CacheEngineKey], bool] = lambda key: False,
    ) -> None:
        self._allocator = allocator
        self._pinned = pinned
        self._state = state
        self._changes = changes
        self._lock = threading.RLock()
        self._leases: LeaseBook[CacheEngineKey, Entry] = LeaseBook(self._lease_ended, lease_timeout_s, clock)
        self._room = Room(allocator, policy, admission, quota, pinned, self._leases.held, self._note_gone)
        self._index = self._room.index.entries
        self._writing: dict[CacheEngineKey, Entry] = {}
        self._claims = Claims(self._writing)
        self._traffic = _Traffic()

    @property
    def shape(self) -> KVShape:
        """Of a chunk."""
        return self._allocator.shape

    # Writing what is computed

    def reserve(
        self, key: CacheEngineKey, num_tokens: int, tenant: bytes = NO_TENANT, parent: bytes = NO_PARENT
    ) -> Reservation:
        """Memory for a chunk of `num_tokens` tokens, evicting others if need be.

        Args:
            tenant: 16 bytes, whose it is.
            parent: 16 bytes, the hash of the chunk before it in its chain.
        """
        with self._lock:
            if key in self._index:
                return PRESENT
            fetched = self._writing.get(key)
            if fetched is not None and fetched.source == HOST:
                return IN_FLIGHT
            entry = self._room.take(key, num_tokens, tenant, parent, admitted=False)
            if isinstance(entry, Refusal):
                return REFUSED[entry] if fetched is None else IN_FLIGHT
            if fetched is not None:
                # Computed sooner than fetched, perhaps from a tier that hangs: what arrives there is dropped.
                entry.claims, fetched.claims = fetched.claims, None
                self._room.disown(key, fetched)
            self._writing[key] = entry
            leaving = self._room.make_way()
        self._demote(leaving)
        return Reservation(Outcome.RESERVED, entry.obj)

    def publish(self, keys: Iterable[CacheEngineKey], seconds: float = 0.0) -> list[CacheEngineKey]:
        """Makes reserved chunks visible: their bytes are complete. A chunk cleared meanwhile is dropped.

        Args:
            seconds: what the copy took, for the statistics.

        Returns:
            Those that are visible now.

        Raises:
            KeyError: a key that is not reserved.
        """
        with self._lock:
            shown = []
            for key in keys:
                entry = self._writing.pop(key)
                self._traffic.write_bytes += entry.obj.nbytes
                if self._show(key, entry):
                    shown.append(key)
            self._traffic.write_seconds += seconds
            return shown

    def abandon(self, keys: Iterable[CacheEngineKey]) -> None:
        """Gives reserved memory back unseen. Raises KeyError for a key that is not reserved."""
        with self._lock:
            for key in keys:
                self._give_back(key, self._writing.pop(key))

    # Fetching from below

    def claim(
        self, key: CacheEngineKey, num_tokens: int, owner: str, tenant: bytes, parent: bytes, source: int
    ) -> Reservation:
        """A chunk that `owner` waits for: leased to it at once where it is `PRESENT`, else as soon as it is
        visible. Where it is `RESERVED` the caller reads it from the tier `source` and ends with `arrived` or
        `failed`. `FULL` and `DECLINED` leave nothing."""
        with self._lock:
            if key in self._index:
                self._lease(owner, [key])
                return PRESENT
            entry = self._writing.get(key)
            leaving: list[CacheEngineKey] = []
            reservation = IN_FLIGHT
            if entry is None:
                taken = self._room.take(key, num_tokens, tenant, parent, source, admitted=True)
                if isinstance(taken, Refusal):
                    return REFUSED[taken]
                entry = self._writing[key] = taken
                leaving = self._room.make_way()
                reservation = Reservation(Outcome.RESERVED, entry.obj)
            if entry.visible:
                self._claims.add(owner, key)
        self._demote(leaving)
        return reservation

    def wanted(self, key: CacheEngineKey, obj: MemoryObj) -> bool:
        """Whether anybody waits for a chunk that is to be read into `obj`."""
        with self._lock:
            entry = self._writing.get(key)
            return entry is not None and entry.obj is obj and entry.visible and bool(entry.claims)

    def arrived(self, key: CacheEngineKey, obj: MemoryObj) -> bool:
        """The chunk is in `obj`: visible from now on and leased to all who wait for it. False where it was
        computed or cleared meanwhile; its memory is free then."""
        with self._lock:
            entry = self._writing.get(key)
            if entry is None or entry.obj is not obj:
                self._allocator.free(obj)
                return False
            del self._writing[key]
            return self._show(key, entry)

    def failed(self, key: CacheEngineKey, obj: MemoryObj) -> None:
        """The chunk did not come."""
        with self._lock:
            entry = self._writing.get(key)
            if entry is None or entry.obj is not obj:
                self._allocator.free(obj)
            else:
                del self._writing[key]
                self._give_back(key, entry)

    def standing(self, owner: str, keys: Sequence[CacheEngineKey], start: int, end: int) -> tuple[int, bool]:
        """How many leading keys the owner has leased, those before `start` taken as leased, and whether the
        next one, before `end`, is on its way to it."""
        with self._lock:
            while start < end and self._leases.get(owner, keys[start]) is not None:
                start += 1
            return start, start < end and self._claims.has(owner, keys[start])

    # Reading

    def __contains__(self, key: object) -> bool:
        """Visible."""
        return key in self._index

    def lookup(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many of the keys, from the first on without a gap, are visible."""
        with self._lock:
            return self._prefix(keys)

    def lookup_and_lease(self, keys: Sequence[CacheEngineKey], owner: str) -> int:
        """As `lookup`; what is found is leased to `owner` and counts as used now."""
        return self.lease_from(keys, owner, 0)[0]

    def lease_from(self, keys: Sequence[CacheEngineKey], owner: str, skip: int) -> tuple[int, int]:
        """As `lookup_and_lease` for who needs nothing of the first `skip` chunks, there or not: how many
        leading chunks are there if those are, and how many are there without a gap."""
        with self._lock:
            self._expire()
            self._room.asked_for(keys)
            found = skip + self._prefix(keys[skip:])
            if found > skip:
                self._lease(owner, keys[skip:found])
            self._room.touch([key for key in reversed(keys[:skip]) if key in self._index])
            stored = self._prefix(keys[:skip]) if skip else found
            return found, found if stored == skip else stored

    def leased(self, keys: Sequence[CacheEngineKey], owner: str) -> list[MemoryObj]:
        """The chunks of the owner's lease, from the first key on up to the first that it does not hold."""
        with self._lock:
            return [entry.obj for entry in self._leases.prefix(owner, keys)]

    def hand_over(self, owner: str, to: str) -> None:
        """The owner's lease is `to`'s from now on: nobody else who names the owner ends it. What the owner
        still waited for it waits for no more."""
        with self._lock:
            self._claims.drop(owner)
            self._leases.hand_over(owner, to)

    def release(self, owner: str) -> int:
        """Ends the owner's lease and claims; the number of chunks that it had leased."""
        with self._lock:
            self._claims.drop(owner)
            return self._leases.end(owner)

    def release_where(self, ended: Callable[[str], bool]) -> int:
        """Ends the leases and claims of all owners that `ended` says so of; the number of leases."""
        with self._lock:
            self._claims.drop_where(ended)
            return self._leases.end_where(ended)

    def count_read(self, num_bytes: int, seconds: float, tokens: int) -> None:
        """Adds a finished load to the statistics."""
        with self._lock:
            self._traffic.read_bytes += num_bytes
            self._traffic.read_seconds += seconds
            self._traffic.hit_tokens += tokens

    # Writing to tiers below

    def lend(self, key: CacheEngineKey, owner: str) -> StoredObject | None:
        """The chunk as an object to write, leased to `owner`, who has no other, until it is released; None if
        it is not here any more. It does not count as used."""
        with self._lock:
            entry = self._index.get(key)
            if entry is None:
                return None
            self._leases.take(owner, [(key, entry)])
            self._leases.hand_over(owner, owner)  # the lease has no deadline then
            payload = entry.obj.buffer.toreadonly()
            return StoredObject(key, entry.obj.num_tokens, payload, entry.tenant, entry.parent)

    def newest_chains(self) -> list[CacheEngineKey]:
        """All visible keys, those of the chains that grew last first, each chain from its start on."""
        with self._lock:
            return self._room.index.newest_chains()

    def lacking(self, keys: Iterable[CacheEngineKey], tiers: int) -> list[CacheEngineKey]:
        """Those of the visible keys that not all of the tiers below (bits) have taken."""
        with self._lock:
            return [key for key in keys if key in self._index and self._index[key].below & tiers != tiers]

    def taken_below(self, key: CacheEngineKey, tier: int) -> None:
        """A tier below (its bit) has the chunk."""
        with self._lock:
            entry = self._index.get(key)
            if entry is not None:
                entry.below |= tier

    def lost_below(self, tier: int, scope: ClearScope) -> None:
        """A tier below (its bit) has nothing of the scope any more."""
        with self._lock:
            for key, entry in self._index.items():
                if scope.covers(key, entry.tenant):
                    entry.below &= ~tier

    def left(self, key: CacheEngineKey) -> None:
        """A chunk that was to leave is written below, or cannot be: it goes, unless it was asked for."""
        with self._lock:
            self._room.left(key)

    # Upkeep

    def set_demotion(self, demotion: Demotion | None) -> None:
        """Where evicted chunks go from now on; nowhere if None."""
        self._room.demotion = demotion

    def set_policies(
        self, policy: EvictionPolicy[CacheEngineKey], admission: AdmissionPolicy[CacheEngineKey] | None
    ) -> None:
        """New policies, which know nothing yet: chunks count as used in the order in which they came."""
        with self._lock:
            self._room.set_policies(policy, admission)

    def resize(self, num_bytes: int) -> int:
        """Uses at most so many bytes from now on; how many that are, since the region has no more than it
        has. What is under a lease goes when that has ended."""
        with self._lock:
            self._room.resize(num_bytes)
            return self._room.limit

    def behind(self, scope: ClearScope) -> ClearScope:
        """The scope, and where it names keys also those of all that continues them here."""
        if scope.keys is None:
            return scope
        with self._lock:
            return replace(scope, keys=self._room.index.with_all_behind(scope.keys))

    def clear(self, scope: ClearScope) -> Cleared:
        """Makes all in the scope invisible at once, chunks that are being written included."""
        with self._lock:
            removed = removed_bytes = kept = 0
            for key, entry in [item for item in self._index.items() if scope.covers(item[0], item[1].tenant)]:
                size = entry.obj.nbytes
                if not scope.pinned_too and self._pinned(key):
                    kept += 1
                elif self._room.remove(key):
                    removed, removed_bytes = removed + 1, removed_bytes + size
                else:
                    kept += 1
            for key, entry in self._writing.items():
                if scope.covers(key, entry.tenant) and (scope.pinned_too or not self._pinned(key)):
                    kept += entry.visible
                    entry.visible = False
            return Cleared(removed, removed_bytes, kept)

    def stats(self) -> TierStats:
        with self._lock:
            self._expire()
            traffic, count = self._traffic, self._room.count
            return TierStats(
                name=self.name,
                state=self._state(),
                capacity_bytes=self._room.limit,
                used_bytes=self._allocator.used_bytes,
                objects=len(self._index),
                leases=len(self._leases),
                evictions=count.evictions,
                rejected=count.rejected,
                declined=count.declined,
                hit_tokens=traffic.hit_tokens,
                read_bytes=traffic.read_bytes,
                read_seconds=traffic.read_seconds,
                write_bytes=traffic.write_bytes,
                write_seconds=traffic.write_seconds,
            )

    @property
    def unsaved(self) -> int:
        """Chunks evicted before the tier below that takes what leaves had taken them."""
        return self._room.count.unsaved

    def close(self) -> None:
        """Frees everything. Nothing may copy to or from its memory any more."""
        with self._lock:
            self._room.index.clear()
            self._writing.clear()
            self._allocator.close()

    # Under the lock

    def _prefix(self, keys: Sequence[CacheEngineKey]) -> int:
        for count, key in enumerate(keys):
            if key not in self._index:
                return count
        return len(keys)

    def _lease(self, owner: str, keys: Sequence[CacheEngineKey]) -> None:
        """Leases visible chunks, which are used now."""
        self._leases.take(owner, ((key, self._index[key]) for key in keys))
        # The end of a chain is of no use without its start: touched last, the start leaves last.
        self._room.touch(reversed(keys))

    def _show(self, key: CacheEngineKey, entry: Entry) -> bool:
        """Makes a written chunk visible, and leases it to those who wait for it."""
        if not entry.visible:
            self._give_back(key, entry)
            return False
        self._room.show(key, entry)
        if self._changes is not None:
            self._changes.add(self.name, key, stored=True)
        for owner in self._claims.end(key, entry):
            self._leases.take(owner, [(key, entry)])
        return True

    def _give_back(self, key: CacheEngineKey, entry: Entry) -> None:
        """Frees the memory of a chunk that is not shown: nobody waits for it any more."""
        self._claims.end(key, entry)
        self._room.give_back(key, entry)

    def _expire(self) -> None:
        for owner in self._leases.expire():
            self._claims.drop(owner)

    def _note_gone(self, key: CacheEngineKey) -> None:
        if self._changes is not None:
            self._changes.add(self.name, key, stored=False)

    def _lease_ended(self, key: CacheEngineKey, entry: Entry) -> None:
        if not entry.visible:
            self._allocator.free(entry.obj)

    def _demote(self, leaving: list[CacheEngineKey]) -> None:
        """Not under the lock."""
        demotion = self._room.demotion
        if leaving and demotion is not None:
            demotion.demote(leaving)
