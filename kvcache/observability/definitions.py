# SPDX-License-Identifier: Apache-2.0
"""Every metric of the cache, as data: what is exported, what dashboards and alerts name, what the docs list.

A rank counts the tokens whose part it holds, so with several ranks every token is counted once by each; the
scheduler counts each token once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal["tokens", "bytes", "bytes/s", "seconds", "requests", "objects", "events", "state"]
"""`state`: 1 while what the labels say is so, else 0 or absent."""

PREFIX = "kvcache_"


@dataclass(frozen=True)
class Definition:
    """One metric.

    Attributes:
        name: as Prometheus shows it; counters end in `_total`, histograms by `_bucket`, `_sum` and `_count`.
        help: one or two sentences.
    """

    name: str
    kind: Kind
    unit: Unit
    labels: tuple[str, ...]
    help: str

    @property
    def key(self) -> str:
        """The name without prefix and `_total`, by which samples are filed."""
        return self.name.removeprefix(PREFIX).removesuffix("_total")

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus stores it."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))


def _counter(name: str, unit: Unit, labels: str, text: str) -> Definition:
    return Definition(f"{PREFIX}{name}_total", "counter", unit, tuple(labels.split()), text)


def _gauge(name: str, unit: Unit, labels: str, text: str) -> Definition:
    return Definition(f"{PREFIX}{name}", "gauge", unit, tuple(labels.split()), text)


def _histogram(name: str, unit: Unit, labels: str, text: str) -> Definition:
    return Definition(f"{PREFIX}{name}", "histogram", unit, tuple(labels.split()), text)


LABELS = {
    "direction": "store, load, short_load or quiet_load (outside of the batch) for a way; read or write for "
    "a tier",
    "outcome": "hit_gpu (vLLM's own prefix cache), hit_cache (this cache) or computed",
    "process": "scheduler, or rank0, rank1, ...",
    "rank": "number of the worker, of tensor x pipeline parallelism",
    "reason": "in CamelCase",
    "result": "of a flush: complete or incomplete; of a configuration: accepted or refused",
    "route": "the admin's route, such as /v1/stats; other for what is none",
    "state": "Ready, or why not, in CamelCase",
    "status": "the status of HTTP",
    "tier": "cpu, disk, remote or the name of a plug-in; gpu for vLLM's own cache",
    "transfer_path": "cuda, host or none",
    "namespace_digest": "of all that must be equal for two KVs to be interchangeable",
    "version": "of the package kvcache",
    "way": "host, staged, direct or strided_dma",
}
"""Labels to what their values are."""

DEFINITIONS = (
    # Processes
    _gauge("build_info", "state", "version", "1; the version of the admin sidecar."),
    _gauge("process_up", "state", "process", "1 if the process answered the admin sidecar, else 0."),
    _gauge("process_ready", "state", "process", "1 if the process answered and is ready, else 0."),
    _counter("failures", "events", "process reason", "What a guard caught or a request lost, by reason."),
    # Requests
    _counter("requests", "requests", "", "Requests that were scheduled at least once."),
    _counter(
        "prompt_tokens",
        "tokens",
        "outcome tier",
        "Prompt tokens by outcome, those of this cache by tier too. They add up to all prompts' tokens.",
    ),
    _histogram(
        "time_to_first_token_seconds",
        "seconds",
        "outcome",
        "From a request's arrival in vLLM to its first token, as the scheduler sees it, by the best outcome"
        " of any part of its prompt.",
    ),
    _counter("prefill_tokens", "tokens", "", "Tokens of prompts that were computed as a whole."),
    _counter(
        "prefill_seconds",
        "seconds",
        "",
        "Time in which at least one of those prompts was being computed; divided by prefill_tokens, what a"
        " token costs.",
    ),
    _counter("lookups", "events", "", "Lookups that the scheduler made."),
    _counter("lookup_seconds", "seconds", "", "Time that the scheduler waited for lookups."),
    _counter("lookup_timeouts", "events", "", "Lookups in which a rank did not answer in time."),
    _counter(
        "lookup_waits",
        "events",
        "",
        "Lookups whose requests waited outside of vLLM's batch for what slower tiers have.",
    ),
    _counter("lookup_wait_seconds", "seconds", "", "Time that those requests waited."),
    _counter(
        "lookup_waits_expired",
        "events",
        "",
        "Of those lookups, the ones that took what was there since a tier's deadline was over.",
    ),
    # Ranks
    _gauge(
        "rank_info",
        "state",
        "rank transfer_path namespace_digest",
        "1; how the rank moves bytes, and its cache namespace.",
    ),
    _gauge(
        "way_info",
        "state",
        "rank direction way",
        "1; how the rank's bytes cross the link, as measured when it started.",
    ),
    _gauge(
        "way_bytes_per_second", "bytes/s", "rank direction", "What that way reached when it was measured."
    ),
    _gauge(
        "link_bytes_per_second",
        "bytes/s",
        "rank direction",
        "A plain page-locked copy in the same measurement.",
    ),
    _counter("stored_tokens", "tokens", "rank", "Tokens whose KV was stored."),
    _counter("loaded_tokens", "tokens", "rank", "Tokens whose KV was loaded."),
    _counter(
        "load_failed_tokens",
        "tokens",
        "rank",
        "Tokens whose KV was wanted but not loaded; vLLM computes them.",
    ),
    # Tiers
    _gauge("tier_state", "state", "rank tier state", "1 for the state in which the tier is."),
    _gauge("tier_capacity_bytes", "bytes", "rank tier", "Bytes that the tier may hold; 0 without a bound."),
    _gauge("tier_used_bytes", "bytes", "rank tier", "Bytes that the tier holds."),
    _gauge("tier_objects", "objects", "rank tier", "Objects that the tier holds."),
    _gauge("tier_leases", "objects", "rank tier", "Leases that are held now; what is leased is not evicted."),
    _counter("tier_evictions", "objects", "rank tier", "Objects that made room for others."),
    _gauge(
        "tier_pinned_objects", "objects", "rank tier", "Objects that somebody pinned; they are not evicted."
    ),
    _counter("tier_rejected", "objects", "rank tier", "Objects that found no room."),
    _counter(
        "tier_declined",
        "objects",
        "rank tier",
        "Objects that the admission policy or their tenant's quota did not let in.",
    ),
    _counter(
        "tier_fetch_failures", "objects", "rank tier", "Objects that the tier said it had and did not give."
    ),
    _counter("tier_write_failures", "objects", "rank tier", "Objects that could not be written."),
    _counter(
        "tier_writes_dropped",
        "objects",
        "rank tier",
        "Objects that were not written, since too much waited before them.",
    ),
    _counter(
        "tier_not_worth_tokens",
        "tokens",
        "rank tier",
        "Tokens that were found in the tier, but sooner computed than fetched.",
    ),
    _gauge(
        "tier_fetch_latency_seconds",
        "seconds",
        "rank tier",
        "How long a fetch takes before its first byte, measured lately; 0 where nothing was.",
    ),
    _gauge(
        "tier_fetch_bytes_per_second",
        "bytes/s",
        "rank tier",
        "How fast a fetch is from then on, measured lately; 0 where nothing was.",
    ),
    _counter("tier_hit_tokens", "tokens", "rank tier", "Tokens that were loaded from the tier."),
    _counter(
        "tier_transfer_bytes", "bytes", "rank tier direction", "Bytes read from and written to the tier."
    ),
    _counter("tier_transfer_seconds", "seconds", "rank tier direction", "Time spent on reading and writing."),
    # The admin sidecar
    _counter("admin_requests", "requests", "route status", "Requests that the admin answered."),
    _counter("flushes", "events", "tier result", "Flushes of a tier that ended."),
    _gauge("config_valid", "state", "", "1 if the mounted configuration can be used, 0 if it was refused."),
    _counter("config_changes", "events", "result", "Changes of the mounted configuration that were read."),
    _gauge(
        "config_in_effect",
        "state",
        "process",
        "1 if the process runs what the mounted configuration says, 0 while a part of it waits for a restart"
        " or could not be handed over.",
    ),
)
