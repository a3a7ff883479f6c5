# SPDX-License-Identifier: Apache-2.0
"""Metrics: their names, and that what is scraped is what the processes reported."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

import kvcache
from kvcache.control.snapshot import Snapshot
from kvcache.gpu_connector.transfer_plan import Way
from kvcache.observability.definitions import LABELS
from kvcache.observability.metrics import DEFINITIONS, SidecarStats, render
from kvcache.stats import HistogramStats, RankStats, SchedulerStats, TierStats, WayStats
from tests.control.processes import rank_stats, scheduler_stats

NAMES = {definition.name for definition in DEFINITIONS}
UNIT_SUFFIXES = {"bytes": "_bytes", "seconds": "_seconds", "bytes/s": "_bytes_per_second"}

words = st.text(st.characters(codec="utf-8"), max_size=12)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2**53),  # what a number of Prometheus holds exactly
    float: st.floats(0, 1e9),
    str: words,
    bool: st.booleans(),
    list[str]: st.lists(words, max_size=2),
    dict[str, int]: st.dictionaries(words, st.integers(0, 2**53), max_size=4),
}


@st.composite
def histograms(draw: st.DrawFn) -> HistogramStats:
    bounds = sorted(draw(st.sets(st.floats(0, 1e4), max_size=5)))
    counts = draw(st.lists(st.integers(0, 2**40), min_size=len(bounds) + 1, max_size=len(bounds) + 1))
    return HistogramStats(bounds=bounds, counts=counts, sum=draw(st.floats(0, 1e9)))


VALUES[dict[str, HistogramStats]] = st.dictionaries(words, histograms(), max_size=3)


def drawn(struct: type[Any], **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A snapshot whose every field is drawn by its type."""
    fields = {
        field.name: VALUES[field.type] for field in msgspec.structs.fields(struct) if field.name not in given
    }
    return st.builds(struct, **fields, **given)


tiers = st.lists(drawn(TierStats), max_size=3, unique_by=lambda tier: tier.name)
ways = st.lists(drawn(WayStats), max_size=2, unique_by=lambda way: way.direction)
snapshots = st.builds(
    Snapshot,
    taken_at=st.just(0.0),
    scheduler=st.none() | drawn(SchedulerStats),
    ranks=st.dictionaries(st.integers(0, 20), drawn(RankStats, tiers=tiers, ways=ways), max_size=3),
    missing=st.dictionaries(st.sampled_from(["rank30", "rank31"]), words),
)


def scraped(snapshot: Snapshot) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Name and labels to value, as the text format's own parser reads it."""
    text, _ = render(snapshot)
    samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"{key} is exported twice"
            samples[key] = sample.value
    return samples


def value(samples: dict[Any, float], name: str, **labels: object) -> float:
    return samples[name, frozenset((key, str(label)) for key, label in labels.items())]


def test_the_ways_that_bytes_go_are_those_that_a_rank_reports() -> None:
    assert set(re.findall(r"[a-z_]+", LABELS["way"])) == {way.value for way in Way} | {"or"}


def test_names_follow_the_conventions() -> None:
    assert len(NAMES) == len(DEFINITIONS)
    for definition in DEFINITIONS:
        assert re.fullmatch(r"kvcache_[a-z]+(_[a-z]+)*", definition.name)
        plain = definition.name.removesuffix("_total")
        suffix = UNIT_SUFFIXES.get(definition.unit, "")
        assert plain.endswith(suffix)
        assert suffix or not plain.endswith(tuple(UNIT_SUFFIXES.values()))
        assert set(definition.labels) <= LABELS.keys()
        assert definition.name.endswith("_total") == (definition.kind == "counter")
        assert not re.search(r"_(ms|milliseconds|kb|mb|percent)(_|$)", definition.name)
        assert definition.help.endswith(".")


@settings(max_examples=30)
@given(snapshots)
def test_exactly_the_defined_metrics_with_the_defined_labels_are_exported(snapshot: Snapshot) -> None:
    labels = {name: set(definition.labels) for definition in DEFINITIONS for name in definition.series}
    for name, found in scraped(snapshot):
        assert {key for key, _ in found} - {"le"} == labels[name]
        assert ("le" in dict(found)) == name.endswith("_bucket")


