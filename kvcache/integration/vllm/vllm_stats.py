# SPDX-License-Identifier: Apache-2.0
"""The cache's figures among vLLM's own Prometheus metrics.

Every process of the connector reports what was added since its last report; vLLM carries the reports with its
steps to the API server, which adds them up. What happens after the last step of a batch comes with the next
one. All figures are those of `kvcache.stats`, so both accounts agree; the admin sidecar has many more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvcache.stats import RankStats, SchedulerStats


@dataclass(frozen=True)
class Definition:
    """One metric. vLLM unregisters only what starts with `vllm:` before it makes its metrics again."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str


def _metric(kind: Literal["counter", "gauge"], name: str, labels: str, text: str) -> tuple[str, Definition]:
    return name, Definition(f"vllm:kvcache_{name}", kind, tuple(labels.split()), text)


DEFINITIONS = dict(
    [
        _metric("gauge", "ready", "process", "1 if the process (scheduler, rank0, ...) caches, else 0."),
        _metric(
            "counter",
            "prompt_tokens",
            "outcome tier",
            "Prompt tokens by outcome: hit_gpu (vLLM's cache), hit_cache (by tier) or computed.",
        ),
        _metric("counter", "lookups", "", "Lookups that the scheduler made."),
        _metric("counter", "lookup_seconds", "", "Time that the scheduler waited for lookups."),
        _metric("counter", "stored_tokens", "process", "Tokens whose KV a rank stored."),
        _metric("counter", "loaded_tokens", "process", "Tokens whose KV a rank loaded."),
        _metric(
            "counter",
            "load_failed_tokens",
            "process",
            "Tokens whose KV a rank was to load and did not; vLLM computes them.",
        ),
        _metric("counter", "failures", "process reason", "What a guard caught or a request lost, by reason."),
    ]
)
"""Short name to metric: all that there are."""

Figures = dict[str, dict[str, float]]
"""Short name of a metric to its values by label values, which are joined by `/`."""


def rank_figures(
    rank: int, *, ready: bool, stored: int, loaded: int, failed: int, failures: Mapping[str, int]
) -> Figures:
    """The metrics of one rank since it started; tokens stored, loaded, and not loaded that were promised."""
    process = f"rank{rank}"
    tokens = {"stored_tokens": stored, "loaded_tokens": loaded, "load_failed_tokens": failed}
    return {
        "ready": {process: float(ready)},
        "failures": {f"{process}/{reason}": float(count) for reason, count in failures.items()},
        **{name: {process: float(count)} for name, count in tokens.items()},
    }


def figures_of(stats: RankStats | SchedulerStats) -> Figures:
    """The metrics of one process since it started."""
    if isinstance(stats, RankStats):
        return rank_figures(
            stats.rank,
            ready=stats.ready,
            stored=stats.stored_tokens,
            loaded=stats.loaded_tokens,
            failed=stats.load_failed_tokens,
            failures=stats.failures,
        )
    process = "scheduler"
    figures: Figures = {
        "ready": {process: float(stats.ready)},
        "failures": {f"{process}/{reason}": float(count) for reason, count in stats.failures.items()},
    }
    figures["lookups"] = {"": float(stats.lookups)}
    figures["lookup_seconds"] = {"": stats.lookup_seconds}
    figures["prompt_tokens"] = {
        "hit_gpu/gpu": float(stats.hit_gpu_tokens),
        "computed/": float(stats.computed_tokens),
        **{f"hit_cache/{tier}": float(tokens) for tier, tokens in stats.hit_cache_tokens.items()},
    }
    return figures


@dataclass
class CacheStats(KVConnectorStats):
    """`data` are `Figures`: of counters what was added, of gauges the value now."""

    data: Figures = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Of another process, or later ones of the same."""
        for name, values in other.data.items():
            mine = self.data.setdefault(name, {})
            for labels, value in values.items():
                is_counter = DEFINITIONS[name].kind == "counter"
                mine[labels] = mine.get(labels, 0.0) + value if is_counter else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For a line of vLLM's log: one sum a counter, and the smallest value of a gauge."""
        return {
            name: round(
                sum(values.values()) if DEFINITIONS[name].kind == "counter" else min(values.values()), 6
            )
            for name, values in self.data.items()
            if values
        }


class StatsReporter:
    """Makes one process's reports."""

    def __init__(self) -> None:
        self._activity: Hashable = None
        self._told: Figures = {}
        """The sum of all reports."""

    def take(self, activity: Hashable, figures: Callable[[], Figures]) -> CacheStats | None:
        """What was added since the last report; None where nothing was.

        Args:
            activity: cheap to make, and another one whenever the figures have changed: asked every step.
            figures: since the process started.
        """
        if activity == self._activity:
            return None
        self._activity = activity
        added: Figures = {}
        for name, values in figures().items():
            if DEFINITIONS[name].kind == "gauge":
                added[name] = values
                continue
            told = self._told.setdefault(name, {})
            added[name] = {labels: value - told.get(labels, 0.0) for labels, value in values.items()}
            told.update(values)
        return CacheStats(added)


class CachePromMetrics(KVConnectorPromMetrics):
    """The metrics in the API server, with vLLM's labels `model_name` and `engine` before their own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families = {
            name: self._family(definition, labelnames) for name, definition in DEFINITIONS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes in the `data` of one engine's `CacheStats`."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, labels, value in _samples(transfer_stats_data):
            child = self._families[name].labels(*engine, *labels)
            if DEFINITIONS[name].kind == "counter":
                child.inc(value)
            else:
                child.set(value)

    def _family(self, definition: Definition, labelnames: list[str]) -> Any:
        if definition.kind == "counter":
            return self._counter_cls(
                name=definition.name,
                documentation=definition.help,
                labelnames=[*labelnames, *definition.labels],
            )
        return self._gauge_cls(
            name=definition.name,
            documentation=definition.help,
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, *definition.labels],
        )


def _samples(figures: Figures) -> Iterator[tuple[str, list[str], float]]:
    for name, values in figures.items():
        for labels, value in values.items():
            yield name, labels.split("/") if DEFINITIONS[name].labels else [], value
