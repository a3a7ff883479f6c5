# SPDX-License-Identifier: Apache-2.0
"""What an allocate/free pair costs, with few and with many chunks in the region."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch

from kvcache.memory.allocator import ChunkAllocator, KVShape
from kvcache.memory.objects import MemoryObj
from kvcache.memory.region import HostRegion

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
    allocator.close()
    return AllocResult(count, min(pair), min(random_pair))


def _full_chunk(allocator: ChunkAllocator) -> MemoryObj:
    obj = allocator.allocate(_SHAPE.chunk_tokens)
    if obj is None:
        raise RuntimeError("the region has no room for the chunks that it was made for")
    return obj