@settings(max_examples=30)
@given(snapshots)
def test_every_reported_number_is_exported(snapshot: Snapshot) -> None:
    samples = scraped(snapshot)
    for rank, stats in snapshot.ranks.items():
        for field in ("stored_tokens", "loaded_tokens", "load_failed_tokens"):
            assert value(samples, f"kvcache_{field}_total", rank=rank) == getattr(stats, field)
        for tier in stats.tiers:
            at = {"rank": rank, "tier": tier.name}
            gauges = ("capacity_bytes", "used_bytes", "objects", "leases", "pinned_objects")
            for field in (*gauges, "fetch_latency_seconds", "fetch_bytes_per_second"):
                assert value(samples, f"kvcache_tier_{field}", **at) == getattr(tier, field)
            refused = ("rejected", "declined", "fetch_failures", "write_failures", "writes_dropped")
            for field in ("evictions", "hit_tokens", "not_worth_tokens", *refused):
                assert value(samples, f"kvcache_tier_{field}_total", **at) == getattr(tier, field)
            for direction in ("read", "write"):
                for unit in ("bytes", "seconds"):
                    name = f"kvcache_tier_transfer_{unit}_total"
                    assert value(samples, name, **at, direction=direction) == getattr(
                        tier, f"{direction}_{unit}"
                    )
            assert value(samples, "kvcache_tier_state", **at, state=tier.state) == 1
        for reason, count in stats.failures.items():
            assert value(samples, "kvcache_failures_total", process=f"rank{rank}", reason=reason) == count
        info = {"rank": rank, "transfer_path": stats.transfer_path, "namespace_digest": stats.namespace}
        assert value(samples, "kvcache_rank_info", **info) == 1
        for way in stats.ways:
            at = {"rank": rank, "direction": way.direction}
            assert value(samples, "kvcache_way_info", **at, way=way.way) == 1
            for field in ("way", "link"):
                name = f"{field}_bytes_per_second"
                reported = way.bytes_per_second if field == "way" else way.link_bytes_per_second
                assert value(samples, f"kvcache_{name}", **at) == reported
    if snapshot.scheduler is not None:
        for outcome, histogram in snapshot.scheduler.first_token_seconds.items():
            name = "kvcache_time_to_first_token_seconds"
            assert value(samples, f"{name}_sum", outcome=outcome) == histogram.sum
            assert value(samples, f"{name}_count", outcome=outcome) == sum(histogram.counts)
            for index, bound in enumerate(histogram.bounds):
                assert value(samples, f"{name}_bucket", outcome=outcome, le=float(bound)) == sum(
                    histogram.counts[: index + 1]
                )
        for field in ("requests", "lookups", "lookup_seconds", "lookup_timeouts", "prefill_tokens"):
            assert value(samples, f"kvcache_{field}_total") == getattr(snapshot.scheduler, field)
        for reason, count in snapshot.scheduler.failures.items():
            assert value(samples, "kvcache_failures_total", process="scheduler", reason=reason) == count


def test_the_outcomes_of_prompt_tokens_add_up() -> None:
    scheduler = scheduler_stats(
        prompt_tokens=1000, hit_gpu_tokens=300, hit_cache_tokens={"cpu": 250, "disk": 50}, computed_tokens=400
    )
    samples = scraped(Snapshot(0.0, scheduler))
    tokens = {key: number for key, number in samples.items() if key[0] == "kvcache_prompt_tokens_total"}
    assert sum(tokens.values()) == scheduler.prompt_tokens
    assert value(samples, "kvcache_prompt_tokens_total", outcome="hit_cache", tier="disk") == 50


def test_who_is_up_and_who_is_ready() -> None:
    snapshot = Snapshot(0.0, scheduler_stats(ready=False), {0: rank_stats(0)}, {"rank1": "gone"})
    samples = scraped(snapshot)
    up = {
        name: value(samples, "kvcache_process_up", process=name) for name in ("scheduler", "rank0", "rank1")
    }
    ready = {name: value(samples, "kvcache_process_ready", process=name) for name in up}
    assert up == {"scheduler": 1, "rank0": 1, "rank1": 0}
    assert ready == {"scheduler": 0, "rank0": 1, "rank1": 0}


def test_nobody_there() -> None:
    samples = scraped(Snapshot(0.0, missing={"scheduler": "gone"}))
    assert samples.pop(("kvcache_build_info", frozenset({("version", kvcache.__version__)}))) == 1
    assert {name for name, _ in samples} == {"kvcache_process_up", "kvcache_process_ready"}
    assert set(samples.values()) == {0}


def test_what_the_sidecar_counts_itself() -> None:
    sidecar = SidecarStats(
        requests={("/v1/stats", 200): 7, ("other", 401): 2},
        flushes={("gpu", "incomplete"): 1},
        config_valid=False,
        config_changes={"accepted": 3, "refused": 1},
        config_in_effect={"rank0": False},
    )
    samples: dict[Any, float] = {}
    text, _ = render(Snapshot(0.0), sidecar=sidecar)
    for family in text_string_to_metric_families(text.decode()):
        samples |= {(s.name, frozenset(s.labels.items())): s.value for s in family.samples}
    assert value(samples, "kvcache_admin_requests_total", route="/v1/stats", status=200) == 7
    assert value(samples, "kvcache_admin_requests_total", route="other", status=401) == 2
    assert value(samples, "kvcache_flushes_total", tier="gpu", result="incomplete") == 1
    assert value(samples, "kvcache_config_valid") == 0
    assert value(samples, "kvcache_config_changes_total", result="accepted") == 3
    assert value(samples, "kvcache_config_in_effect", process="rank0") == 0


@pytest.mark.parametrize("counts", [[], [1], [1, 2, 3]])
def test_a_histogram_has_one_more_bucket_than_bounds(counts: list[int]) -> None:
    sent = msgspec.msgpack.encode({"bounds": [0.5], "counts": counts, "sum": 1.0})
    with pytest.raises(msgspec.ValidationError, match="one more is due"):
        msgspec.msgpack.decode(sent, type=HistogramStats)


@pytest.mark.parametrize(
    "accept", ["", "text/plain;version=0.0.4", "application/openmetrics-text; version=1.0.0"]
)
def test_every_metric_is_described_in_the_format_that_is_asked_for(accept: str) -> None:
    text, content_type = render(Snapshot(0.0, scheduler_stats(), {0: rank_stats(0)}), accept)
    assert content_type.startswith(accept.split(";")[0])
    described = set(re.findall(r"^# HELP (\S+)", text.decode(), re.MULTILINE))
    if "openmetrics" in accept:
        parse = openmetrics_parser.text_string_to_metric_families
        assert list(parse(text.decode()))  # type: ignore[no-untyped-call]
        assert described == {name.removesuffix("_total") for name in NAMES}
    else:
        assert described == NAMES
