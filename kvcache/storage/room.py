# SPDX-License-Identifier: Apache-2.0
"""Room for chunks in host memory: who is let in, and who makes way for whom.

What decides: the admission policy, the tenant's quota, the eviction policy, and that nothing leaves that is
leased, pinned, or has others of its chain behind it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvcache.memory.allocator import ChunkAllocator
from kvcache.memory.objects import MemoryObj
from kvcache.storage.plan import HOST
from kvcache.storage.policies import AdmissionPolicy, EvictionPolicy
from kvcache.storage.residents import Entry, Residents
from kvcache.tokens.keys import CacheEngineKey


class Refusal(enum.Enum):
    """Why there is no room."""

    FULL = enum.auto()
    """Everything else is leased, pinned or being written."""
    DECLINED = enum.auto()
    """By the admission policy or the tenant's quota."""


@dataclass(frozen=True)
class Demotion:
    """What becomes of evicted chunks where a tier below takes them.

    Args:
        tiers: bits of those tiers.
        ahead_bytes: kept free, so that there is memory while what was in it before is still being written.
        demote: called with chunks that are to leave, outside of all locks; `CpuTier.left` ends each.
    """

    tiers: int
    ahead_bytes: int
    demote: Callable[[list[CacheEngineKey]], None]


@dataclass
class RoomCounters:
    evictions: int = 0
    rejected: int = 0
    declined: int = 0
    unsaved: int = 0
    """Evicted before the tier below that takes what leaves had taken them."""


