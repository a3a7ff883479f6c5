# SPDX-License-Identifier: Apache-2.0
"""What the admin's routes read and answer. Counters count since their process began."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvcache.admin.prefixes import Salt, TokenIds
from kvcache.control.wire import MAX_TIERS


class TierReport(BaseModel):
    """One tier, of one rank or of all ranks together.

    Of all ranks together, objects, bytes and seconds are sums; every rank holds its part of the same tokens,
    so those count once: the rank with the most counts. Of latencies the longest counts, of rates the lowest.
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
    detail: str
    pinned_objects: int
    declined: int
    fetch_failures: int
    not_worth_tokens: int
    writes_dropped: int
    write_failures: int
    fetch_latency_seconds: float
    fetch_bytes_per_second: float


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
    config_digest: str
    config_restart: list[str]


class HistogramReport(BaseModel):
    bounds: Annotated[list[float], Field(description="The largest value of each bucket, ascending.")]
    counts: Annotated[list[int], Field(description="In each bucket; the last one takes what is larger.")]
    sum: float


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
    lookup_waits: Annotated[int, Field(description="Lookups that waited for slower tiers.")]
    lookup_wait_seconds: Annotated[float, Field(description="That their requests waited.")]
    lookup_waits_expired: Annotated[int, Field(description="Of them, those that a deadline ended.")]
    failures: dict[str, int]
    first_token_seconds: Annotated[
        dict[str, HistogramReport],
        Field(description="From arrival to the first token, by where the prompt came from."),
    ]
    prefill_tokens: int
    prefill_seconds: float
    config_digest: str
    config_restart: list[str]


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


class FlushScopeRequest(BaseModel):
    """What to drop: chunks for which all that is given holds. The gpu tier can only be dropped as a whole."""

    model_config = ConfigDict(extra="forbid")

    namespace: Annotated[
        str | None,
        Field(pattern="^[0-9a-f]{32}$", description="Of one model, as `GET /v1/config` shows them."),
    ] = None
    salt: Annotated[
        Salt | None, Field(description="`cache_salt` of the requests that stored them; empty for none.")
    ] = None
    tokens: Annotated[
        TokenIds | None, Field(description="Token ids of a prompt: its chunks, and what continues them.")
    ] = None
    prompt: Annotated[str | None, Field(description="Its text, instead of token ids.")] = None
    force: Annotated[bool, Field(description="Pinned chunks too.")] = False

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        if self.tokens is not None and self.prompt is not None:
            raise ValueError("at most one of tokens and prompt may be given")
        return self

    @property
    def is_partial(self) -> bool:
        """Not everything is in it."""
        return (self.namespace, self.salt, self.tokens, self.prompt) != (None, None, None, None)


class FlushRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tiers: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=63)]], Field(min_length=1, max_length=MAX_TIERS)
    ]
    wait: Annotated[bool, Field(description="Answer when it is done instead of at once.")] = False
    reason: Annotated[str, Field(max_length=256, description="For whoever reads the history.")] = ""
    scope: FlushScopeRequest = FlushScopeRequest()


class FlushScopeReport(BaseModel):
    """Of a prompt its length alone is kept."""

    namespace: str | None
    salt: str | None
    tokens: Annotated[int | None, Field(description="Of the prompt; null where none was given.")]
    force: bool


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
    scope: FlushScopeReport
    requested_at: datetime
    completed_at: datetime | None = None
    complete: Annotated[
        bool | None, Field(description="Nothing that was stored when it began is left; null while it runs.")
    ] = None
    results: list[TierFlush] = []


class FlushHistory(BaseModel):
    flushes: Annotated[list[FlushReport], Field(description="The last 32, the latest first.")]


class ProcessConfigReport(BaseModel):
    in_effect: Annotated[bool, Field(description="The process runs all of the mounted configuration.")]
    restart: Annotated[list[str], Field(description="Fields that wait for its next start.")]
    problem: Annotated[str, Field(description="Why it was not taken in; empty where it was.")]


class ConfigReport(BaseModel):
    version: str
    config: Annotated[
        dict[str, object],
        Field(description="The last good mounted configuration, with defaults; secrets are blanked."),
    ]
    digest: Annotated[str, Field(description="Of what the file said then; empty where none is mounted.")]
    problem: Annotated[
        str, Field(description="Why the file as it is now is refused; empty while it can be used.")
    ]
    processes: Annotated[
        dict[str, ProcessConfigReport], Field(description="How far each process is with it.")
    ]
    namespaces: Annotated[dict[str, str], Field(description="Of each rank: what must be equal to share KV.")]
