# SPDX-License-Identifier: Apache-2.0
"""What the admin's routes read and answer. Counters count since their process began."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvcache.control.wire import MAX_TIERS


class TierReport(BaseModel):
    """One tier, of one rank or of all ranks together.

    Of all ranks together, objects, bytes and seconds are sums; every rank holds its part of the same tokens,
    so those count once: the rank with the most counts.
    """

    name: str
    state: str
    capacity_bytes: int
    used_bytes: int
    objects: int
    leases: int
    evictions: int
    rejected: int
    hit_tokens: int
    read_bytes: int
    read_seconds: float
    write_bytes: int
    write_seconds: float


class WayReport(BaseModel):
    direction: str
    way: str
    multiprocessors: int
    bytes_per_second: float
    link_bytes_per_second: float


class RankReport(BaseModel):
    rank: int
    pid: int
    ready: bool
    reason: str
    transfer_path: str
    namespace: str
    stored_tokens: int
    loaded_tokens: int
    load_failed_tokens: int
    failures: dict[str, int]
    tiers: list[TierReport]
    ways: list[WayReport]


class SchedulerReport(BaseModel):
    pid: int
    ready: bool
    reason: str
    requests: int
    prompt_tokens: int
    hit_gpu_tokens: int
    hit_cache_tokens: dict[str, int]
    computed_tokens: int
    lookups: int
    lookup_seconds: float
    lookup_timeouts: int
    failures: dict[str, int]


HitRate = Annotated[
    float | None,
    Field(
        description="hit_cache_tokens / (prompt_tokens - hit_gpu_tokens); null while there are none of those."
    ),
]


class Totals(BaseModel):
    """Since the processes began. Tokens count once, however many ranks hold a part of them."""

    requests: int
    prompt_tokens: int
    hit_gpu_tokens: int
    hit_cache_tokens: int
    computed_tokens: int
    hit_rate: HitRate
    stored_tokens: int
    loaded_tokens: int
    capacity_bytes: int
    used_bytes: int
    objects: int


class Window(BaseModel):
    """The last five minutes, or as long as the sidecar has been watching."""

    seconds: float
    prompt_tokens: int
    hit_gpu_tokens: int
    hit_cache_tokens: int
    hit_rate: HitRate


class StatsReport(BaseModel):
    updated_at: datetime
    missing: Annotated[dict[str, str], Field(description="Processes that did not answer, and why.")]
    totals: Totals
    window: Window
    tiers: list[TierReport]
    scheduler: SchedulerReport | None
    ranks: list[RankReport]


class TierDetail(BaseModel):
    updated_at: datetime
    missing: dict[str, str]
    total: TierReport
    ranks: Annotated[dict[str, TierReport], Field(description="By the name of the rank, such as rank0.")]


class FlushRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tiers: Annotated[list[Annotated[str, Field(max_length=63)]], Field(min_length=1, max_length=MAX_TIERS)]
    wait: Annotated[bool, Field(description="Answer when it is done instead of at once.")] = False
    reason: Annotated[str, Field(max_length=256, description="For whoever reads the history.")] = ""


class TierFlush(BaseModel):
    """What the flush did to one tier of one process; `vllm` for the gpu tier."""

    process: str
    tier: str
    complete: bool
    removed_objects: int | None = None
    removed_bytes: int | None = None
    kept_objects: int | None = None
    reason: str = ""


class FlushReport(BaseModel):
    id: str
    state: Literal["Running", "Done"]
    tiers: list[str]
    reason: str
    requested_at: datetime
    completed_at: datetime | None = None
    complete: Annotated[
        bool | None, Field(description="Nothing that was stored when it began is left; null while it runs.")
    ] = None
    results: list[TierFlush] = []


class ConfigReport(BaseModel):
    version: str
    config: Annotated[
        dict[str, object], Field(description="What this container was given; secrets are blanked.")
    ]
    namespaces: Annotated[dict[str, str], Field(description="Of each rank: what must be equal to share KV.")]
