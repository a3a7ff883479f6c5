# SPDX-License-Identifier: Apache-2.0
"""The operator's client against a real API server: what is written, what is kept, and what errors say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import kubernetes
import pytest

from kvcache_operator import FIELD_MANAGER
from kvcache_operator.apply import Applied, apply
from kvcache_operator.cluster import Cluster, ClusterError
from kvcache_operator.render import Manifest, render
from tests.cluster.api import Api
from tests.cluster.kubectl import Kubectl
from tests.operator.resources import SMALLEST, plan_of, with_value

Apply = Callable[..., Manifest]


@pytest.fixture(params=["new", "old"])
def server(request: pytest.FixtureRequest) -> Api:
    api: Api = request.getfixturevalue("api" if request.param == "new" else "old_api")
    return api


@pytest.fixture
def cluster(server: Api) -> Cluster:
    return Cluster(kubernetes.config.new_client_from_config(str(server.kubeconfig)), timeout_s=15)


@pytest.fixture
def applied(cluster: Cluster, server: Api, request: pytest.FixtureRequest) -> Apply:
    """Applies the smallest resource with changes, as a new process would."""
    name = f"client-{abs(hash(request.node.name)) % 10**8}"
    Kubectl(server.kubeconfig)("create", "namespace", name)

    def run(**changes: Any) -> Manifest:
        document = with_value(SMALLEST, "metadata.namespace", name)
        for path, value in changes.items():
            document = with_value(document, f"spec.{path.replace('__', '.')}", value)
        plan = plan_of(document)
        return asyncio.run(apply(cluster, plan, render(plan, cluster.kinds()), Applied()))

    return run


def versions(cluster: Cluster, namespace: str) -> dict[str, str]:
    kinds = {"Secret": "v1", "ConfigMap": "v1", "Service": "v1", "Deployment": "apps/v1"}
    names = {"Secret": "qwen-admin-token", "ConfigMap": "qwen-config"}
    found = {}
    for kind, api_version in kinds.items():
        entry = cluster.get(api_version, kind, namespace, names.get(kind, "qwen"))
        assert entry is not None
        # Controllers write a Deployment's status; its generation is about its spec alone.
        version = "generation" if kind == "Deployment" else "resourceVersion"
        found[kind] = str(entry["metadata"][version])
    return found


def test_applying_twice_changes_nothing(cluster: Cluster, applied: Apply) -> None:
    namespace = applied()["metadata"]["namespace"]
    before = versions(cluster, namespace)
    applied()
    assert versions(cluster, namespace) == before
    deployment = applied(engine__port=9000)
    after = versions(cluster, namespace)
    assert {kind for kind in after if after[kind] != before[kind]} == {"Service", "Deployment"}
    managers = {entry["manager"] for entry in deployment["metadata"]["managedFields"]}
    assert managers - {"kube-controller-manager"} == {FIELD_MANAGER}


def test_a_token_that_is_there_is_kept(cluster: Cluster, applied: Apply) -> None:
    namespace = applied()["metadata"]["namespace"]
    first = cluster.get("v1", "Secret", namespace, "qwen-admin-token")
    applied()
    assert cluster.get("v1", "Secret", namespace, "qwen-admin-token") == first


def test_errors_have_their_status_and_the_servers_sentence(cluster: Cluster, applied: Apply) -> None:
    namespace = applied()["metadata"]["namespace"]
    assert cluster.get("v1", "ConfigMap", namespace, "none") is None
    wrong = render(plan_of(with_value(SMALLEST, "metadata.namespace", namespace))).service
    wrong["spec"]["ports"][0]["port"] = 99999
    with pytest.raises(ClusterError, match=rf"Service {namespace}/qwen: .*port.*65535") as caught:
        cluster.apply(wrong)
    assert (caught.value.status, caught.value.is_final) == (422, True)
    nowhere = render(plan_of(with_value(SMALLEST, "metadata.namespace", "nowhere"))).config_map
    with pytest.raises(ClusterError, match="not found") as caught:
        cluster.apply(nowhere)
    assert (caught.value.status, caught.value.is_final) == (404, False)


def test_kinds_are_those_of_the_server(cluster: Cluster) -> None:
    kinds = cluster.kinds()
    assert kinds.disruption_budget == "policy/v1beta1"
    assert not kinds.pod_monitor
    assert cluster.has("kvcache.dev/v1alpha1", "KVCache")
