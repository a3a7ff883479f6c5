# SPDX-License-Identifier: Apache-2.0
"""Doubles of vLLM's processes, for tests that ask them over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvcache.control.wire import FlushResult
from kvcache.stats import RankStats, SchedulerStats, TierStats


def tier_stats(name: str = "cpu", **values: Any) -> TierStats:
    numbers = dict.fromkeys(TierStats.__struct_fields__[2:], 0)
    return TierStats(**{"name": name, "state": "Ready", **numbers, **values})


def rank_stats(rank: int, **values: Any) -> RankStats:
    defaults: dict[str, Any] = {
        "rank": rank,
        "pid": 1000 + rank,
        "ready": True,
        "reason": "",
        "transfer_path": "host",
        "namespace": "ab" * 16,
        "stored_tokens": 0,
        "loaded_tokens": 0,
        "load_failed_tokens": 0,
        "failures": {},
        "tiers": [tier_stats()],
    }
    return RankStats(**{**defaults, **values})


def scheduler_stats(**values: Any) -> SchedulerStats:
    numbers: dict[str, Any] = dict.fromkeys(SchedulerStats.__struct_fields__[3:], 0)
    defaults = {"pid": 7, "ready": True, "reason": "", **numbers, "hit_cache_tokens": {}, "failures": {}}
    return SchedulerStats(**{**defaults, **values})


class Process:
    """A scheduler or rank that answers what it is told; it can be told to hang."""

    def __init__(self, stats: RankStats | SchedulerStats) -> None:
        self.reported = stats
        self.flushed: list[list[str]] = []
        self.go = threading.Event()
        self.go.set()
        self.flush_reached = threading.Event()

    def stats(self) -> RankStats | SchedulerStats:
        self.go.wait(30)
        return self.reported

    def flush(self, tiers: Sequence[str]) -> list[FlushResult]:
        self.flush_reached.set()
        self.go.wait(30)
        self.flushed.append(list(tiers))
        return (
            [FlushResult(tier="cpu", complete=True, removed_objects=3, removed_bytes=99)]
            if "cpu" in tiers
            else []
        )
