# SPDX-License-Identifier: Apache-2.0
"""The reports that carry the cache's figures to vLLM's metrics. What a real server shows: test_server."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from kvcache.integration.vllm.vllm_stats import (
    DEFINITIONS,
    CachePromMetrics,
    CacheStats,
    Figures,
    StatsReporter,
    figures_of,
)
from kvcache.stats import RankStats, SchedulerStats


def rank_stats(rank: int, dice: random.Random, **more: Any) -> RankStats:
    values: dict[str, Any] = {
        "rank": rank,
        "pid": 1,
        "ready": True,
        "reason": "",
        "transfer_path": "host",
        "namespace": "",
        "stored_tokens": dice.randrange(10_000),
        "loaded_tokens": dice.randrange(10_000),
        "load_failed_tokens": dice.randrange(100),
        "failures": {"OSError": dice.randrange(1, 9)},
        "tiers": [],
    }
    return RankStats(**(values | more))


def scheduler_stats(dice: random.Random) -> SchedulerStats:
    return SchedulerStats(
        pid=1,
        ready=True,
        reason="",
        requests=dice.randrange(100),
        prompt_tokens=0,
        hit_gpu_tokens=dice.randrange(10_000),
        hit_cache_tokens={"cpu": dice.randrange(10_000), "disk": dice.randrange(10_000)},
        computed_tokens=dice.randrange(10_000),
        lookups=dice.randrange(1000),
        lookup_seconds=dice.random(),
        lookup_timeouts=0,
        failures={},
    )


def grown(stats: RankStats, dice: random.Random) -> RankStats:
    name = dice.choice("abc")
    return msgspec.structs.replace(
        stats,
        ready=dice.random() < 0.5,
        stored_tokens=stats.stored_tokens + dice.randrange(500),
        loaded_tokens=stats.loaded_tokens + dice.randrange(500),
        failures={**stats.failures, name: stats.failures.get(name, 0) + dice.randrange(5, 9)},
    )


def exposed(figures: Figures) -> dict[str, float]:
    """Metric and labels to value, as Prometheus would show them."""
    found = {}
    for name, values in figures.items():
        definition = DEFINITIONS[name]
        for labels, value in values.items():
            named = zip(definition.labels, labels.split("/"), strict=True) if definition.labels else ()
            total = "_total" if definition.kind == "counter" else ""
            shown = ",".join(f'{label}="{text}"' for label, text in sorted([*named, ("engine", "0")]))
            found[f"{definition.name}{total}{{{shown}}}"] = value
    return found


def test_what_arrives_in_pieces_adds_up() -> None:
    """Three processes report in steps of their own; vLLM merges each step's reports and hands them on."""
    dice = random.Random(11)
    registry = CollectorRegistry()

    def metric(kind: Any) -> Any:
        return lambda **arguments: kind(
            **{k: v for k, v in arguments.items() if k != "multiprocess_mode"}, registry=registry
        )

    shown = CachePromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Gauge: metric(Gauge), Counter: metric(Counter), **dict.fromkeys([_histogram()], None)},
        ["engine"],
        {0: ["0"]},
    )
    ranks = [rank_stats(rank, dice) for rank in (0, 1)]
    scheduler = scheduler_stats(dice)
    reporters = [StatsReporter() for _ in range(3)]
    for step in range(20):
        ranks = [grown(stats, dice) if dice.random() < 0.6 else stats for stats in ranks]
        reports = [
            reporter.take(msgspec.json.encode(stats), lambda stats=stats: figures_of(stats))  # type: ignore[misc]
            for reporter, stats in zip(reporters, (scheduler, *ranks), strict=True)
        ]
        assert step == 0 or reports[0] is None
        merged: Any = None
        for report in reports:
            if report is not None:
                carried = CacheStats(pickle.loads(pickle.dumps(report)).data)  # noqa: S301
                merged = carried if merged is None else merged.aggregate(carried)
        if merged is not None:
            shown.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(merged.to_dict())))
    expected: dict[str, float] = {}
    everything: list[RankStats | SchedulerStats] = [scheduler, *ranks]
    for stats in everything:
        expected |= exposed(figures_of(stats))
    lines = generate_latest(registry).decode().splitlines()
    found = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if not line.startswith("#") and "_created" not in line
    }
    assert {name: round(value, 6) for name, value in found.items() if name in expected} == {
        name: round(value, 6) for name, value in expected.items()
    }


def _histogram() -> Any:
    from prometheus_client import Histogram

    return Histogram


def test_a_line_of_the_log_has_a_sum_of_each_counter() -> None:
    dice = random.Random(5)
    first, second = rank_stats(0, dice), rank_stats(1, dice, ready=False)
    stats = CacheStats(figures_of(first)).aggregate(CacheStats(figures_of(second)))
    assert not stats.is_empty()
    line = stats.reduce()
    assert line["stored_tokens"] == first.stored_tokens + second.stored_tokens
    assert line["ready"] == 0
    stats.reset()
    assert stats.is_empty()
    assert replace(CacheStats()).is_empty()
