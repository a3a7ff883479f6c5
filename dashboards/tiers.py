# SPDX-License-Identifier: Apache-2.0
"""The page of the tiers: how full they are, what they move, and how fast."""

from __future__ import annotations

from dashboards.grafana import Page, Panel, Query, Row, Variable
from dashboards.selectors import POD_VARIABLES, chosen, rate

_TIER = 'tier=~"$tier"'


def _by_tier(expression: str) -> Query:
    return Query(f"sum by (resource, tier) ({expression})", "{{resource}} {{tier}}")


def _direction_rate(numerator: str, denominator: str) -> Query:
    by = "resource, tier, direction"
    return Query(
        f"sum by ({by}) ({rate(numerator, _TIER)}) / (sum by ({by}) ({rate(denominator, _TIER)}) > 0)",
        "{{resource}} {{tier}} {{direction}}",
    )


_ROOM = Row(
    "Room",
    (
        Panel(
            "State",
            "Of each tier of each rank. Pinning serves already; any other state than Ready is a reason why"
            " the tier gives nothing.",
            "short",
            (
                Query(
                    f"sum by (resource, pod, rank, tier, state) ({chosen('kvcache_tier_state', _TIER)})",
                    "{{resource}} {{pod}} rank {{rank}} {{tier}}: {{state}}",
                ),
            ),
            kind="table",
        ),
        Panel(
            "Filled",
            "Share of each tier's capacity that is used, over all ranks. A tier that is full evicts: that"
            " is well as long as the hit rate is.",
            "percentunit",
            (
                Query(
                    f"sum by (resource, tier) ({chosen('kvcache_tier_used_bytes', _TIER)})"
                    f" / (sum by (resource, tier) ({chosen('kvcache_tier_capacity_bytes', _TIER)}) > 0)",
                    "{{resource}} {{tier}}",
                ),
            ),
        ),
        Panel(
            "Bytes held",
            "Bytes that each tier holds, over all ranks.",
            "bytes",
            (_by_tier(chosen("kvcache_tier_used_bytes", _TIER)),),
        ),
        Panel(
            "Objects held",
            "Chunks that each tier holds; each rank holds its part of a chunk as one object.",
            "short",
            (_by_tier(chosen("kvcache_tier_objects", _TIER)),),
        ),
        Panel(
            "Evictions",
            "Objects a second that made room for others. Many of them with a low hit rate: the tier is too"
            " small for what comes again.",
            "short",
            (_by_tier(rate("kvcache_tier_evictions_total", _TIER)),),
        ),
        Panel(
            "No room",
            "Objects a second that found no room since everything else was under a lease. It should be 0.",
            "short",
            (_by_tier(rate("kvcache_tier_rejected_total", _TIER)),),
        ),
        Panel(
            "Not let in",
            "Objects a second that the admission policy or their tenant's quota kept out.",
            "short",
            (_by_tier(rate("kvcache_tier_declined_total", _TIER)),),
        ),
        Panel(
            "Pinned objects",
            "Objects that somebody pinned through the admin: they stay until they are unpinned.",
            "short",
            (_by_tier(chosen("kvcache_tier_pinned_objects", _TIER)),),
        ),
        Panel(
            "Leases",
            "Leases that are held: chunks that requests read or wait for. They end with the requests.",
            "short",
            (_by_tier(chosen("kvcache_tier_leases", _TIER)),),
        ),
        Panel(
            "Tokens by tier",
            "Tokens a second that each tier gave back, counted once by each rank.",
            "short",
            (_by_tier(rate("kvcache_tier_hit_tokens_total", _TIER)),),
        ),
    ),
)

