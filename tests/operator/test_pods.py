# SPDX-License-Identifier: Apache-2.0
"""The operator and the sidecar understand each other: the sidecar's own models write what is read here."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import msgspec
import pytest

from kvcache.admin.models import ConfigReport, FlushReport, FlushRequest, TierFlush
from kvcache.admin.report import stats_report
from kvcache.admin.window import HitWindow
from kvcache.control.snapshot import Snapshot
from kvcache.stats import RankStats, SchedulerStats, TierStats
from kvcache_operator.cache_numbers import cache_status, connector_trouble, rounded, size_text, tier_trouble
from kvcache_operator.observe import PodState
from kvcache_operator.pods import (
    MAX_ANSWER_BYTES,
    ConfigAnswer,
    FlushAnswer,
    Pods,
    PodStats,
    Ports,
    StatsAnswer,
    TierFlushAnswer,
)

POD = PodState("p", "n", "10.0.0.7", True, "", "", False)
PORTS = Ports(8000, 8081)


def filled(kind: type[Any], **values: Any) -> Any:
    """A struct whose fields without a default are zero, except for these."""
    empty: dict[Any, Any] = {int: 0, float: 0.0, str: "", bool: True}
    fields = {
        field.name: empty.get(field.type, [] if "list" in str(field.type) else {})
        for field in msgspec.structs.fields(kind)
        if field.required
    }
    return kind(**{**fields, **values})


def answer(tier_state: str = "Ready") -> StatsAnswer:
    tier = filled(TierStats, name="cpu", state=tier_state, capacity_bytes=1 << 30, used_bytes=1 << 29)
    rank = filled(RankStats, rank=0, ready=True, namespace="ab", tiers=[tier])
    scheduler = filled(SchedulerStats, ready=True, hit_cache_tokens={"cpu": 5})
    snapshot = Snapshot(taken_at=time.time(), missing={}, scheduler=scheduler, ranks={0: rank})
    return StatsAnswer.model_validate_json(stats_report(snapshot, HitWindow()).model_dump_json())


def test_statistics_are_understood() -> None:
    stats = answer()
    assert (stats.tiers[0].name, stats.tiers[0].capacity_bytes) == ("cpu", 1 << 30)
    assert stats.ranks[0].namespace == "ab"
    assert stats.scheduler is not None


def test_reports_are_understood() -> None:
    """By their fields: the sidecar's models may have more than are read here."""
    for ours, theirs in (
        (ConfigAnswer, ConfigReport),
        (FlushAnswer, FlushReport),
        (TierFlushAnswer, TierFlush),
    ):
        for name, field in ours.model_fields.items():
            if name != "results":
                assert theirs.model_fields[name].annotation == field.annotation, name
    request = {"tiers": ["gpu", "cpu"], "wait": True, "reason": "x"}
    assert FlushRequest.model_validate(request).tiers == ["gpu", "cpu"]


def asked(handler: Any) -> list[PodStats]:
    async def ask() -> list[PodStats]:
        pods = Pods(1, 1, httpx.MockTransport(handler))
        try:
            return await pods.stats([POD], PORTS, "t")
        finally:
            await pods.close()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(500),
        httpx.Response(200, text="no json"),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"window": {}}),
        httpx.Response(200, content=b" " * (MAX_ANSWER_BYTES + 1)),
    ],
)
def test_bad_answers_are_silence(response: httpx.Response) -> None:
    assert asked(lambda _: response) == []


def test_a_network_that_is_down_is_silence() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectTimeout("", request=request)

    assert asked(handler) == []


def test_no_pods_that_were_asked_before_no_numbers() -> None:
    status = cache_status([PodStats("p", answer())], {}, "now")
    assert status["hitRate"] == "-"
    assert cache_status([PodStats("p", answer())], status, "later")["updatedAt"] == "now"


def test_tiers_that_still_lock_memory_serve() -> None:
    assert tier_trouble([PodStats("p", answer("Pinning"))], ["cpu"]) is None
    assert tier_trouble([PodStats("p", answer())], ["cpu", "disk"]) == (
        "DiskNotMounted",
        "pod p has no tier disk",
    )
    assert connector_trouble([PodStats("p", answer())]) is None


@pytest.mark.parametrize(("number", "expected"), [(0, 0), (999, 999), (1234, 1230), (9999, 10000)])
def test_rounding(number: int, expected: int) -> None:
    assert rounded(number) == expected


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0Mi"), (5 << 20, "5Mi"), (3 << 29, "1.5Gi"), (32 << 30, "32Gi"), (1 << 40, "1Ti")]
)
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text
