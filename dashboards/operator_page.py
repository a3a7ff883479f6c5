# SPDX-License-Identifier: Apache-2.0
"""The operator's page: does it work, does it keep up, and does the API server let it."""

from __future__ import annotations

from dashboards.grafana import Page, Panel, Query, Row, Variable

_PODS = 'namespace=~"$namespace", pod=~"$pod"'


def _chosen(metric: str, *matchers: str) -> str:
    return f"{metric}{{{', '.join([_PODS, *matchers])}}}"


def _rate(metric: str, *matchers: str) -> str:
    return f"rate({_chosen(metric, *matchers)}[$__rate_interval])"


def _pass_quantile(quantile: float) -> Query:
    buckets = _rate("kvcache_operator_reconcile_seconds_bucket")
    return Query(f"histogram_quantile({quantile}, sum by (le) ({buckets}))", f"p{quantile * 100:g}")


_WORK = Row(
    "Work",
    (
        Panel(
            "Leaders",
            "Operators that work; the others wait for their lease. It should be 1.",
            "short",
            (Query(f"sum({_chosen('kvcache_operator_leader')})", "leaders"),),
            kind="stat",
            width=6,
            height=5,
        ),
        Panel(
            "Resources",
            "KVCache resources that the working operator saw when it last looked at all.",
            "short",
            (Query(f"max({_chosen('kvcache_operator_resources')})", "resources"),),
            kind="stat",
            width=6,
            height=5,
        ),
        Panel(
            "Waiting",
            "Resources that wait for a worker now.",
            "short",
            (Query(f"sum({_chosen('kvcache_operator_queue_depth')})", "waiting"),),
            kind="stat",
            width=6,
            height=5,
        ),
        Panel(
            "Passes a second",
            "Passes over a resource a second.",
            "short",
            (Query(f"sum({_rate('kvcache_operator_reconciles_total')})", "passes"),),
            kind="stat",
            width=6,
            height=5,
        ),
        Panel(
            "Passes by result",
            "Passes a second by how they ended. api_error: the API server refused or was not there, error:"
            " a fault of the operator, whose log has it. Both are tried again.",
            "short",
            (Query(f"sum by (result) ({_rate('kvcache_operator_reconciles_total')})", "{{result}}"),),
            stacked=True,
        ),
        Panel(
            "Time of a pass",
            "How long one pass over a resource takes.",
            "s",
            (_pass_quantile(0.5), _pass_quantile(0.95)),
        ),
        Panel(
            "Queue",
            "Resources that wait for a worker, and how often a second resources were asked for. A depth"
            " that stays above 0 means that passes are too slow.",
            "short",
            (
                Query(f"sum({_chosen('kvcache_operator_queue_depth')})", "waiting"),
                Query(f"sum({_rate('kvcache_operator_queue_adds_total')})", "asked for a second"),
            ),
        ),
        Panel(
            "Missed changes",
            "Changes a second that the watch did not tell and a look at all resources found.",
            "short",
            (Query(f"sum({_rate('kvcache_operator_missed_changes_total')})", "missed"),),
        ),
    ),
)

_SURROUNDINGS = Row(
    "API server and process",
    (
        Panel(
            "Requests by status",
            "Requests a second to the API server, by the status of HTTP; none is no answer at all, 409 a"
            " conflict that is tried again.",
            "reqps",
            (Query(f"sum by (status) ({_rate('kvcache_operator_api_requests_total')})", "{{status}}"),),
            stacked=True,
        ),
        Panel(
            "Requests by verb and kind",
            "Requests a second to the API server, by what they are about.",
            "reqps",
            (
                Query(
                    f"sum by (verb, kind) ({_rate('kvcache_operator_api_requests_total')})",
                    "{{verb}} {{kind}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Memory",
            "Resident memory of each operator.",
            "bytes",
            (
                Query(
                    f"process_resident_memory_bytes{{{_PODS}}} and on (namespace, pod)"
                    f" {_chosen('kvcache_operator_leader')}",
                    "{{pod}}",
                ),
            ),
        ),
        Panel(
            "Cores",
            "Cores that each operator keeps busy.",
            "short",
            (
                Query(
                    f"{_rate('process_cpu_seconds_total')} and on (namespace, pod)"
                    f" {_chosen('kvcache_operator_leader')}",
                    "{{pod}}",
                ),
            ),
        ),
    ),
)

OPERATOR = Page(
    uid="kvcache-operator",
    title="KV cache: operator",
    description="Whether the operator works, keeps up, and gets along with the API server.",
    variables=(
        Variable("namespace", "Namespace", "kvcache_operator_leader"),
        Variable("pod", "Pod", 'kvcache_operator_leader{namespace=~"$namespace"}'),
    ),
    rows=(_WORK, _SURROUNDINGS),
)
