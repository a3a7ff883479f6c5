# SPDX-License-Identifier: Apache-2.0
"""Which series a page reads: those of the chosen pods.

`namespace`, `resource` and `pod` are labels of the scraped target, set by the scrape configuration
(`dashboards/prometheus.yaml`, or the PodMonitor in `manifests/monitoring`); the cache's own come after.
"""

from __future__ import annotations

from dashboards.grafana import Variable

PODS = 'namespace=~"$namespace", resource=~"$resource", pod=~"$pod"'
POD_LABELS = "namespace, resource, pod"

POD_VARIABLES = (
    Variable("namespace", "Namespace", "kvcache_build_info"),
    Variable("resource", "KVCache", 'kvcache_build_info{namespace=~"$namespace"}'),
    Variable("pod", "Pod", 'kvcache_build_info{namespace=~"$namespace", resource=~"$resource"}'),
)


def rate(metric: str, *matchers: str, over: str = "$__rate_interval", function: str = "rate") -> str:
    """The growth of a counter of the chosen pods, a second, or as a whole with `function="increase"`."""
    return f"{function}({chosen(metric, *matchers)}[{over}])"


def chosen(metric: str, *matchers: str) -> str:
    """The series of a metric of the chosen pods."""
    return f"{metric}{{{', '.join([PODS, *matchers])}}}"
