# SPDX-License-Identifier: Apache-2.0
"""Snapshots to the answers of the statistics routes: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from kvcache.admin.models import (
    RankReport,
    SchedulerReport,
    StatsReport,
    TierDetail,
    TierReport,
    Totals,
    Window,
)
from kvcache.admin.window import Hits, HitWindow
from kvcache.config import LMCacheEngineConfig
from kvcache.control.snapshot import Snapshot
from kvcache.control.wire import rank_name
from kvcache.stats import TierStats

_SUMMED = (
    "capacity_bytes",
    "used_bytes",
    "objects",
    "leases",
    "evictions",
    "rejected",
    "read_bytes",
    "read_seconds",
    "write_bytes",
    "write_seconds",
    "pinned_objects",
    "declined",
    "fetch_failures",
    "writes_dropped",
    "write_failures",
)
_SECRET_FIELDS = ("hash_seed",)
_BLANK = "***"


def stats_report(snapshot: Snapshot, window: HitWindow) -> StatsReport:
    """The whole picture: totals, window, and every tier, rank and the scheduler."""
    tiers = [merged_tier(_of_tier(snapshot, name)) for name in snapshot.tier_names()]
    ranks = [stats for _, stats in sorted(snapshot.ranks.items())]
    scheduler = snapshot.scheduler
    hits = Hits() if scheduler is None else Hits.of(scheduler)
    return StatsReport(
        updated_at=_time(snapshot),
        missing=dict(snapshot.missing),
        totals=Totals(
            requests=0 if scheduler is None else scheduler.requests,
            prompt_tokens=hits.prompt_tokens,
            hit_gpu_tokens=hits.hit_gpu_tokens,
            hit_cache_tokens=hits.hit_cache_tokens,
            computed_tokens=0 if scheduler is None else scheduler.computed_tokens,
            hit_rate=hits.hit_rate,
            stored_tokens=max((rank.stored_tokens for rank in ranks), default=0),
            loaded_tokens=max((rank.loaded_tokens for rank in ranks), default=0),
            capacity_bytes=sum(tier.capacity_bytes for tier in tiers),
            used_bytes=sum(tier.used_bytes for tier in tiers),
            objects=sum(tier.objects for tier in tiers),
        ),
        window=Window(
            seconds=window.seconds,
            prompt_tokens=window.hits.prompt_tokens,
            hit_gpu_tokens=window.hits.hit_gpu_tokens,
            hit_cache_tokens=window.hits.hit_cache_tokens,
            hit_rate=window.hits.hit_rate,
        ),
        tiers=tiers,
        scheduler=None if scheduler is None else SchedulerReport(**msgspec.to_builtins(scheduler)),
        ranks=[RankReport(**msgspec.to_builtins(rank)) for rank in ranks],
    )


def tier_detail(snapshot: Snapshot, tier: str) -> TierDetail:
    """One tier in all ranks. Some rank must have it."""
    return TierDetail(
        updated_at=_time(snapshot),
        missing=dict(snapshot.missing),
        total=merged_tier(_of_tier(snapshot, tier)),
        ranks={
            rank_name(rank): TierReport(**msgspec.to_builtins(found))
            for rank, stats in sorted(snapshot.ranks.items())
            for found in stats.tiers
            if found.name == tier
        },
    )


def merged_tier(parts: Sequence[TierStats]) -> TierReport:
    """One tier of all ranks as one. Its state is `Ready` if all are, else the first other one."""
    sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    return TierReport(
        name=parts[0].name,
        state=next((part.state for part in parts if part.state != "Ready"), "Ready"),
        detail="; ".join(dict.fromkeys(part.detail for part in parts if part.detail)),
        hit_tokens=max(part.hit_tokens for part in parts),
        not_worth_tokens=max(part.not_worth_tokens for part in parts),
        fetch_latency_seconds=max(part.fetch_latency_seconds for part in parts),
        fetch_bytes_per_second=min(part.fetch_bytes_per_second for part in parts),
        **sums,
    )


def redacted(config: LMCacheEngineConfig) -> dict[str, object]:
    """The configuration without its secrets."""
    shown = config.model_dump(mode="json")
    for name in _SECRET_FIELDS:
        if shown.get(name):
            shown[name] = _BLANK
    return shown


def _of_tier(snapshot: Snapshot, name: str) -> list[TierStats]:
    return [tier for _, stats in sorted(snapshot.ranks.items()) for tier in stats.tiers if tier.name == name]


def _time(snapshot: Snapshot) -> datetime:
    return datetime.fromtimestamp(snapshot.taken_at, UTC)