_MOVES = Row(
    "Bytes that move",
    (
        Panel(
            "Traffic",
            "Bytes a second read from and written to each tier, over all ranks.",
            "Bps",
            (
                Query(
                    "sum by (resource, tier, direction)"
                    f" ({rate('kvcache_tier_transfer_bytes_total', _TIER)})",
                    "{{resource}} {{tier}} {{direction}}",
                ),
            ),
        ),
        Panel(
            "Speed while moving",
            "Bytes over the seconds that were spent on them. For host memory compare with the link; much"
            " below it, memory is pageable or the link is shared.",
            "Bps",
            (_direction_rate("kvcache_tier_transfer_bytes_total", "kvcache_tier_transfer_seconds_total"),),
        ),
        Panel(
            "Fetch latency",
            "How long a fetch from each tier takes before its first byte, measured lately, the slowest"
            " rank; 0 where nothing was fetched.",
            "s",
            (
                Query(
                    f"max by (resource, tier) ({chosen('kvcache_tier_fetch_latency_seconds', _TIER)})",
                    "{{resource}} {{tier}}",
                ),
            ),
        ),
        Panel(
            "Fetch speed",
            "How fast a fetch from each tier is after its first byte, measured lately, the slowest rank;"
            " with the latency it decides whether a hit is worth loading.",
            "Bps",
            (
                Query(
                    f"min by (resource, tier) ({chosen('kvcache_tier_fetch_bytes_per_second', _TIER)})",
                    "{{resource}} {{tier}}",
                ),
            ),
        ),
        Panel(
            "Found, and not worth loading",
            "Tokens a second that a tier had, and that were sooner computed than fetched.",
            "short",
            (_by_tier(rate("kvcache_tier_not_worth_tokens_total", _TIER)),),
        ),
        Panel(
            "Objects that were lost on the way",
            "Objects a second that a tier had and did not give, that could not be written, or that were"
            " not written since too much waited before them.",
            "short",
            (
                Query(
                    f"sum by (resource, tier) ({rate('kvcache_tier_fetch_failures_total', _TIER)})",
                    "{{resource}} {{tier}} not given",
                ),
                Query(
                    f"sum by (resource, tier) ({rate('kvcache_tier_write_failures_total', _TIER)})",
                    "{{resource}} {{tier}} not written",
                ),
                Query(
                    f"sum by (resource, tier) ({rate('kvcache_tier_writes_dropped_total', _TIER)})",
                    "{{resource}} {{tier}} dropped",
                ),
            ),
        ),
        Panel(
            "Tokens stored and loaded",
            "Tokens a second, counted once by each rank.",
            "short",
            (
                Query(f"sum by (resource) ({rate('kvcache_stored_tokens_total')})", "{{resource}} stored"),
                Query(f"sum by (resource) ({rate('kvcache_loaded_tokens_total')})", "{{resource}} loaded"),
            ),
        ),
        Panel(
            "Way over the link",
            "How bytes cross between the device and host memory, as each rank measured when it started.",
            "short",
            (
                Query(
                    f"sum by (resource, pod, rank, direction, way) ({chosen('kvcache_way_info')})",
                    "{{resource}} {{pod}} rank {{rank}} {{direction}}: {{way}}",
                ),
            ),
            kind="table",
        ),
        Panel(
            "Way and link, as measured",
            "What the chosen way reached beside a plain page-locked copy, when the rank started. Both are"
            " 0 without a GPU.",
            "Bps",
            (
                Query(
                    f"avg by (resource, direction) ({chosen('kvcache_way_bytes_per_second')})",
                    "{{resource}} {{direction}}, way",
                ),
                Query(
                    f"avg by (resource, direction) ({chosen('kvcache_link_bytes_per_second')})",
                    "{{resource}} {{direction}}, link",
                ),
            ),
        ),
        Panel(
            "Namespaces",
            "Pods and ranks by cache namespace and path. Pods of one resource that share a tier must show one"
            " namespace a rank, or they give each other nothing.",
            "short",
            (
                Query(
                    "sum by (resource, pod, rank, transfer_path, namespace_digest)"
                    f" ({chosen('kvcache_rank_info')})",
                    "{{resource}} {{pod}} rank {{rank}} {{transfer_path}} {{namespace_digest}}",
                ),
            ),
            kind="table",
        ),
    ),
)

TIERS = Page(
    uid="kvcache-tiers",
    title="KV cache: tiers",
    description="How full each tier is, what it moves, and how fast.",
    variables=(
        *POD_VARIABLES,
        Variable("tier", "Tier", 'kvcache_tier_state{namespace=~"$namespace", resource=~"$resource"}'),
    ),
    rows=(_ROOM, _MOVES),
)
