# SPDX-License-Identifier: Apache-2.0
"""The life of a resource, with kubectl and with the operator's process, on both servers."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.api import Api
from tests.cluster.kubectl import Kubectl, eventually
from tests.cluster.operators import Operators
from tests.operator.resources import SAMPLES, SMALLEST, with_value

CHILDREN = "deploy,sts,cm,secret,svc,netpol,pdb"


@pytest.fixture(params=["new", "old"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Kubectl, Operators, str]]:
    """A server, a way to start operators, and a namespace."""
    api: Api = request.getfixturevalue("api" if request.param == "new" else "old_api")
    kubectl, name = Kubectl(api.kubeconfig), f"life-{abs(hash(request.node.name)) % 10**8}"
    kubectl("create", "namespace", name)
    with Operators(api, tmp_path) as operators:
        yield kubectl, operators, name
    kubectl.run("delete", "kvc", "--all", "-n", name, "--wait=false")


def conditions(kubectl: Kubectl, namespace: str, name: str = "qwen") -> dict[str, tuple[str, str]]:
    found = kubectl.get("kvc", name, namespace) or {}
    entries = (found.get("status") or {}).get("conditions") or ()
    return {entry["type"]: (entry["status"], entry["reason"]) for entry in entries}


def make_ready(kubectl: Kubectl, namespace: str, address: str = "10.9.8.7", name: str | None = None) -> None:
    """Plays the kubelet for all pods, or for the one of that name."""
    for pod in kubectl.items("pod", namespace):
        if pod["metadata"].get("deletionTimestamp") or name not in (None, pod["metadata"]["name"]):
            continue
        conditions = [
            {"type": kind, "status": "True", "lastTransitionTime": "2030-01-01T00:00:00Z"}
            for kind in ("Ready", "ContainersReady", "Initialized", "PodScheduled")
        ]
        path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}"
        status = {"phase": "Running", "conditions": conditions, "podIP": address, "podIPs": [{"ip": address}]}
        kubectl.patch_status(path, status)


def test_a_resource_lives_its_life(world: tuple[Kubectl, Operators, str]) -> None:
    kubectl, operators, namespace = world
    operator = operators.start()
    assert operator.url
    begun = time.monotonic()
    kubectl.apply(SMALLEST, "-n", namespace)
    eventually(lambda: kubectl.get("deployment", "qwen", namespace))
    sys.stdout.write(f"children after {time.monotonic() - begun:.2f} s, kubectl's own time included\n")
    eventually(lambda: conditions(kubectl, namespace).get("Accepted") == ("True", "Valid"))
    body = kubectl.get("kvc", "qwen", namespace)
    assert body is not None
    assert "finalizers" not in body["metadata"]
    assert [name for name in body["metadata"].get("annotations", {}) if "kopf" in name] == []
    deployment = kubectl.get("deployment", "qwen", namespace)
    assert deployment is not None
    assert deployment["metadata"]["ownerReferences"][0]["uid"] == body["metadata"]["uid"]
    eventually(lambda: conditions(kubectl, namespace)["Ready"] == ("False", "Starting"))

    eventually(lambda: kubectl.items("pod", namespace))
    make_ready(kubectl, namespace)
    eventually(lambda: conditions(kubectl, namespace)["Ready"] == ("True", "AllPodsReady"))
    table = kubectl("get", "kvc", "-n", namespace).split()
    assert table[:7] == ["NAME", "READY", "REASON", "DESIRED", "UP", "HIT%", "AGE"]
    assert table[7:12] == ["qwen", "True", "AllPodsReady", "1", "1"]
    described = kubectl("describe", "kvc", "qwen", "-n", namespace)
    assert "RolloutFinished" in described

    # Scale, as an autoscaler would.
    kubectl("scale", "kvc", "qwen", "--replicas=2", "-n", namespace)
    eventually(lambda: len(kubectl.items("pod", namespace)) == 2)
    make_ready(kubectl, namespace)
    eventually(lambda: conditions(kubectl, namespace)["Ready"] == ("True", "AllPodsReady"))
    eventually(lambda: kubectl.get("pdb", "qwen", namespace))
    scale = json.loads(
        kubectl("get", "--raw", f"/apis/kvcache.dev/v1alpha1/namespaces/{namespace}/kvcaches/qwen/scale")
    )
    assert scale["status"]["replicas"] == 2
    assert "app.kubernetes.io/instance=qwen" in scale["status"]["selector"]
    kubectl("scale", "kvc", "qwen", "--replicas=1", "-n", namespace)
    eventually(lambda: kubectl.get("pdb", "qwen", namespace) is None)

    # A restart of the child by kubectl is left alone.
    kubectl("rollout", "restart", "deployment/qwen", "-n", namespace)
    time.sleep(1)
    deployment = kubectl.get("deployment", "qwen", namespace)
    assert deployment is not None
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert "kubectl.kubernetes.io/restartedAt" in annotations

    # Drift comes back, what others own stays.
    kubectl.patch("deployment", "qwen", namespace, {"spec": {"replicas": 5}})
    kubectl("annotate", "deployment", "qwen", "example.org/mine=1", "-n", namespace)
    eventually(lambda: (kubectl.get("deployment", "qwen", namespace) or {})["spec"]["replicas"] == 1)
    deployment = kubectl.get("deployment", "qwen", namespace)
    assert deployment is not None
    assert deployment["metadata"]["annotations"]["example.org/mine"] == "1"

    # A change, a bad change, and back.
    kubectl.patch("kvc", "qwen", namespace, {"spec": {"cache": {"chunkTokens": 512}}})
    eventually(
        lambda: (
            "chunk_size: 512\n" in (kubectl.get("cm", "qwen-config", namespace) or {})["data"]["config.yaml"]
        )
    )
    before = kubectl.get("deployment", "qwen", namespace)
    kubectl.patch("kvc", "qwen", namespace, {"spec": {"engine": {"args": ["--block-size=1024"]}}})
    eventually(lambda: conditions(kubectl, namespace)["Accepted"] == ("False", "InvalidSpec"))
    after = kubectl.get("deployment", "qwen", namespace)
    assert before is not None
    assert after is not None
    assert before["spec"] == after["spec"]
    kubectl.patch("kvc", "qwen", namespace, {"spec": {"engine": {"args": []}}})
    eventually(lambda: conditions(kubectl, namespace)["Accepted"] == ("True", "Valid"))

    # An overlay that the API server refuses: the field is named, nothing is touched.
    bad = {"spec": {"podTemplate": {"spec": {"restartPolicy": "Sometimes"}}}}
    kubectl.patch("kvc", "qwen", namespace, bad)
    eventually(lambda: conditions(kubectl, namespace)["Accepted"] == ("False", "InvalidSpec"))
    message = (kubectl.get("kvc", "qwen", namespace) or {})["status"]["conditions"][0]["message"]
    assert "restartPolicy" in message
    kubectl.patch("kvc", "qwen", namespace, {"spec": {"podTemplate": {"spec": {"restartPolicy": None}}}})

    kubectl("delete", "kvc", "qwen", "-n", namespace)
    eventually(
        lambda: "qwen" not in kubectl("get", CHILDREN, "-n", namespace, "-o", "name"), "garbage collection"
    )
    assert operator.stop() == 0


def test_suspend_restart_and_external_scaling(world: tuple[Kubectl, Operators, str]) -> None:
    kubectl, operators, namespace = world
    operators.start()

    def replicas() -> int:
        return int((kubectl.get("deployment", "qwen", namespace) or {})["spec"]["replicas"])

    kubectl.apply(with_value(SMALLEST, "spec.replicas", 3), "-n", namespace)
    eventually(lambda: kubectl.get("deployment", "qwen", namespace))
    kubectl.patch("kvc", "qwen", namespace, {"spec": {"suspend": True}})
    eventually(lambda: replicas() == 0)
    eventually(lambda: conditions(kubectl, namespace)["Ready"] == ("False", "Suspended"))
    kubectl.patch("kvc", "qwen", namespace, {"spec": {"suspend": False}})
    eventually(lambda: replicas() == 3)

    # Handing the number over must not change it; afterwards it is somebody else's.
    kubectl.patch("kvc", "qwen", namespace, {"spec": {"replicasMode": "External"}})
    generation = (kubectl.get("kvc", "qwen", namespace) or {})["metadata"]["generation"]
    eventually(
        lambda: (kubectl.get("kvc", "qwen", namespace) or {})["status"]["observedGeneration"] == generation
    )
    assert replicas() == 3
    kubectl("scale", "deployment", "qwen", "--replicas=2", "-n", namespace)
    kubectl.patch("kvc", "qwen", namespace, {"spec": {"cache": {"chunkTokens": 512}}})
    eventually(
        lambda: (
            "chunk_size: 512" in (kubectl.get("cm", "qwen-config", namespace) or {})["data"]["config.yaml"]
        )
    )
    time.sleep(0.5)
    assert replicas() == 2
    kubectl("annotate", "kvc", "qwen", "kvcache.dev/restart-requested-at=now", "-n", namespace)

    def restarted() -> bool:
        template = (kubectl.get("deployment", "qwen", namespace) or {})["spec"]["template"]
        annotations = template["metadata"]["annotations"]
        return bool(annotations.get("kvcache.dev/restart-requested-at") == "now")

    eventually(restarted)


def test_claims_of_each_replica(world: tuple[Kubectl, Operators, str]) -> None:
    kubectl, operators, namespace = world
    operators.start()
    disk: dict[str, Any] = {"capacity": "1Gi", "volume": {"claimTemplate": {"size": "2Gi"}}}
    document = with_value(with_value(SMALLEST, "spec.cache.tiers.disk", disk), "spec.replicas", 2)
    for policy, left in (("Retain", 2), ("Delete", 0)):
        kubectl.apply(with_value(document, "spec.reclaimPolicy", policy), "-n", namespace)
        eventually(lambda: len(kubectl.items("pod", namespace)) == 2)
        assert len(kubectl.items("pvc", namespace)) == 2
        disk["volume"]["claimTemplate"]["size"] = "3Gi"
        finalizers = (kubectl.get("kvc", "qwen", namespace) or {})["metadata"].get("finalizers", [])
        assert finalizers == ([] if policy == "Retain" else ["kvcache.dev/reclaim"])
        for pod in kubectl.items("pod", namespace):
            kubectl("delete", "pod", pod["metadata"]["name"], "-n", namespace, "--force", "--grace-period=0")
        kubectl("delete", "kvc", "qwen", "-n", namespace)
        eventually(lambda: kubectl.get("statefulset", "qwen", namespace) is None)
        claims = [
            claim
            for claim in kubectl.items("pvc", namespace)
            if not claim["metadata"].get("deletionTimestamp")
        ]
        assert len(claims) == left


def test_deletion_without_an_operator(world: tuple[Kubectl, Operators, str]) -> None:
    kubectl, operators, namespace = world
    operator = operators.start()
    kubectl.apply(SMALLEST, "-n", namespace)
    eventually(lambda: kubectl.get("deployment", "qwen", namespace))
    operator.kill()
    kubectl("delete", "kvc", "qwen", "-n", namespace)
    eventually(lambda: kubectl.get("deployment", "qwen", namespace) is None)


def test_a_secret_that_appears_later(world: tuple[Kubectl, Operators, str]) -> None:
    kubectl, operators, namespace = world
    operators.start()
    kubectl.apply(with_value(SMALLEST, "spec.model.tokenSecretRef", {"name": "hub"}), "-n", namespace)
    eventually(lambda: conditions(kubectl, namespace).get("Ready") == ("False", "SecretNotFound"))
    kubectl("create", "secret", "generic", "hub", "--from-literal=token=x", "-n", namespace)
    eventually(lambda: conditions(kubectl, namespace)["Degraded"] == ("False", "AsExpected"))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_samples_are_accepted(world: tuple[Kubectl, Operators, str], sample: Path) -> None:
    kubectl, operators, namespace = world
    operators.start()
    kubectl("apply", "-f", str(sample), "-n", namespace)
    name = next(
        entry["metadata"]["name"]
        for entry in yaml.safe_load_all(sample.read_text())
        if entry["kind"] == "KVCache"
    )
    eventually(lambda: conditions(kubectl, namespace, name).get("Accepted") == ("True", "Valid"))
    eventually(lambda: kubectl.items("pod", namespace))


def test_several_resources_side_by_side(world: tuple[Kubectl, Operators, str]) -> None:
    kubectl, operators, namespace = world
    operators.start()
    names = ["a", "b", "c"]
    for name in names:
        kubectl.apply(with_value(SMALLEST, "metadata.name", name), "-n", namespace)
    for name in names:
        eventually(functools.partial(kubectl.get, "deployment", name, namespace))
    kubectl("delete", "kvc", "b", "-n", namespace)
    eventually(lambda: kubectl.get("deployment", "b", namespace) is None)
    assert kubectl.get("deployment", "a", namespace)
    assert kubectl.get("deployment", "c", namespace)


def test_explain_reads_well(old_api: Api) -> None:
    """The 1.36 server behind the 1.20 one has no OpenAPI document for kubectl."""
    text = eventually(lambda: Kubectl(old_api.kubeconfig).run("explain", "kvc.spec.cache").stdout)
    assert "a power of two, a multiple of the engine's block size" in " ".join(text.split())
    assert "tiers" in text


def test_bad_resources_are_refused_with_a_sentence(world: tuple[Kubectl, Operators, str]) -> None:
    kubectl, _, namespace = world
    with pytest.raises(subprocess.CalledProcessError) as caught:
        kubectl.apply(with_value(SMALLEST, "spec.cache.tiers.cpu.capacity", "4GB"), "-n", namespace)
    assert "spec.cache.tiers.cpu.capacity" in caught.value.stderr
