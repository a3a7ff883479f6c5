# SPDX-License-Identifier: Apache-2.0
"""Nothing that waits for the API server runs on the thread of the event loop: one slow answer would hold up
the watch and every other resource."""

from __future__ import annotations

import threading
from typing import Any

from kvcache_operator.cluster import Cluster
from kvcache_operator.flush import FLUSH_ANNOTATION
from tests.operator.fake_cluster import FakeCluster
from tests.operator.resources import with_value
from tests.operator.test_reconcile import BODY, KEY, Bench

REQUESTS = (
    "apply",
    "create",
    "create_if_absent",
    "get",
    "list",
    "delete",
    "patch",
    "patch_status",
    "replace",
)


class WatchedCluster(FakeCluster):
    """Notes which thread asks."""

    def __init__(self) -> None:
        super().__init__()
        self.loop_thread = threading.get_ident()
        self.asked: set[str] = set()
        self.on_the_loop: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in REQUESTS:
            self.asked.add(name)
            found = super().__getattribute__(name)

            def call(*arguments: Any, **named: Any) -> Any:
                if threading.get_ident() == self.loop_thread:
                    self.on_the_loop.add(name)
                return found(*arguments, **named)

            return call
        return super().__getattribute__(name)


def test_every_request_is_sent_from_another_thread() -> None:
    cluster = WatchedCluster()
    body = with_value(with_value(BODY, "spec.reclaimPolicy", "Delete"), "spec.replicas", 2)
    disk = {"capacity": "1Gi", "volume": {"claimTemplate": {"size": "2Gi"}}}
    bench = Bench(with_value(body, "spec.cache.tiers.disk", disk), cluster)
    bench.annotate(**{FLUSH_ANNOTATION: "x"})
    bench.run()
    bench.run(replicas=1, networkPolicy={"mode": "Disabled"}, suspend=True)
    bench.run(replicasMode="External", suspend=False)
    cluster.objects[KEY]["metadata"]["deletionTimestamp"] = "2030-01-01T12:00:00Z"
    bench.outcome()
    assert cluster.on_the_loop == set()
    assert cluster.asked >= {"apply", "create", "get", "list", "delete", "patch", "patch_status"}
    assert set(REQUESTS) <= set(dir(Cluster))
