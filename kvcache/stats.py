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
    """`cpu`, `disk`, `remote`, or that of a plugin."""
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
    detail: str = ""
    """In words, why it is not ready."""
    pinned_objects: int = 0
    declined: int = 0
    """Chunks that the admission policy or their tenant's quota did not let in."""
    fetch_failures: int = 0
    """Objects that the tier said it had and did not give."""
    not_worth_tokens: int = 0
    """Found here, but sooner computed than fetched."""
    writes_dropped: int = 0
    """Objects that were to be written here and were not, since too much waited before them."""
    write_failures: int = 0
    fetch_latency_seconds: float = 0.0
    """Measured lately, as is the next; 0 where nothing was."""
    fetch_bytes_per_second: float = 0.0


class WayStats(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank's bytes cross the link in one direction: chosen by measurement when it started."""

    direction: str
    """`store`, `load` and `short_load`, which a step waits for, or `quiet_load`, which a request waits for
    outside of the batch."""
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
    config_digest: str = ""
    """Of the configuration file that was last taken in (`kvcache.config.live.file_digest`)."""
    config_restart: list[str] = []
    """Fields of it that wait for the next start of the process."""


class HistogramStats(msgspec.Struct, frozen=True, kw_only=True):
    """Observations counted by size."""

    bounds: list[float]
    """The largest value of each bucket, ascending; one more bucket takes what is larger."""
    counts: list[int]
    """In each bucket, one more than there are bounds."""
    sum: float
    """Of all observed values."""

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.bounds) + 1:
            raise ValueError(
                f"{len(self.counts)} buckets were read for {len(self.bounds)} bounds; one more is due"
            )


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
    lookup_waits: int = 0
    """Lookups of which more was fetched from slower tiers while their requests waited."""
    lookup_wait_seconds: float = 0.0
    """That those requests waited."""
    lookup_waits_expired: int = 0
    """Of them, those that took what was there since a tier's deadline was over."""
    first_token_seconds: dict[str, HistogramStats] = {}
    """From a request's arrival to its first token, by where its prompt came from: `hit_cache` (at least a
    part from this cache), `hit_gpu` (from vLLM's own cache, none from this one) or `computed`."""
    prefill_tokens: int = 0
    """Of the prompts that were computed as a whole."""
    prefill_seconds: float = 0.0
    """In which at least one of those was being computed: the ratio of the two is what a token costs."""
    config_digest: str = ""
    """Of the configuration file that was last taken in (`kvcache.config.live.file_digest`)."""
    config_restart: list[str] = []
    """Fields of it that wait for the next start of the process."""
