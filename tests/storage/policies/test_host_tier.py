# SPDX-License-Identifier: Apache-2.0
"""The tier of the replay against the real one in host memory: the same hits, the same chunks stored."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kvcache.bench.policy import ALWAYS, ReplayTier, Trace
from kvcache.bench.policy_traces import synthetic_trace
from kvcache.memory.allocator import ChunkAllocator, KVShape
from kvcache.memory.region import HostRegion
from kvcache.storage.policies import ADMISSIONS, POLICIES
from kvcache.storage.tier import NO_PARENT, NO_TENANT
from kvcache.storage.tiers.cpu import CpuTier, Outcome
from kvcache.tokens.keys import CacheEngineKey

SHAPE = KVShape(num_layers=2, kv_planes=2, hidden=32, dtype=torch.float16, chunk_tokens=16)
SLOTS = 48


def serve(tier: CpuTier, keys: list[CacheEngineKey]) -> tuple[int, int]:
    """A request as the engine serves it; the chunks that were hits, and those that were stored."""
    found = tier.lookup_and_lease(keys, "request")
    stored = []
    parents = [NO_PARENT, *(key.chunk_hash for key in keys)]
    for key, parent in list(zip(keys, parents, strict=False))[found:]:
        outcome = tier.reserve(key, SHAPE.chunk_tokens, NO_TENANT, parent)[0]
        if outcome is not Outcome.RESERVED:
            break
        stored.append(key)
    tier.publish(stored)
    tier.release("request")
    return found, len(stored)


@pytest.mark.parametrize("admission", [ALWAYS, *ADMISSIONS])
@pytest.mark.parametrize("eviction", POLICIES)
def test_same_hits_and_stores(eviction: str, admission: str) -> None:
    trace = Trace(synthetic_trace("tenants", random.randrange(1_000))[:150])

    def admits() -> Any:
        return None if admission == ALWAYS else ADMISSIONS[admission](SLOTS)

    replayed = ReplayTier(trace, SLOTS, POLICIES[eviction](SLOTS), admits())
    allocator = ChunkAllocator(HostRegion(SLOTS * SHAPE.chunk_bytes, pin="Disabled"), SHAPE)
    assert allocator.capacity_bytes == SLOTS * SHAPE.chunk_bytes
    tier = CpuTier(allocator, POLICIES[eviction](SLOTS), 1e9, admission=admits())
    keys = [CacheEngineKey(key, bytes(16), 0) for key in trace.keys]
    served = []
    for request in trace.requests:
        served.append(serve(tier, [keys[block] for block in request]))
        assert served[-1] == replayed.serve(request)
        assert {key for key in keys if key in tier} == {keys[block] for block in replayed.here}
    assert sum(hits for hits, _ in served) > 0
    assert tier.stats().objects == len(replayed.here)
    tier.close()
