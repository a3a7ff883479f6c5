# SPDX-License-Identifier: Apache-2.0
"""The definition on the newer server: rules, strictness, defaults, and the status that is written."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.cluster.api import Api
from tests.cluster.kubectl import Kubectl
from tests.cluster.operators import ROOT
from tests.operator.full import FULL
from tests.operator.resources import with_value
from tests.operator.rules import CHANGES, PAIRS, Pair


@pytest.fixture(autouse=True)
def needs_rules(api: Api) -> None:
    if not api.has_rules:
        pytest.skip("no API server for custom resources of 1.36: tests/cluster/build could not make one")


def refused(kubectl: Kubectl, document: dict[str, Any], namespace: str, *more: str) -> str:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        kubectl.apply(document, "-n", namespace, *more)
    return str(caught.value.stderr)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_pairs(kubectl: Kubectl, pair: Pair) -> None:
    dry = ("--dry-run=server",)
    kubectl.apply(pair.good, "-n", "default", *dry)
    assert pair.message in refused(kubectl, pair.bad, "default", *dry)


def test_changes(kubectl: Kubectl, namespace: str) -> None:
    for number, (name, before, good, bad, message) in enumerate(CHANGES):
        named = [with_value(entry, "metadata.name", f"c{number}") for entry in (before, good, bad)]
        kubectl.apply(named[0], "-n", namespace)
        kubectl.apply(named[1], "-n", namespace, "--dry-run=server")
        assert message in refused(kubectl, named[2], namespace), name


def created(kubectl: Kubectl, document: dict[str, Any]) -> str:
    """What the server says to one who asks it to be strict, as kubectl does of servers since 1.25."""
    del document["metadata"]["uid"]
    done = kubectl.run(
        "create",
        "--raw",
        "/apis/kvcache.dev/v1alpha1/namespaces/default/kvcaches?fieldValidation=Strict",
        "-f",
        "-",
        text=json.dumps(with_value(document, "metadata.namespace", "default")),
    )
    return done.stderr


def test_an_unknown_field_is_refused(kubectl: Kubectl) -> None:
    said = created(kubectl, with_value(FULL[0], "spec.cache.chunkToken", 256))
    assert 'unknown field "spec.cache.chunkToken"' in said


def test_blending_is_refused(kubectl: Kubectl) -> None:
    """There is no such field: docs/concepts.md says why."""
    said = created(kubectl, with_value(FULL[0], "spec.cache.blend", {"mode": "Enabled"}))
    assert 'unknown field "spec.cache.blend"' in said


@pytest.mark.parametrize("document", FULL, ids=lambda document: document["metadata"]["name"])
def test_full_resources_are_taken_as_they_are(
    kubectl: Kubectl, namespace: str, document: dict[str, Any]
) -> None:
    document = with_value(document, "metadata.namespace", namespace)
    del document["metadata"]["uid"]
    kubectl.apply(document)
    stored = kubectl.get("kvc", document["metadata"]["name"], namespace)
    assert stored is not None

    def holds(given: Any, there: Any, path: str) -> None:
        if isinstance(given, dict):
            for key, value in given.items():
                holds(value, there[key], f"{path}.{key}")
        elif isinstance(given, list):
            for index, value in enumerate(given):
                holds(value, there[index], f"{path}[{index}]")
        else:
            assert given == there, path

    holds(document["spec"], stored["spec"], "spec")


def test_the_checked_in_definition_is_the_one_that_is_tested(kubectl: Kubectl) -> None:
    """`kubectl apply -k` of what is in the repository changes nothing of what the server has."""
    path = str(ROOT / "manifests" / "crd" / "kvcaches.yaml")
    done = kubectl("apply", "--validate=false", "-f", path)
    assert "configured" in done or "unchanged" in done


@pytest.mark.parametrize("overlay", ["cluster", "namespaced"])
def test_overlays_are_taken_by_the_server(kubectl: Kubectl, overlay: str) -> None:
    rendered = kubectl("kustomize", str(ROOT / "manifests" / "overlays" / overlay))
    # The server around ours is of 1.20, where this kind is not yet v1.
    rendered = rendered.replace("apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n")
    kubectl("apply", "--validate=false", "--dry-run=server", "-f", "-", text=rendered)
