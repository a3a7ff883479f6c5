# SPDX-License-Identifier: Apache-2.0
"""Against a real API server: what is written, what is kept, and the operator's process as a whole."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes
import pytest
from kubernetes.dynamic import DynamicClient

from kvcache_operator import API_VERSION, FIELD_MANAGER, KIND
from kvcache_operator.apply import apply
from kvcache_operator.cluster import Cluster, ClusterError
from kvcache_operator.crd import crd
from kvcache_operator.render import Manifest, Rendered
from tests.operator.api_server import api_server, missing
from tests.operator.resources import ROOT, SMALLEST, rendered_of, with_value
from tests.operator.test_reconcile import conditions
from tests.operator.toy_run import eventually

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with api_server(tmp_path_factory.mktemp("api-server")) as path:
        yield path


@pytest.fixture(scope="module")
def client(kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> DynamicClient:
    """The server as a user sees it, with our definition installed."""
    api_client = kubernetes.config.new_client_from_config(str(kubeconfig))
    cache = tmp_path_factory.mktemp("discovery") / "cache.json"
    dynamic = DynamicClient(api_client, cache_file=str(cache))
    definitions = dynamic.resources.get(
        api_version="apiextensions.k8s.io/v1", kind="CustomResourceDefinition"
    )
    definitions.create(body=crd())

    def is_established() -> bool:
        found = definitions.get(name=crd()["metadata"]["name"]).to_dict()
        return any(c["type"] == "Established" for c in found.get("status", {}).get("conditions") or ())

    eventually(is_established)
    dynamic.resources.invalidate_cache()
    return dynamic


@pytest.fixture
def namespace(client: DynamicClient, request: pytest.FixtureRequest) -> str:
    """A namespace of the test's own."""
    name = f"t{abs(hash(request.node.name)) % 10**8}"
    client.resources.get(api_version="v1", kind="Namespace").create(body={"metadata": {"name": name}})
    return name


