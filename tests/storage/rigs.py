# SPDX-License-Identifier: Apache-2.0
"""A storage manager over the real host tier and doubles of tiers below it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcache.memory.allocator import ChunkAllocator, KVShape
from kvcache.memory.region import HostRegion
from kvcache.storage.fetch import Query, Standing
from kvcache.storage.lane import Lane
from kvcache.storage.manager import StorageManager
from kvcache.storage.pins import PinBook
from kvcache.storage.policies import LRUPolicy
from kvcache.storage.tier import NO_PARENT, NO_TENANT
from kvcache.storage.tiers.cpu import CpuTier, Outcome
from kvcache.tokens.keys import CacheEngineKey
from tests.storage.doubles import DoubleTier, Held

SHAPE = KVShape(num_layers=2, kv_planes=2, hidden=32, dtype=torch.float32, chunk_tokens=16)
CHUNK = SHAPE.chunk_tokens


def chain(name: str, length: int, rank: int = 0) -> list[CacheEngineKey]:
    """Keys of a prompt's chunks."""
    return [
        CacheEngineKey(f"{name}{at}".encode().ljust(16, b".")[:16], bytes(16), rank) for at in range(length)
    ]


def parent_of(keys: Sequence[CacheEngineKey], at: int) -> bytes:
    return keys[at - 1].chunk_hash if at else NO_PARENT


def payload_of(key: CacheEngineKey, num_tokens: int = CHUNK) -> bytes:
    """What the chunk's KV is."""
    unit = key.chunk_hash + bytes([key.rank])
    size = num_tokens * SHAPE.token_bytes
    return (unit * (size // len(unit) + 1))[:size]


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Rig:
    """What is handed to the background runs when `work` is called."""

    tiers: Sequence[DoubleTier] = ()
    slots: int = 8
    write: str = "Through"
    clock: Clock = field(default_factory=Clock)
    lane: dict[str, Any] = field(default_factory=dict)
    cpu: dict[str, Any] = field(default_factory=dict)
    manager: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.soon: deque[Callable[[], None]] = deque()
        allocator = ChunkAllocator(HostRegion(self.slots * SHAPE.chunk_bytes, pin="Disabled"), SHAPE)
        self.pins = PinBook(lambda: self.slots // 2)
        self.tier = CpuTier(
            allocator, LRUPolicy(8), 1e9, clock=time.monotonic, pinned=self.pins.pinned, **self.cpu
        )
        self.allocator = allocator
        lanes = [
            Lane(index, tier, **{"write": self.write, "clock": self.clock, **self.lane})
            for index, tier in enumerate(self.tiers)
        ]
        more = {"run_soon": self.soon.append, **self.manager}
        self.storage = StorageManager(self.tier, lanes, pins=self.pins, clock=self.clock, **more)

    def work(self) -> None:
        while self.soon:
            self.soon.popleft()()

    def store(
        self,
        keys: Sequence[CacheEngineKey],
        first: int = 0,
        last: int | None = None,
        tenant: bytes = NO_TENANT,
    ) -> list[Outcome]:
        """Computes chunks `[first, last)` of a prompt."""
        outcomes, done = [], []
        for at in range(first, len(keys) if last is None else last):
            outcome, obj = self.tier.reserve(keys[at], CHUNK, tenant, parent_of(keys, at))
            outcomes.append(outcome)
            if obj is not None:
                obj.buffer[:] = payload_of(keys[at])
                done.append(keys[at])
        self.storage.publish(done, 0.0)
        return outcomes

    def below(self, tier: DoubleTier, keys: Sequence[CacheEngineKey], tenant: bytes = NO_TENANT) -> None:
        """The tier has these chunks."""
        for at, key in enumerate(keys):
            tier.objects[key] = Held(payload_of(key), CHUNK, tenant, parent_of(keys, at))

    def begin(self, owner: str, keys: Sequence[CacheEngineKey], **more: Any) -> Standing:
        return self.storage.begin_lookup(owner, Query(keys, len(keys) * CHUNK, **more))

    def check_leased(self, owner: str, keys: Sequence[CacheEngineKey]) -> None:
        """The owner holds these chunks, and they are what they should be."""
        objs = self.tier.leased(keys, owner)
        assert len(objs) == len(keys)
        for key, obj in zip(keys, objs, strict=True):
            assert bytes(obj.buffer) == payload_of(key)

    def check_clean(self) -> None:
        """Nothing is leased, claimed or lost; then everything is closed."""
        self.work()
        for tier in self.tiers:
            tier.answer_all()
            self.work()
        stats = self.tier.stats()
        assert stats.leases == 0
        assert self.allocator.num_objects == stats.objects
        assert not self.tier._writing
        assert len(self.tier._claims) == 0
        assert not self.storage._fetcher._searches
        assert all(lane.queued_bytes == 0 for lane in self.storage.lanes)
        assert all(writer.pending_bytes == 0 for writer in self.storage._writers)
        self.storage.close()
        assert all(tier.closed for tier in self.tiers)
