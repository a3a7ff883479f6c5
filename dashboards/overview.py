# SPDX-License-Identifier: Apache-2.0
"""The first page: is the cache worth its memory, and is it well."""

from __future__ import annotations

from dashboards.grafana import Page, Panel, Query, Row
from dashboards.selectors import POD_LABELS, POD_VARIABLES, chosen, rate

_PROMPT = "kvcache_prompt_tokens_total"
_TTFT = "kvcache_time_to_first_token_seconds"
_GIVEN_BACK = 'outcome="hit_cache"'
_WANTED = 'outcome!="hit_gpu"'
_TOKEN_COST = (
    f"sum by ({POD_LABELS}) ({chosen('kvcache_prefill_seconds_total')})"
    f" / sum by ({POD_LABELS}) ({chosen('kvcache_prefill_tokens_total')} > 0)"
)
"""Seconds that a prompt token of each pod takes to compute, over the pod's life."""


def _hit_rate(over: str, by: str = "") -> str:
    given = rate(_PROMPT, _GIVEN_BACK, over=over, function="increase")
    wanted = rate(_PROMPT, _WANTED, over=over, function="increase")
    if by:
        return f"sum by ({by}) ({given}) / scalar(sum({wanted}) > 0)"
    return f"sum({given}) / (sum({wanted}) > 0)"


def _saved_seconds(over: str, function: str) -> str:
    given = rate(_PROMPT, _GIVEN_BACK, over=over, function=function)
    return f"sum(sum by ({POD_LABELS}) ({given}) * ({_TOKEN_COST}))"


def _quantile(quantile: float, outcome: str) -> Query:
    buckets = rate(f"{_TTFT}_bucket", f'outcome="{outcome}"')
    names = {"hit_cache": "hit", "hit_gpu": "hit in vLLM's own cache", "computed": "miss"}
    return Query(
        f"histogram_quantile({quantile}, sum by (le) ({buckets}))",
        f"{names[outcome]}, p{quantile * 100:g}",
    )


_WORTH = Row(
    "What the cache is worth",
    (
        Panel(
            "Hit rate",
            "Of the prompt tokens that vLLM's own prefix cache did not have, the share that this cache"
            " gave back over the shown time. Low with traffic that repeats: see evictions on the tiers"
            " page, and whether prompts begin alike.",
            "percentunit",
            (Query(_hit_rate("$__range"), "hit rate"),),
            kind="stat",
            width=6,
            height=5,
        ),
        Panel(
            "Tokens saved",
            "Prompt tokens that were given back instead of computed, over the shown time.",
            "short",
            (Query(f"sum({rate(_PROMPT, _GIVEN_BACK, over='$__range', function='increase')})", "tokens"),),
            kind="stat",
            width=6,
            height=5,
        ),
        Panel(
            "GPU seconds saved",
            "Tokens saved times what a prompt token costs each pod: the seconds in which prompts were"
            " computed as a whole, divided by their tokens. An estimate: long prompts cost more a token"
            " than short ones.",
            "s",
            (Query(_saved_seconds("$__range", "increase"), "seconds"),),
            kind="stat",
            width=6,
            height=5,
        ),
        Panel(
            "Requests",
            "Requests a second that vLLM scheduled for the first time.",
            "reqps",
            (Query(f"sum({rate('kvcache_requests_total')})", "requests"),),
            kind="stat",
            width=6,
            height=5,
        ),
    ),
)

