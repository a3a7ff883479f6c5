# SPDX-License-Identifier: Apache-2.0
"""Faults of the API, ends of the operator, many resources, and two operators."""

from __future__ import annotations

import functools
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.api import Api
from tests.cluster.kubectl import Kubectl, eventually
from tests.cluster.operators import ROOT, Operator, Operators
from tests.cluster.proxy import Seen, granted, rules_of
from tests.cluster.test_life import conditions, make_ready
from tests.operator.resources import SMALLEST, with_value

KINDS = ("deployment", "statefulset", "configmap", "service", "networkpolicy", "poddisruptionbudget")
FULLER = with_value(with_value(SMALLEST, "spec.replicas", 2), "spec.cache.tiers.disk", {"capacity": "1Gi"})


def children(kubectl: Kubectl, namespace: str) -> dict[str, Any]:
    """What the operator has made, without what servers and owners add."""
    found = {}
    for kind in KINDS:
        for entry in kubectl.items(kind, namespace):
            if entry["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by") != "kvcache-operator":
                continue
            body = {key: value for key, value in entry.items() if key in ("spec", "data")}
            spec = body.get("spec", {})
            spec.pop("clusterIP", None)
            spec.pop("clusterIPs", None)
            found[f"{kind}/{entry['metadata']['name']}"] = json.loads(
                json.dumps(body).replace(namespace, "NAMESPACE")
            )
    return found