class Room:
    """Not thread-safe: its owner has a lock.

    Args:
        allocator: of the memory.
        policy: who leaves first.
        admission: which computed chunk is let in; all if None.
        quota: bytes that a tenant's chunks may take; None without a limit.
        pinned: chunks that stay.
        leased: entries that stay.
        gone: called with each key that is not here any more.
    """

    def __init__(
        self,
        allocator: ChunkAllocator,
        policy: EvictionPolicy[CacheEngineKey],
        admission: AdmissionPolicy[CacheEngineKey] | None,
        quota: Callable[[bytes], int | None],
        pinned: Callable[[CacheEngineKey], bool],
        leased: Callable[[Entry], bool],
        gone: Callable[[CacheEngineKey], None],
    ) -> None:
        self.allocator = allocator
        self.index = Residents(lambda key: self._policy.became_leaf(key))
        self.limit = allocator.capacity_bytes
        """Bytes that may be used, at most those that there are."""
        self.demotion: Demotion | None = None
        self.count = RoomCounters()
        self._policy = policy
        self._admission = admission
        self._quota = quota
        self._pinned = pinned
        self._leased = leased
        self._gone = gone
        self._usage: Counter[bytes] = Counter()
        """Bytes of each tenant's chunks, visible or being written."""
        self._leaving_bytes = 0

    # In

    def take(
        self,
        key: CacheEngineKey,
        num_tokens: int,
        tenant: bytes,
        parent: bytes,
        source: int = HOST,
        *,
        admitted: bool,
    ) -> Entry | Refusal:
        """Memory for a chunk, evicting others if need be. It counts as the tenant's, and its chain stays,
        until `give_back`, or until the chunk is removed after it was shown.

        Args:
            source: where it comes from.
            admitted: the admission policy is not asked.
        """
        admission = None if admitted else self._admission
        if admission is not None and not admission.admits(key, None):
            return self._refused(Refusal.DECLINED)
        # Its own chain does not make way: the chunk could not be hit without that.
        self.index.expect(key, parent)
        memory = self._memory(key, num_tokens, tenant, admission)
        if isinstance(memory, Refusal):
            self.index.expect_no_more(key, parent)
            return self._refused(memory)
        self._charge(tenant, memory.nbytes)
        return Entry(memory, tenant, parent, source)

    def disown(self, key: CacheEngineKey, entry: Entry) -> None:
        """The memory of a chunk that will not be shown counts as nobody's from now on."""
        self.index.expect_no_more(key, entry.parent)
        self._charge(entry.tenant, -entry.obj.nbytes)

    def give_back(self, key: CacheEngineKey, entry: Entry) -> None:
        """Frees the memory of a chunk that will not be shown."""
        self.disown(key, entry)
        self.allocator.free(entry.obj)

    def show(self, key: CacheEngineKey, entry: Entry) -> None:
        """The chunk is complete."""
        self.index.add(key, entry)
        self._policy.admit(key)

    def asked_for(self, keys: Iterable[CacheEngineKey]) -> None:
        """A request uses the chunks: finds them, or computes and then offers them."""
        if self._admission is not None:
            self._admission.seen_all(keys)

    def touch(self, keys: Iterable[CacheEngineKey]) -> None:
        """Chunks that are here are used, in this order: none of them leaves, if it was to."""
        entries, stayed = self.index.entries, []
        for key in keys:
            entry = entries[key]
            if entry.leaving:
                self._leaving_bytes -= entry.obj.nbytes
                self.index.stay(key)
                self._policy.admit(key)
            else:
                stayed.append(key)
        self._policy.touch_all(stayed)

    # Out

    def remove(self, key: CacheEngineKey) -> bool:
        """Takes a chunk out; True if its memory is free at once, not when its readers end."""
        if not self.index.entries[key].leaving:
            self._policy.remove(key)
        return self._take_out(key)

    def left(self, key: CacheEngineKey) -> None:
        """A chunk that was to leave goes, unless it was used meanwhile."""
        entry = self.index.entries.get(key)
        if entry is not None and entry.leaving:
            self.count.evictions += 1
            self._take_out(key)

    def make_way(self) -> list[CacheEngineKey]:
        """Chunks that leave so that memory is free ahead of need. Those that are below already are gone."""
        leaving: list[CacheEngineKey] = []
        demotion = self.demotion
        if demotion is None:
            return leaving
        while self.limit - self.allocator.used_bytes + self._leaving_bytes < demotion.ahead_bytes:
            victim = self._policy.victim(self._evictable)
            if victim is None:
                break
            if self.index.entries[victim].below & demotion.tiers == demotion.tiers:
                self.count.evictions += 1
                self._take_out(victim)
            else:
                self._leaving_bytes += self.index.leave(victim).obj.nbytes
                leaving.append(victim)
        return leaving

    # Upkeep

    def resize(self, num_bytes: int) -> None:
        """Evicts what there is no room for any more; what is leased goes when it may."""
        self.limit = min(num_bytes, self.allocator.capacity_bytes)
        while self.allocator.used_bytes > self.limit and self._evict() is None:
            pass

    def set_policies(
        self, policy: EvictionPolicy[CacheEngineKey], admission: AdmissionPolicy[CacheEngineKey] | None
    ) -> None:
        """New policies, which know nothing yet: chunks count as used in the order in which they came."""
        for key, entry in self.index.entries.items():
            if not entry.leaving:
                policy.admit(key)
        self._policy, self._admission = policy, admission

    def _memory(
        self,
        key: CacheEngineKey,
        num_tokens: int,
        tenant: bytes,
        admission: AdmissionPolicy[CacheEngineKey] | None,
    ) -> MemoryObj | Refusal:
        refusal = self._make_room_in_quota(tenant, num_tokens * self.allocator.shape.token_bytes)
        memory = None
        while refusal is None:
            memory = memory or self.allocator.allocate(num_tokens)
            if memory is not None and self.allocator.used_bytes <= self.limit:
                return memory
            refusal = self._evict(candidate=key, admission=admission)
            admission = None  # it is worth its first victim
        if memory is not None:
            self.allocator.free(memory)
        return refusal

    def _make_room_in_quota(self, tenant: bytes, num_bytes: int) -> Refusal | None:
        """A tenant gives up chunks of its own first."""
        quota = self._quota(tenant)
        while quota is not None and self._usage[tenant] + num_bytes > quota:
            if num_bytes > quota or self._evict(tenant=tenant) is not None:
                return Refusal.DECLINED
        return None

    def _charge(self, tenant: bytes, num_bytes: int) -> None:
        self._usage[tenant] += num_bytes
        if not self._usage[tenant]:
            del self._usage[tenant]  # there may be a tenant for each user

    def _refused(self, refusal: Refusal) -> Refusal:
        self.count.rejected += refusal is Refusal.FULL
        self.count.declined += refusal is Refusal.DECLINED
        return refusal

    def _evict(
        self,
        tenant: bytes | None = None,
        candidate: CacheEngineKey | None = None,
        admission: AdmissionPolicy[CacheEngineKey] | None = None,
    ) -> Refusal | None:
        """Frees a chunk's memory, or says why not.

        Args:
            tenant: whose chunk; anybody's if None.
            candidate: what it would be evicted for.
            admission: says whether that is worth it.
        """
        victim = self._policy.candidate(lambda key: self._evictable(key, tenant))
        if victim is None:
            return Refusal.FULL
        if candidate is not None and admission is not None and not admission.admits(candidate, victim):
            return Refusal.DECLINED
        self._policy.evict(victim)
        if self.demotion is not None:
            tiers = self.demotion.tiers
            self.count.unsaved += self.index.entries[victim].below & tiers != tiers
        self.count.evictions += 1
        self._take_out(victim)
        return None

    def _evictable(self, key: CacheEngineKey, tenant: bytes | None = None) -> bool:
        entry = self.index.entries[key]
        return (
            self.index.is_leaf(key)
            and not self._leased(entry)
            and not self._pinned(key)
            and (tenant is None or entry.tenant == tenant)
        )

    def _take_out(self, key: CacheEngineKey) -> bool:
        """As `remove`, of a key that the policy has dropped."""
        entry = self.index.pop(key)
        entry.visible = False
        self._charge(entry.tenant, -entry.obj.nbytes)
        if entry.leaving:
            self._leaving_bytes -= entry.obj.nbytes
        self._gone(key)
        if self._leased(entry):
            return False
        self.allocator.free(entry.obj)
        return True