@pytest.fixture
def cluster(client: DynamicClient, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    # kubernetes.config reads the variable when it is imported.
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    return Cluster.connect(timeout_s=15)


def rendered_in(namespace: str, **changes: Any) -> Rendered:
    document = with_value(SMALLEST, "metadata.namespace", namespace)
    for path, value in changes.items():
        document = with_value(document, f"spec.{path.replace('__', '.')}", value)
    return rendered_of(document)


def get(client: DynamicClient, api_version: str, kind: str, namespace: str, name: str) -> Manifest:
    found: Manifest = (
        client.resources.get(api_version=api_version, kind=kind).get(name=name, namespace=namespace).to_dict()
    )
    return found


def test_applying_twice_changes_nothing(client: DynamicClient, cluster: Cluster, namespace: str) -> None:
    def versions() -> dict[str, str]:
        kinds = {"Secret": "v1", "ConfigMap": "v1", "Service": "v1", "Deployment": "apps/v1"}
        names = {"Secret": "qwen-admin-token", "ConfigMap": "qwen-config"}
        return {
            kind: get(client, api, kind, namespace, names.get(kind, "qwen"))["metadata"]["resourceVersion"]
            for kind, api in kinds.items()
        }

    asyncio.run(apply(cluster, rendered_in(namespace)))
    before = versions()
    asyncio.run(apply(cluster, rendered_in(namespace)))
    assert versions() == before
    deployment = asyncio.run(apply(cluster, rendered_in(namespace, engine__port=9000)))
    after = versions()
    assert {kind for kind in after if after[kind] != before[kind]} == {"Service", "Deployment"}
    managers = {entry["manager"] for entry in deployment["metadata"]["managedFields"]}
    assert managers == {FIELD_MANAGER}


def test_what_others_own_stays_and_what_is_ours_comes_back(
    client: DynamicClient, cluster: Cluster, namespace: str
) -> None:
    asyncio.run(apply(cluster, rendered_in(namespace)))
    deployments = client.resources.get(api_version="apps/v1", kind="Deployment")
    change = {"metadata": {"annotations": {"example.org/mine": "1"}}, "spec": {"replicas": 5}}
    deployments.patch(
        body=change, name="qwen", namespace=namespace, content_type="application/merge-patch+json"
    )
    deployment = asyncio.run(apply(cluster, rendered_in(namespace)))
    assert deployment["spec"]["replicas"] == 1
    assert deployment["metadata"]["annotations"]["example.org/mine"] == "1"


def test_a_token_that_is_there_is_kept(client: DynamicClient, cluster: Cluster, namespace: str) -> None:
    secrets = client.resources.get(api_version="v1", kind="Secret")
    own = {"metadata": {"name": "qwen-admin-token", "namespace": namespace}, "data": {"token": "bWluZQ=="}}
    secrets.create(body=own)
    asyncio.run(apply(cluster, rendered_in(namespace)))
    assert get(client, "v1", "Secret", namespace, "qwen-admin-token")["data"]["token"] == "bWluZQ=="


def test_errors_have_their_status_and_the_servers_sentence(cluster: Cluster, namespace: str) -> None:
    assert cluster.get("v1", "ConfigMap", namespace, "none") is None
    wrong = rendered_in(namespace).service
    wrong["spec"]["ports"][0]["port"] = 99999
    with pytest.raises(ClusterError, match=rf"Service {namespace}/qwen: .*port.*65535") as caught:
        cluster.apply(wrong)
    assert caught.value.status == 422
    assert caught.value.is_final
    nowhere = rendered_in("nowhere").config_map
    with pytest.raises(ClusterError, match="not found") as caught:
        cluster.apply(nowhere)
    assert (caught.value.status, caught.value.is_final) == (404, False)


def test_no_server_is_an_error_without_status(tmp_path: Path) -> None:
    configuration = kubernetes.client.Configuration()
    configuration.host = "http://127.0.0.1:9"
    configuration.retries = False
    with pytest.raises(ClusterError, match="discovery") as caught:
        Cluster(kubernetes.client.ApiClient(configuration), timeout_s=2)
    assert caught.value.status is None


def test_the_server_fills_in_defaults_and_refuses_what_does_not_fit(
    client: DynamicClient, namespace: str
) -> None:
    resources = client.resources.get(api_version=API_VERSION, kind=KIND)
    created = resources.create(
        body=with_value(SMALLEST, "metadata.namespace", namespace), namespace=namespace
    ).to_dict()
    assert created["spec"]["replicas"] == 1
    assert created["spec"]["engine"]["startupTimeout"] == "30m"
    assert created["spec"]["cache"]["chunkTokens"] == 256
    bad = with_value(
        with_value(SMALLEST, "metadata", {"name": "bad"}), "spec.cache.tiers.cpu.capacity", "4GB"
    )
    with pytest.raises(
        kubernetes.dynamic.exceptions.UnprocessibleEntityError, match=r"spec\.cache\.tiers\.cpu\.capacity"
    ):
        resources.create(body=bad, namespace=namespace)


@pytest.fixture
def operator(client: DynamicClient, kubeconfig: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The operator as it runs outside of a cluster."""
    env = {**os.environ, "KUBECONFIG": str(kubeconfig), "KVCACHE_OPERATOR_RETRY_S": "0.5"}
    with (tmp_path / "operator.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvcache_operator", "run"], cwd=ROOT, env=env, stdout=log, stderr=log
        )
        yield process
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
    sys.stdout.write((tmp_path / "operator.log").read_text())


@pytest.mark.usefixtures("operator")
def test_a_resource_lives_its_life(client: DynamicClient, namespace: str) -> None:
    resources = client.resources.get(api_version=API_VERSION, kind=KIND)
    deployments = client.resources.get(api_version="apps/v1", kind="Deployment")

    def status() -> dict[str, Any]:
        return get(client, API_VERSION, KIND, namespace, "qwen").get("status") or {}

    def change(spec: dict[str, Any]) -> None:
        resources.patch(
            body={"spec": spec}, name="qwen", namespace=namespace, content_type="application/merge-patch+json"
        )

    resources.create(body=with_value(SMALLEST, "metadata.namespace", namespace), namespace=namespace)
    eventually(lambda: status().get("observedGeneration") == 1)
    body = get(client, API_VERSION, KIND, namespace, "qwen")
    assert "finalizers" not in body["metadata"]
    deployment = get(client, "apps/v1", "Deployment", namespace, "qwen")
    assert deployment["metadata"]["ownerReferences"][0]["uid"] == body["metadata"]["uid"]
    assert conditions(status())["Ready"] == ("False", "NoReadyPods")

    # No controller runs here: the test plays the one of Deployments.
    seen = {"observedGeneration": deployment["metadata"]["generation"], "replicas": 1}
    seen |= {"updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1}
    deployments.status.patch(
        body={"status": seen}, name="qwen", namespace=namespace, content_type="application/merge-patch+json"
    )
    eventually(lambda: conditions(status())["Ready"] == ("True", "AllPodsReady"))

    change({"cache": {"chunkTokens": 512}})
    eventually(lambda: status()["observedGeneration"] == 2)
    config = get(client, "v1", "ConfigMap", namespace, "qwen-config")["data"]["config.yaml"]
    assert "chunk_size: 512\n" in config

    # Schema-valid, but not for this block size: a condition with the field, and nothing is touched.
    before = get(client, "apps/v1", "Deployment", namespace, "qwen")["metadata"]["generation"]
    change({"engine": {"args": ["--block-size=1024"]}})
    eventually(lambda: status()["observedGeneration"] == 3)
    (accepted,) = (entry for entry in status()["conditions"] if entry["type"] == "Accepted")
    assert accepted["message"].startswith("spec.cache.chunkTokens: 512 tokens are no multiple")
    assert get(client, "apps/v1", "Deployment", namespace, "qwen")["metadata"]["generation"] == before

    change({"engine": {"args": []}})
    eventually(lambda: conditions(status())["Accepted"] == ("True", "Valid"))
    resources.delete(name="qwen", namespace=namespace)
    with pytest.raises(kubernetes.dynamic.exceptions.NotFoundError):
        get(client, API_VERSION, KIND, namespace, "qwen")


def test_a_restarted_operator_catches_up(
    client: DynamicClient, namespace: str, request: pytest.FixtureRequest
) -> None:
    """What was made while no operator ran is found when one starts."""
    resources = client.resources.get(api_version=API_VERSION, kind=KIND)
    resources.create(body=with_value(SMALLEST, "metadata.namespace", namespace), namespace=namespace)
    request.getfixturevalue("operator")
    eventually(lambda: get(client, API_VERSION, KIND, namespace, "qwen").get("status"))
    assert get(client, "apps/v1", "Deployment", namespace, "qwen")["spec"]["replicas"] == 1
