# SPDX-License-Identifier: Apache-2.0
"""What is written for users is so: generated files, reasons, settings, metrics, annotations, manifests."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

import kvcache_operator
from kvcache_operator.flush import FLUSH_ANNOTATION, TIERS_ANNOTATION
from kvcache_operator.parse import parse_resource
from kvcache_operator.plan import RESTART_ANNOTATION
from kvcache_operator.reclaim import FORCE_ANNOTATION
from kvcache_operator.reference import reference
from kvcache_operator.settings import Settings
from kvcache_operator.telemetry import Telemetry
from tests.operator.resources import ROOT

DOCS = ROOT / "docs"
MANIFESTS = ROOT / "manifests"
_REASON = re.compile(r"^[A-Z][A-Za-z]*[a-z][A-Z]?[A-Za-z]*$")
_MODULES = (
    *("verdicts", "observe", "apply", "errors", "cache_numbers", "events", "status", "reconcile"),
    "reclaim",
)
_NO_REASON = {
    *("True", "False", "Unknown", "Normal", "Warning", "Ready", "Pinning", "Error", "Both", "Managed"),
    *("Accepted", "Progressing", "Available", "CacheTiersReady", "Degraded", "Delete", "Disabled"),
    *("Deployment", "StatefulSet", "PersistentVolumeClaim", "Pod", "Secret", "Event", "ReadWriteMany"),
    *("ReplicaFailure", "PodScheduled", "Evicted", "ErrImagePull", "ImagePullBackOff", "InvalidImageName"),
    *("ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
    *("CrashLoopBackOff", "DiskUnavailable", "Authorization", "Background", "Ti", "Gi", "Mi"),
}
"""Words of the same form that are no reasons of ours."""


def reasons() -> Iterator[str]:
    """Every CamelCase word in the modules that decide about conditions and events."""
    folder = Path(kvcache_operator.__file__).parent
    for module in _MODULES:
        for node in ast.walk(ast.parse((folder / f"{module}.py").read_text())):
            word = node.value if isinstance(node, ast.Constant) else None
            if isinstance(word, str) and _REASON.fullmatch(word) and word not in _NO_REASON:
                yield word


def test_every_reason_has_its_remedy() -> None:
    documented = set(re.findall(r"`([A-Za-z]+)`", (DOCS / "conditions.md").read_text()))
    found = set(reasons())
    assert {"SecretNotFound", "InsufficientGPU", "RolloutFinished"} <= found
    assert found - documented == set()


def test_every_setting_and_metric_is_described() -> None:
    text = (DOCS / "operator.md").read_text()
    for name, setting in Settings.model_fields.items():
        assert f"| `{name.upper()}` |" in text, name
        default = setting.default
        if isinstance(default, str | int | float) and not isinstance(default, bool) and default != "":
            shown = f"{default:g}" if isinstance(default, float) else default
            assert f"| `{name.upper()}` | `{shown}` |" in text, name
    for metric in Telemetry().registry.collect():
        if metric.name.startswith("kvcache_operator"):
            name = metric.name + ("_total" if metric.type == "counter" else "")
            assert f"| `{name}` | {metric.documentation} |" in text


@pytest.mark.parametrize(
    "annotation", [FLUSH_ANNOTATION, TIERS_ANNOTATION, FORCE_ANNOTATION, RESTART_ANNOTATION]
)
def test_annotations_are_described(annotation: str) -> None:
    assert annotation in (DOCS / "operator.md").read_text()


def test_the_page_of_fields_is_made_from_the_models() -> None:
    """`make manifests` writes it anew."""
    assert (DOCS / "resource.md").read_text() == reference()


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on PATH")


def kustomized(folder: Path) -> str:
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=True)
    return done.stdout


@needs_kubectl
def test_the_installation_is_made_from_its_parts() -> None:
    """`make manifests` writes it anew."""
    parts = list(yaml.safe_load_all(kustomized(MANIFESTS)))
    assert list(yaml.safe_load_all((MANIFESTS / "install.yaml").read_text())) == parts


@needs_kubectl
@pytest.mark.parametrize("overlay", ["cluster", "namespaced", "monitoring"])
def test_manifests_are_valid_kubernetes(overlay: str) -> None:
    objects = list(yaml.safe_load_all(kustomized(MANIFESTS / "overlays" / overlay)))
    assert len(objects) >= 10
    for entry in objects:
        if entry["apiVersion"] != "monitoring.coreos.com/v1":
            kubernetes_validate.validate(entry, "1.37", strict=True)
    if overlay == "namespaced":
        assert {entry["kind"] for entry in objects} & {"ClusterRole", "ClusterRoleBinding"} == set()
        assert {
            entry["metadata"].get("namespace", "") for entry in objects if entry["kind"] != "Namespace"
        } == {"kvcache-system"}


def test_both_installations_grant_the_same() -> None:
    def rules(mode: str) -> Any:
        return next(yaml.safe_load_all((MANIFESTS / "rbac" / mode / "role.yaml").read_text()))["rules"]

    assert rules("cluster") == rules("namespaced")
    assert not any("*" in str(rule) for rule in rules("cluster"))


@pytest.mark.parametrize("mode", ["cluster", "namespaced"])
def test_pods_and_the_secrets_of_others_are_out_of_the_operators_reach(mode: str) -> None:
    """Pods are restarted by the kubelet and made by their workload: who may not touch them makes no loop of
    them. Secrets are read by name, never listed."""
    verbs: dict[str, set[str]] = {}
    for document in yaml.safe_load_all((MANIFESTS / "rbac" / mode / "role.yaml").read_text()):
        for rule in document.get("rules", ()):
            for resource in rule["resources"]:
                verbs.setdefault(resource, set()).update(rule["verbs"])
    assert verbs["pods"] <= {"get", "list", "watch"}
    assert verbs["secrets"] <= {"get", "create", "patch"}
    assert verbs["kvcaches/finalizers"] == {"update"}
    assert all("*" not in group | {name} for name, group in verbs.items())


def test_the_operators_pod_is_restricted() -> None:
    deployment = yaml.safe_load((MANIFESTS / "operator" / "deployment.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    security = container["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["readOnlyRootFilesystem"] is True
    names = {entry["name"].removeprefix("KVCACHE_OPERATOR_").lower() for entry in container["env"]}
    assert names <= Settings.model_fields.keys()


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda path: path.name)
def test_resources_in_texts_are_valid(page: Path) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
        try:
            documents = [entry for entry in yaml.safe_load_all(block) if isinstance(entry, dict)]
        except yaml.YAMLError:
            continue
        for document in documents:
            if document.get("kind") == "KVCache":
                parse_resource(document)
