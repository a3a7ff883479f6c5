# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of one vLLM with its cache, made from a snapshot of all its processes.

What is exported stands in `definitions`; here stands where each number comes from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import kvcache
from kvcache.control.snapshot import Snapshot
from kvcache.control.wire import SCHEDULER, rank_name
from kvcache.observability.definitions import DEFINITIONS, Kind
from kvcache.stats import HistogramStats, RankStats, SchedulerStats, TierStats

__all__ = ["DEFINITIONS", "SidecarStats", "SnapshotCollector", "render"]


@dataclass(frozen=True)
class SidecarStats:
    """What the admin sidecar counts itself."""

    requests: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """By route and status."""
    flushes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By tier and result."""
    config_valid: bool | None = None
    """None where no configuration is mounted."""
    config_changes: Mapping[str, int] = field(default_factory=dict)
    """By result."""
    config_in_effect: Mapping[str, bool] = field(default_factory=dict)
    """By process."""


_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_FAMILIES: dict[Kind, Callable[..., _Family]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
_Sample = tuple[str, tuple[str, ...], float | HistogramStats]
"""Key of the definition, label values, value."""


def _process_samples(snapshot: Snapshot) -> Iterator[_Sample]:
    ready: dict[str, bool | None] = dict.fromkeys([SCHEDULER, *snapshot.missing])
    failures: dict[str, dict[str, int]] = {}
    if snapshot.scheduler is not None:
        ready[SCHEDULER], failures[SCHEDULER] = snapshot.scheduler.ready, snapshot.scheduler.failures
    for rank, stats in snapshot.ranks.items():
        ready[rank_name(rank)], failures[rank_name(rank)] = stats.ready, stats.failures
    for process, state in ready.items():
        yield "process_up", (process,), state is not None
        yield "process_ready", (process,), bool(state)
    for process, reasons in failures.items():
        for reason, count in reasons.items():
            yield "failures", (process, reason), count


def _scheduler_samples(stats: SchedulerStats) -> Iterator[_Sample]:
    yield "requests", (), stats.requests
    yield "prompt_tokens", ("hit_gpu", "gpu"), stats.hit_gpu_tokens
    for tier, tokens in stats.hit_cache_tokens.items():
        yield "prompt_tokens", ("hit_cache", tier), tokens
    yield "prompt_tokens", ("computed", ""), stats.computed_tokens
    for outcome, histogram in stats.first_token_seconds.items():
        yield "time_to_first_token_seconds", (outcome,), histogram
    yield "prefill_tokens", (), stats.prefill_tokens
    yield "prefill_seconds", (), stats.prefill_seconds
    yield "lookups", (), stats.lookups
    yield "lookup_seconds", (), stats.lookup_seconds
    yield "lookup_timeouts", (), stats.lookup_timeouts
    yield "lookup_waits", (), stats.lookup_waits
    yield "lookup_wait_seconds", (), stats.lookup_wait_seconds
    yield "lookup_waits_expired", (), stats.lookup_waits_expired


def _rank_samples(rank: int, stats: RankStats) -> Iterator[_Sample]:
    label = str(rank)
    yield "rank_info", (label, stats.transfer_path, stats.namespace), 1
    for way in stats.ways:
        yield "way_info", (label, way.direction, way.way), 1
        yield "way_bytes_per_second", (label, way.direction), way.bytes_per_second
        yield "link_bytes_per_second", (label, way.direction), way.link_bytes_per_second
    yield "stored_tokens", (label,), stats.stored_tokens
    yield "loaded_tokens", (label,), stats.loaded_tokens
    yield "load_failed_tokens", (label,), stats.load_failed_tokens
    for tier in stats.tiers:
        yield from _tier_samples((label, tier.name), tier)


def _tier_samples(labels: tuple[str, str], tier: TierStats) -> Iterator[_Sample]:
    yield "tier_state", (*labels, tier.state), 1
    yield "tier_capacity_bytes", labels, tier.capacity_bytes
    yield "tier_used_bytes", labels, tier.used_bytes
    yield "tier_objects", labels, tier.objects
    yield "tier_leases", labels, tier.leases
    yield "tier_evictions", labels, tier.evictions
    yield "tier_rejected", labels, tier.rejected
    yield "tier_pinned_objects", labels, tier.pinned_objects
    yield "tier_declined", labels, tier.declined
    yield "tier_fetch_failures", labels, tier.fetch_failures
    yield "tier_write_failures", labels, tier.write_failures
    yield "tier_writes_dropped", labels, tier.writes_dropped
    yield "tier_not_worth_tokens", labels, tier.not_worth_tokens
    yield "tier_fetch_latency_seconds", labels, tier.fetch_latency_seconds
    yield "tier_fetch_bytes_per_second", labels, tier.fetch_bytes_per_second
    yield "tier_hit_tokens", labels, tier.hit_tokens
    yield "tier_transfer_bytes", (*labels, "read"), tier.read_bytes
    yield "tier_transfer_bytes", (*labels, "write"), tier.write_bytes
    yield "tier_transfer_seconds", (*labels, "read"), tier.read_seconds
    yield "tier_transfer_seconds", (*labels, "write"), tier.write_seconds


def _sidecar_samples(stats: SidecarStats) -> Iterator[_Sample]:
    yield "build_info", (kvcache.__version__,), 1
    for (route, status), count in stats.requests.items():
        yield "admin_requests", (route, str(status)), count
    for (tier, result), count in stats.flushes.items():
        yield "flushes", (tier, result), count
    if stats.config_valid is not None:
        yield "config_valid", (), stats.config_valid
    for result, count in stats.config_changes.items():
        yield "config_changes", (result,), count
    for process, in_effect in stats.config_in_effect.items():
        yield "config_in_effect", (process,), in_effect


def _samples(snapshot: Snapshot, sidecar: SidecarStats) -> Iterator[_Sample]:
    yield from _process_samples(snapshot)
    if snapshot.scheduler is not None:
        yield from _scheduler_samples(snapshot.scheduler)
    for rank, stats in sorted(snapshot.ranks.items()):
        yield from _rank_samples(rank, stats)
    yield from _sidecar_samples(sidecar)


def _buckets(histogram: HistogramStats) -> list[tuple[str, float]]:
    bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))


class SnapshotCollector(Collector):
    """The metrics of one snapshot, for a registry of `prometheus_client`."""

    def __init__(self, snapshot: Snapshot, sidecar: SidecarStats) -> None:
        self._snapshot = snapshot
        self._sidecar = sidecar

    def collect(self) -> Iterable[Metric]:
        """Every defined metric; those that no process reported have no samples."""
        families = {
            definition.key: _FAMILIES[definition.kind](
                definition.name, definition.help, labels=definition.labels
            )
            for definition in DEFINITIONS
        }
        for key, labels, value in _samples(self._snapshot, self._sidecar):
            family = families[key]
            if not isinstance(family, HistogramMetricFamily):
                assert not isinstance(value, HistogramStats)  # noqa: S101
                family.add_metric(labels, value)
            elif isinstance(value, HistogramStats):
                family.add_metric(labels, _buckets(value), value.sum)
        return families.values()


def render(snapshot: Snapshot, accept: str = "", sidecar: SidecarStats | None = None) -> tuple[bytes, str]:
    """The snapshot in the text format that the scraper accepts, and its content type.

    Args:
        accept: the request's `Accept` header.
        sidecar: what the sidecar counts itself.
    """
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(snapshot, sidecar or SidecarStats()))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
