# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of one vLLM with its cache, made from a snapshot of all its processes.

`DEFINITIONS` lists every metric that is exported: a dashboard or an alert may name these and no others. Units
are tokens, bytes and seconds. A rank counts the tokens whose part it holds, so with several ranks every token
is counted once by each; the scheduler counts each token once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvcache.control.snapshot import Snapshot
from kvcache.control.wire import SCHEDULER, rank_name
from kvcache.stats import RankStats, SchedulerStats, TierStats


@dataclass(frozen=True)
class Definition:
    """One metric.

    Attributes:
        name: as Prometheus shows it; counters end in `_total`.
    """

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str


def _counter(name: str, labels: str, text: str) -> Definition:
    return Definition(f"kvcache_{name}_total", "counter", tuple(labels.split()), text)


def _gauge(name: str, labels: str, text: str) -> Definition:
    return Definition(f"kvcache_{name}", "gauge", tuple(labels.split()), text)


DEFINITIONS = (
    _gauge("process_up", "process", "1 if the process (scheduler, rank0, ...) answered, else 0."),
    _gauge("process_ready", "process", "1 if the process answered and is ready, else 0."),
    _counter("failures", "process reason", "What a guard caught or a request lost, by reason."),
    _counter("requests", "", "Requests that were scheduled at least once."),
    _counter(
        "prompt_tokens",
        "outcome tier",
        "Prompt tokens by outcome: hit_gpu (vLLM's cache), hit_cache (this cache, by tier) or computed."
        " They add up to the tokens of all prompts.",
    ),
    _counter("lookups", "", "Lookups that the scheduler made."),
    _counter("lookup_seconds", "", "Time that the scheduler waited for lookups."),
    _counter("lookup_timeouts", "", "Lookups in which a rank did not answer in time."),
    _gauge(
        "rank_info", "rank transfer_path namespace", "1; how the rank moves bytes, and its cache namespace."
    ),
    _gauge(
        "way_info",
        "rank direction way",
        "1; how the rank's bytes cross the link, as measured when it started.",
    ),
    _gauge("way_bytes_per_second", "rank direction", "What that way reached when it was measured."),
    _gauge("link_bytes_per_second", "rank direction", "A plain page-locked copy in the same measurement."),
    _counter("stored_tokens", "rank", "Tokens whose KV was stored."),
    _counter("loaded_tokens", "rank", "Tokens whose KV was loaded."),
    _counter("load_failed_tokens", "rank", "Tokens whose KV was wanted but not loaded; vLLM computes them."),
    _gauge("tier_state", "rank tier state", "1 for the state in which the tier is."),
    _gauge("tier_capacity_bytes", "rank tier", "Bytes that the tier may hold."),
    _gauge("tier_used_bytes", "rank tier", "Bytes that the tier holds."),
    _gauge("tier_objects", "rank tier", "Objects that the tier holds."),
    _gauge("tier_leases", "rank tier", "Leases that are held now; what is leased is not evicted."),
    _counter("tier_evictions", "rank tier", "Objects that made room for others."),
    _counter("tier_rejected", "rank tier", "Objects that found no room."),
    _counter("tier_hit_tokens", "rank tier", "Tokens that were loaded from the tier."),
    _counter("tier_transfer_bytes", "rank tier direction", "Bytes read from and written to the tier."),
    _counter("tier_transfer_seconds", "rank tier direction", "Time spent on reading and writing."),
)

_Sample = tuple[str, tuple[str, ...], float]
"""Name without prefix and `_total`, label values, value."""


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
    yield "lookups", (), stats.lookups
    yield "lookup_seconds", (), stats.lookup_seconds
    yield "lookup_timeouts", (), stats.lookup_timeouts


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
    yield "tier_hit_tokens", labels, tier.hit_tokens
    yield "tier_transfer_bytes", (*labels, "read"), tier.read_bytes
    yield "tier_transfer_bytes", (*labels, "write"), tier.write_bytes
    yield "tier_transfer_seconds", (*labels, "read"), tier.read_seconds
    yield "tier_transfer_seconds", (*labels, "write"), tier.write_seconds


def _samples(snapshot: Snapshot) -> Iterator[_Sample]:
    yield from _process_samples(snapshot)
    if snapshot.scheduler is not None:
        yield from _scheduler_samples(snapshot.scheduler)
    for rank, stats in sorted(snapshot.ranks.items()):
        yield from _rank_samples(rank, stats)


class SnapshotCollector(Collector):
    """The metrics of one snapshot, for a registry of `prometheus_client`."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """Every defined metric; those that no process reported have no samples."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for definition in DEFINITIONS:
            family = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
            short = definition.name.removeprefix("kvcache_").removesuffix("_total")
            families[short] = family(definition.name, definition.help, labels=definition.labels)
        for name, labels, value in _samples(self._snapshot):
            families[name].add_metric(labels, value)
        return families.values()


def render(snapshot: Snapshot, accept: str = "") -> tuple[bytes, str]:
    """The snapshot in the text format that the scraper accepts, and its content type.

    Args:
        accept: the request's `Accept` header.
    """
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(snapshot))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
