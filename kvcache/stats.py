# SPDX-License-Identifier: Apache-2.0
"""Snapshots of what the cache has done, as they travel from the ranks and the scheduler to the admin sidecar.

Counters only grow while a process lives; gauges are the value at the time of the snapshot. Bytes and seconds
are the units everywhere. The structs are plain data: the engine fills them, `kvcache.control` carries them
and `kvcache.admin` and `kvcache.observability` read them.
"""

from __future__ import annotations

import msgspec


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of one rank."""

    name: str
    """`cpu`, later `disk`, `remote`."""
    state: str
    """`Ready`, or the reason why not in CamelCase (`Pinning` is still serving)."""
    capacity_bytes: int
    used_bytes: int
    objects: int
    leases: int
    """Leases held now: a chunk under a lease is not evicted."""
    evictions: int
    rejected: int
    """Chunks that found no room, since everything else was under a lease."""
    hit_tokens: int
    read_bytes: int
    read_seconds: float
    write_bytes: int
    write_seconds: float


class WayStats(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank's bytes cross the link in one direction: chosen by measurement when it started."""

    direction: str
    """`store`, `load`, or `quiet_load`: a load that the request waits for outside of the batch."""
    way: str
    """`host`, `staged`, `direct` or `strided_dma`."""
    multiprocessors: int
    """Of the GPU, that the way keeps busy; 0 without a kernel."""
    bytes_per_second: float
    """Measured; 0 where nothing was measured, as on the CPU."""
    link_bytes_per_second: float
    """A plain page-locked copy in the same run."""


class RankStats(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process (one rank of tensor x pipeline parallelism)."""

    rank: int
    pid: int
    ready: bool
    """KV caches are registered and a put and a get went through the connector."""
    reason: str
    """Why it is not ready or caches nothing; empty when ready."""
    transfer_path: str
    """Which way the bytes go: `cuda`, `host`, or `none`."""
    namespace: str
    """Hex digest of all that must be equal for two KVs to be interchangeable."""
    stored_tokens: int
    loaded_tokens: int
    load_failed_tokens: int
    failures: dict[str, int]
    """Reason in CamelCase to count: everything that a guard caught or a request lost."""
    tiers: list[TierStats]
    ways: list[WayStats] = []


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler process: where each prompt token came from.

    `hit_gpu_tokens + sum(hit_cache_tokens.values()) + computed_tokens == prompt_tokens` always holds.
    """

    pid: int
    ready: bool
    reason: str
    requests: int
    """Requests that were scheduled at least once."""
    prompt_tokens: int
    hit_gpu_tokens: int
    """Found in vLLM's own prefix cache."""
    hit_cache_tokens: dict[str, int]
    """Given back by this cache, by tier."""
    computed_tokens: int
    lookups: int
    lookup_seconds: float
    lookup_timeouts: int
    failures: dict[str, int]
