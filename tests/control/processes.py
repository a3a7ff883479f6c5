# SPDX-License-Identifier: Apache-2.0
"""Doubles of vLLM's processes, for tests that ask them over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from kvcache.config.live import file_digest
from kvcache.control.wire import (
    Configured,
    FlushResult,
    FlushScope,
    Located,
    Part,
    Pinned,
    PinnedChunks,
    Pins,
    Prefix,
    Unpinned,
)
from kvcache.stats import RankStats, SchedulerStats, TierStats


def tier_stats(name: str = "cpu", **values: Any) -> TierStats:
    numbers = dict.fromkeys(TierStats.__struct_fields__[2:], 0)
    return TierStats(**{"name": name, "state": "Ready", **numbers, "detail": "", **values})


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
        "config_digest": "",
    }
    return RankStats(**{**defaults, **values})


def scheduler_stats(**values: Any) -> SchedulerStats:
    numbers: dict[str, Any] = dict.fromkeys(SchedulerStats.__struct_fields__[3:], 0)
    tables: dict[str, Any] = {"hit_cache_tokens": {}, "failures": {}, "first_token_seconds": {}}
    texts: dict[str, Any] = {"config_digest": "", "config_restart": []}
    defaults = {"pid": 7, "ready": True, "reason": "", **numbers, **tables, **texts}
    return SchedulerStats(**{**defaults, **values})


class Process:
    """A scheduler or rank that answers what it is told; it can be told to hang."""

    def __init__(self, stats: RankStats | SchedulerStats) -> None:
        self.reported = stats
        self.flushed: list[list[str]] = []
        self.scopes: list[FlushScope] = []
        self.kept: dict[str, Prefix] = {}
        self.located: list[Prefix] = []
        self.parts: list[Part] = []
        self.stored = 0
        self.refusal: Exception | None = None
        self.hangs = False
        """It does not answer where something is, and answers all else."""
        self.go = threading.Event()
        self.go.set()
        self.flush_reached = threading.Event()
        self.files: list[dict[str, Any]] = []
        self.configured = Configured()

    def stats(self) -> RankStats | SchedulerStats:
        self.go.wait(30)
        return self.reported

    def configure(self, file: Mapping[str, Any]) -> Configured:
        self.go.wait(30)
        self.files.append(dict(file))
        if not self.configured.refused:
            self.reported = msgspec.structs.replace(
                self.reported, config_digest=file_digest(file), config_restart=self.configured.restart
            )
        return self.configured

    def flush(self, tiers: Sequence[str], scope: FlushScope) -> Future[list[FlushResult]]:
        self.flush_reached.set()
        self.go.wait(30)
        self.flushed.append(list(tiers))
        self.scopes.append(scope)
        answer: Future[list[FlushResult]] = Future()
        answer.set_result(
            [FlushResult(tier="cpu", complete=True, removed_objects=3, removed_bytes=99)]
            if "cpu" in tiers
            else []
        )
        return answer

    def pin(self, owner: str, prefix: Prefix, check: bool) -> Pinned:
        if self.refusal is not None:
            raise self.refusal
        if not check:
            self.kept[owner] = prefix
        return Pinned(chunks=len(prefix.tokens) // 4, stored=self.stored)

    def unpin(self, owner: str) -> Unpinned:
        prefix = self.kept.pop(owner, None)
        return Unpinned(0 if prefix is None else len(prefix.tokens) // 4)

    def pins(self) -> Pins:
        return Pins(
            [PinnedChunks(owner=owner, chunks=len(kept.tokens) // 4) for owner, kept in self.kept.items()]
        )

    def locate(self, prefix: Prefix) -> Future[Located]:
        answer: Future[Located] = Future()
        self.located.append(prefix)
        if not self.hangs:
            answer.set_result(Located(self.parts))
        return answer
