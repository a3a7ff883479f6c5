# SPDX-License-Identifier: Apache-2.0
"""What an allocate/free pair costs, with few and with many chunks in the region, and what a chunk costs the
index."""

from __future__ import annotations

import random
import secrets
import time
import tracemalloc
from dataclasses import dataclass

import torch

from kvcache.memory.allocator import ChunkAllocator, KVShape
from kvcache.memory.objects import MemoryObj
from kvcache.memory.region import HostRegion
from kvcache.storage.policies import ADMISSIONS, POLICIES
from kvcache.storage.tier import NO_PARENT
from kvcache.storage.tiers.cpu import CpuTier
from kvcache.tokens.keys import CacheEngineKey

_SHAPE = KVShape(num_layers=1, kv_planes=2, hidden=32, dtype=torch.float32, chunk_tokens=16)
"""4 KiB a chunk: a million of them take address space only, since nothing is written."""

_BATCH = 2_000


@dataclass(frozen=True)
class AllocResult:
    """Nanoseconds, the least over batches: others on the machine only add to it. All but one chunk of the
    region are taken.
    """

    chunks: int
    pair_ns: float
    """A chunk is allocated and freed."""
    random_pair_ns: float
    """A random chunk is freed and one allocated: with many chunks, mostly misses of the processor's cache."""
    random_touch_ns: float
    """The same objects without an allocator: what belongs to Python's memory of the pair above."""


def alloc_results(
    counts: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000), pairs: int = 200_000
) -> list[AllocResult]:
    """One result for each number of chunks."""
    return [_measure(count, pairs) for count in counts]


def _measure(count: int, pairs: int) -> AllocResult:
    region = HostRegion(count * _SHAPE.chunk_bytes, pin="Disabled", populate=False)
    allocator = ChunkAllocator(region, _SHAPE)
    live = [_full_chunk(allocator) for _ in range(count - 1)]
    pair: list[float] = []
    random_pair: list[float] = []
    random_touch: list[float] = []
    for _ in range(pairs // _BATCH):
        start = time.perf_counter()
        for _ in range(_BATCH):
            allocator.free(_full_chunk(allocator))
        pair.append((time.perf_counter() - start) / _BATCH * 1e9)
        picks = [random.randrange(len(live)) for _ in range(_BATCH)]  # noqa: S311 -- no secret
        start = time.perf_counter()
        for pick in picks:
            allocator.free(live[pick])
            live[pick] = _full_chunk(allocator)
        random_pair.append((time.perf_counter() - start) / _BATCH * 1e9)
        picks = [random.randrange(len(live)) for _ in range(_BATCH)]  # noqa: S311
        start = time.perf_counter()
        for pick in picks:
            live[pick] = MemoryObj(allocator, live[pick]._offset, 1, _SHAPE.chunk_tokens)
        random_touch.append((time.perf_counter() - start) / _BATCH * 1e9)
    allocator.close()
    return AllocResult(count, min(pair), min(random_pair), min(random_touch))


def _full_chunk(allocator: ChunkAllocator) -> MemoryObj:
    obj = allocator.allocate(_SHAPE.chunk_tokens)
    if obj is None:
        raise RuntimeError("the region has no room for the chunks that it was made for")
    return obj


@dataclass(frozen=True)
class MetadataResult:
    """Bytes of metadata of a chunk in host memory."""

    eviction: str
    admission: str
    chunks: int
    object_bytes: float
    """Of the memory object alone."""
    index_bytes: float
    """With its key, its place in the index and in its chain, and what the policies know of it."""


def metadata_results(chunks: int = 50_000) -> list[MetadataResult]:
    """The plainest policies, and the default ones. All chunks are of conversations of 64 chunks."""
    return [_index(chunks, *policies) for policies in (("LRU", "Always"), ("Adaptive", "Adaptive"))]


def _index(chunks: int, eviction: str, admission: str) -> MetadataResult:
    def fresh() -> ChunkAllocator:
        region = HostRegion(chunks * _SHAPE.chunk_bytes, pin="Disabled", populate=False)
        return ChunkAllocator(region, _SHAPE)

    alone = fresh()
    before = _traced()
    objs = [_full_chunk(alone) for _ in range(chunks)]
    of_objects = _traced() - before
    del objs
    alone.close()

    admit = None if admission == "Always" else ADMISSIONS[admission](chunks)
    tier = CpuTier(fresh(), POLICIES[eviction](chunks), 60.0, admission=admit)
    namespace = secrets.token_bytes(16)
    before = _traced()
    chunk_hash = NO_PARENT
    for at in range(chunks):
        parent, chunk_hash = chunk_hash if at % 64 else NO_PARENT, secrets.token_bytes(16)
        key = CacheEngineKey(chunk_hash, namespace, 0)
        tier.reserve(key, _SHAPE.chunk_tokens, parent=parent)
        tier.publish([key])
    of_index = _traced() - before
    tier.close()
    tracemalloc.stop()
    return MetadataResult(eviction, admission, chunks, of_objects / chunks, of_index / chunks)


def _traced() -> int:
    """Bytes that Python holds now; traced from the first call on."""
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    return tracemalloc.get_traced_memory()[0]