@pytest.fixture(scope="module")
def expected(api: Api, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The children of `FULLER` when nothing goes wrong."""
    kubectl = Kubectl(api.kubeconfig)
    kubectl("create", "namespace", "undisturbed")
    with Operators(api, tmp_path_factory.mktemp("undisturbed")) as operators:
        operators.start(namespaces='["undisturbed"]')
        kubectl.apply(FULLER, "-n", "undisturbed")
        eventually(lambda: len(children(kubectl, "undisturbed")) == 7)
    return children(kubectl, "undisturbed")


@pytest.fixture
def second(kubectl: Kubectl, namespace: str) -> str:
    name = f"{namespace}-b"
    kubectl("create", "namespace", name)
    return name


@pytest.mark.parametrize("fault", [409, 410, 429, 500, "cut"])
def test_faults_lose_nothing(
    kubectl: Kubectl,
    operators: Operators,
    namespace: str,
    expected: dict[str, Any],
    second: str,
    fault: int | str,
) -> None:
    """Writes and reads fail, and watches are cut, while a resource is made and changed."""
    rng, proxy = random.Random(5), operators.proxy()
    lock, faults = threading.Lock(), [0]

    def chance(seen: Seen) -> int | str | None:
        with lock:
            if seen.verb == "watch":
                return fault if fault in (410, "cut") and rng.random() < 0.3 else None
            if rng.random() < (0.4 if seen.is_write else 0.1):
                faults[0] += 1
                return fault
            return None

    operator = operators.start(
        proxy, namespaces=json.dumps([second]), retry_s="0.05", retry_max_s="0.5", resync_s="5"
    )
    assert operator.url
    proxy.fault = chance
    kubectl.apply(with_value(FULLER, "spec.cache.chunkTokens", 128), "-n", second)
    kubectl.apply(FULLER, "-n", second)
    eventually(lambda: children(kubectl, second) == expected)
    eventually(
        lambda: (kubectl.get("kvc", "qwen", second) or {}).get("status", {}).get("observedGeneration") == 2
    )
    assert faults[0] > 3
    assert operator.metric("kvcache_operator_reconciles_total", result="error") == 0


def test_an_end_at_each_write_converges(
    kubectl: Kubectl, operators: Operators, namespace: str, expected: dict[str, Any]
) -> None:
    """Operators are killed when the server has done their n-th write and they do not know that yet, for each
    n; then one that follows finds all that was left half done."""
    places = []
    for step in range(1, 30):
        place = f"{namespace}-{step}"
        kubectl("create", "namespace", place)
        places.append(place)
        killed, proxy = threading.Event(), operators.proxy()
        operator = operators.start(proxy, namespaces=json.dumps([place]))
        proxy.before_answer = functools.partial(_kill, operator, [step], killed)
        kubectl.apply(FULLER, "-n", place)
        eventually(functools.partial(_is_over, killed, kubectl, place))
        if not killed.is_set():
            operator.kill()
            break
        operator.process.wait()
    assert len(places) >= 9
    operators.start(namespaces=json.dumps(places))
    for place in places:
        eventually(functools.partial(_is_observed, kubectl, place))
        assert children(kubectl, place) == expected


def _kill(operator: Operator, left: list[int], killed: threading.Event, seen: Seen) -> None:
    """Kills the operator at the write whose number is in `left`."""
    if seen.is_write:
        left[0] -= 1
        if left[0] == 0:
            operator.process.kill()
            killed.set()


def _is_over(killed: threading.Event, kubectl: Kubectl, namespace: str) -> bool:
    return killed.is_set() or _is_observed(kubectl, namespace)


def _is_observed(kubectl: Kubectl, namespace: str) -> bool:
    found = kubectl.get("kvc", "qwen", namespace) or {}
    seen, newest = (
        (found.get("status", {}).get("observedGeneration"), found["metadata"]["generation"])
        if found
        else (0, 1)
    )
    return bool(seen == newest)


def test_reconciles_without_a_change_write_nothing(
    kubectl: Kubectl, operators: Operators, namespace: str
) -> None:
    proxy = operators.proxy()
    operator = operators.start(proxy, namespaces=json.dumps([namespace]), resync_s="2")
    kubectl.apply(FULLER, "-n", namespace)
    eventually(lambda: len(kubectl.items("pod", namespace)) == 2)
    make_ready(kubectl, namespace)
    eventually(lambda: conditions(kubectl, namespace).get("Ready") == ("True", "AllPodsReady"))
    time.sleep(2.5)

    def versions() -> dict[str, str]:
        return {
            f"{kind}/{entry['metadata']['name']}": entry["metadata"]["resourceVersion"]
            for kind in (*KINDS, "secret")
            for entry in kubectl.items(kind, namespace)
        }

    before, count = versions(), operator.metric("kvcache_operator_reconciles_total", result="ok")
    status = (kubectl.get("kvc", "qwen", namespace) or {})["status"]
    for number in range(50):
        kubectl("annotate", "kvc", "qwen", f"example.org/n={number}", "--overwrite", "-n", namespace)
    eventually(lambda: operator.metric("kvcache_operator_reconciles_total", result="ok") >= count + 40)
    assert versions() == before
    assert (kubectl.get("kvc", "qwen", namespace) or {})["status"] == status


def test_two_hundred_resources(
    kubectl: Kubectl,
    operators: Operators,
    namespace: str,
) -> None:
    operator = operators.start(namespaces=json.dumps([namespace]))
    assert operator.url
    documents = [with_value(SMALLEST, "metadata.name", f"r{number}") for number in range(200)]
    text = "".join(f"---\n{yaml.safe_dump(document)}" for document in documents)
    begun = time.monotonic()
    kubectl("create", "-n", namespace, "-f", "-", text=text)
    made = time.monotonic()

    def settled() -> bool:
        found = kubectl.items("kvc", namespace)
        return len(found) == 200 and all(entry.get("status", {}).get("observedGeneration") for entry in found)

    eventually(settled)
    took, memory = time.monotonic() - begun, operator.resident_bytes()
    assert len(kubectl.items("deployment", namespace)) == 200
    sys.stdout.write(f"created in {made - begun:.1f} s, settled in {took:.1f} s, {memory >> 20} MiB\n")
    assert memory < 300 << 20
    assert operator.metric("kvcache_operator_reconciles_total", result="error") == 0


def test_of_two_operators_one_works(kubectl: Kubectl, operators: Operators, namespace: str) -> None:
    settings: Any = {"leader_election": "true", "lease_s": "3", "namespaces": json.dumps([namespace])}
    proxies = [operators.proxy(), operators.proxy()]
    first = operators.start(proxies[0], **settings)
    eventually(lambda: "holds the lease" in first.log)
    second = operators.start(proxies[1], **settings)
    eventually(lambda: "waiting: the lease is held by" in second.log)
    kubectl.apply(SMALLEST, "-n", namespace)
    eventually(lambda: kubectl.get("deployment", "qwen", namespace))
    assert proxies[0].writes
    assert not proxies[1].writes
    # Killed: the other one takes over when the lease has run out.
    first.kill()
    eventually(lambda: "holds the lease" in second.log)
    kubectl.patch("kvc", "qwen", namespace, {"spec": {"replicas": 2}})
    eventually(lambda: (kubectl.get("deployment", "qwen", namespace) or {})["spec"]["replicas"] == 2)
    # Stopped: the next one takes over at once, since the lease was given back.
    third = operators.start(**settings)
    eventually(lambda: "waiting: the lease is held by" in third.log)
    assert second.stop() == 0
    eventually(lambda: "holds the lease" in third.log)
    # Cut off: it ends by itself before anybody else may work.
    fourth_proxy = operators.proxy()
    third.stop()
    fourth = operators.start(fourth_proxy, **settings)
    eventually(lambda: "holds the lease" in fourth.log)
    fourth_proxy.fault = lambda _: 500
    assert fourth.process.wait(30) == 1


def test_rights_are_those_that_are_used(
    api: Api, kubectl: Kubectl, operators: Operators, namespace: str
) -> None:
    """Each verb that is used is granted, and each that is granted is used, or a reason stands here."""
    kubectl("delete", "lease", "kvcache-operator", "-n", "kvcache-system", "--ignore-not-found")
    proxy = operators.proxy()
    settings: Any = {"leader_election": "true", "lease_s": "3"}
    operator = operators.start(proxy, **settings)
    assert operator.url
    eventually(lambda: "holds the lease" in operator.log)
    kubectl.apply(with_value(FULLER, "spec.reclaimPolicy", "Delete"), "-n", namespace)
    eventually(lambda: len(kubectl.items("pod", namespace)) == 2)
    kubectl.patch("kvc", "qwen", namespace, {"spec": {"replicas": 1, "networkPolicy": {"mode": "Disabled"}}})
    eventually(lambda: kubectl.get("netpol", "qwen", namespace) is None)
    disk = {"capacity": "1Gi", "volume": {"claimTemplate": {"size": "2Gi"}}}
    claims = with_value(with_value(SMALLEST, "spec.cache.tiers.disk", disk), "metadata.name", "claims")
    kubectl.apply(with_value(claims, "spec.reclaimPolicy", "Delete"), "-n", namespace)
    eventually(lambda: kubectl.items("pvc", namespace))
    size = {"disk": {"volume": {"claimTemplate": {"size": "3Gi"}}}}
    kubectl.patch("kvc", "claims", namespace, {"spec": {"cache": {"tiers": size}}})
    eventually(lambda: ("patch", "persistentvolumeclaims") in {(e.verb, e.resource) for e in proxy.seen})
    shared = with_value(SMALLEST, "spec.cache.tiers.disk", {"capacity": "1Gi", "volume": {"claimName": "x"}})
    shared = with_value(with_value(shared, "spec.replicas", 2), "metadata.name", "shared")
    kubectl.apply(shared, "-n", namespace)
    eventually(lambda: kubectl.get("deployment", "shared", namespace))
    kubectl("delete", "kvc", "--all", "-n", namespace)
    eventually(lambda: not kubectl.items("kvc", namespace))
    operator.stop()

    manifests = ROOT / "manifests"
    roles = [
        role
        for path in (manifests / "rbac/cluster/role.yaml", manifests / "operator/lease-role.yaml")
        for role in yaml.safe_load_all(path.read_text())
        if role["kind"] in ("ClusterRole", "Role")
    ]
    rights: set[tuple[str, str, str]] = set().union(*(granted(role) for role in roles))
    used = rules_of(proxy.seen)
    assert used <= rights
    # Server-side apply is a patch that may have to create.
    applied = {(group, resource, "create") for group, resource, verb in rights if verb == "patch"}
    unseen = {
        ("kvcache.dev", "kvcaches/finalizers", "update"),  # asked for by admission on OpenShift alone
        *{entry for entry in rights if entry[0] == "monitoring.coreos.com"},  # kinds that are not here
    }
    assert rights - used - applied - unseen == set()


def test_an_installation_for_one_namespace(
    api: Api, kubectl: Kubectl, operators: Operators, namespace: str, second: str, tmp_path: Path
) -> None:
    """With a Role of its namespace and nothing of the cluster, it works there and sees nothing elsewhere."""
    folder = ROOT / "manifests" / "rbac" / "namespaced"
    binding = yaml.safe_load_all((folder / "role.yaml").read_text())
    kubectl("delete", "clusterrolebinding", "kvcache-operator")
    try:
        for document in binding:
            kubectl.apply(document, "-n", namespace)
        operator = operators.start(namespaces=json.dumps([namespace]))
        for place in (namespace, second):
            kubectl.apply(SMALLEST, "-n", place)
        eventually(lambda: _is_observed(kubectl, namespace))
        assert kubectl.get("deployment", "qwen", namespace)
        assert kubectl.get("deployment", "qwen", second) is None
        assert operator.metric("kvcache_operator_api_requests_total", status="403") == 0
        assert "forbidden" not in operator.log.lower()
    finally:
        kubectl("apply", "-k", str(ROOT / "manifests" / "rbac" / "cluster"))


def test_without_the_definition_it_says_so(operators: Operators, api: Api) -> None:
    proxy = operators.proxy()
    proxy.hide_group = "kvcache.dev"
    operator = operators.start(proxy)
    assert operator.process.wait(60) == 1
    assert "apply manifests/crd" in operator.log