_HITS = Row(
    "Hits and first tokens",
    (
        Panel(
            "Hit rate by tier",
            "As the hit rate, for each tier that gave tokens back. Together they are the hit rate.",
            "percentunit",
            (Query(_hit_rate("$__rate_interval", by="tier"), "{{tier}}"),),
            stacked=True,
        ),
        Panel(
            "Where prompt tokens come from",
            "Prompt tokens a second: found in vLLM's own cache, given back by a tier of this cache, or"
            " computed.",
            "short",
            (Query(f"sum by (outcome, tier) ({rate(_PROMPT)})", "{{outcome}} {{tier}}"),),
            stacked=True,
        ),
        Panel(
            "Time to first token, median",
            "From arrival in vLLM to the first token, for prompts of which this cache gave back a part"
            " (hit) and for those that were computed as a whole (miss). Waiting for other requests counts.",
            "s",
            (_quantile(0.5, "hit_cache"), _quantile(0.5, "computed")),
        ),
        Panel(
            "Time to first token, 95th percentile",
            "As the median; where a hit is not faster than a miss, requests wait for something other than"
            " prefill.",
            "s",
            (_quantile(0.95, "hit_cache"), _quantile(0.95, "computed")),
        ),
        Panel(
            "GPU seconds saved a second",
            "How many seconds of prefill each second of serving was spared. 1 stands for one more replica's"
            " worth of prefill.",
            "short",
            (Query(_saved_seconds("$__rate_interval", "rate"), "saved"),),
        ),
        Panel(
            "Tokens saved a second",
            "Prompt tokens that were given back instead of computed, for each resource.",
            "short",
            (Query(f"sum by (resource) ({rate(_PROMPT, _GIVEN_BACK)})", "{{resource}}"),),
            stacked=True,
        ),
    ),
)

_HEALTH = Row(
    "Health",
    (
        Panel(
            "Processes that are ready",
            "1 for each process (scheduler and ranks) that answers and is ready. At 0, /readyz of the"
            " admin says why.",
            "short",
            (
                Query(
                    f"min by (resource, process) ({chosen('kvcache_process_ready')})",
                    "{{resource}} {{process}}",
                ),
            ),
        ),
        Panel(
            "Failures",
            "What was caught or lost, a second, by reason. Each costs the time of a miss, never an answer;"
            " the troubleshooting page lists the reasons.",
            "short",
            (
                Query(
                    f"sum by (reason) ({rate('kvcache_failures_total')}) or vector(0)",
                    "{{reason}}",
                ),
            ),
        ),
        Panel(
            "Tokens that could not be loaded",
            "Tokens a second whose KV was promised and did not come; vLLM computed them.",
            "short",
            (Query(f"sum by (resource) ({rate('kvcache_load_failed_tokens_total')})", "{{resource}}"),),
        ),
        Panel(
            "Lookups",
            "How long the scheduler waits for a lookup on average.",
            "s",
            (
                Query(
                    f"sum({rate('kvcache_lookup_seconds_total')})"
                    f" / (sum({rate('kvcache_lookups_total')}) > 0)",
                    "mean",
                ),
            ),
        ),
        Panel(
            "Lookups without an answer",
            "Lookups a second in which a rank did not answer in time: a miss each.",
            "short",
            (Query(f"sum by (resource) ({rate('kvcache_lookup_timeouts_total')})", "{{resource}}"),),
        ),
        Panel(
            "Configuration in effect",
            "1 for each process that runs what the mounted configuration says; at 0 a part of it waits for"
            " a restart, or was refused. /v1/config of the admin says which.",
            "short",
            (
                Query(
                    f"min by (resource, process) ({chosen('kvcache_config_in_effect')})",
                    "{{resource}} {{process}}",
                ),
            ),
        ),
        Panel(
            "Flushes",
            "Flushes that ended in the shown time, by tier; an incomplete one left something behind.",
            "short",
            (
                Query(
                    "sum by (tier, result)"
                    f" ({rate('kvcache_flushes_total', over='$__range', function='increase')})",
                    "{{tier}} {{result}}",
                ),
            ),
        ),
        Panel(
            "Requests to the admin",
            "Requests a second to the admin sidecar, by route and status.",
            "reqps",
            (
                Query(
                    f"sum by (route, status) ({rate('kvcache_admin_requests_total')})", "{{route}} {{status}}"
                ),
            ),
        ),
    ),
)

OVERVIEW = Page(
    uid="kvcache-overview",
    title="KV cache: overview",
    description="What the cache gives back, what that saves, and whether it is well.",
    variables=POD_VARIABLES,
    rows=(_WORTH, _HITS, _HEALTH),
)
