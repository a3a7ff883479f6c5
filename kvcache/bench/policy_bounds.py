# SPDX-License-Identifier: Apache-2.0
"""What no policy surpasses: a cache that knows the future, and one without an end."""

from __future__ import annotations

import heapq

from kvcache.bench.policy import Replayed, Trace

_NEVER = 1 << 60


def clairvoyant(trace: Trace, capacity: int) -> Replayed:
    """What is used again last leaves first, of equals the deepest in its chain (Belady, A study of
    replacement algorithms for a virtual-storage computer, 1966). What will not be used again is not stored.

    No block is used again before the one before it, so that chains leave from their ends.
    """
    next_uses = _next_uses(trace)
    here: dict[int, int] = {}
    """Block to the request that uses it next."""
    latest: list[tuple[int, int, int]] = []
    """Heap of negated next use, negated depth, and block; those that `here` does not confirm are outdated."""
    hits = writes = 0
    for request, coming in zip(trace.requests, next_uses, strict=True):
        found = next((place for place, block in enumerate(request) if block not in here), len(request))
        hits += found
        new = set()
        for depth, (block, use) in enumerate(zip(request, coming, strict=True)):
            here[block] = use
            heapq.heappush(latest, (-use, -depth, block))
            if depth >= found:
                new.add(block)
        while latest and (len(here) > capacity or latest[0][0] == -_NEVER):
            use, _, block = heapq.heappop(latest)
            if here.get(block) == -use:
                del here[block]
                new.discard(block)
        writes += len(new)
    return Replayed(trace.reads, hits, writes)


def unbounded(trace: Trace) -> Replayed:
    """A cache that keeps everything."""
    return Replayed(trace.reads, trace.reads - trace.blocks, trace.blocks)


def _next_uses(trace: Trace) -> list[list[int]]:
    """For each block of each request, the number of the next request that uses it."""
    coming: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        request = trace.requests[number]
        uses.append([coming.get(block, _NEVER) for block in request])
        coming.update(dict.fromkeys(request, number))
    return uses[::-1]
