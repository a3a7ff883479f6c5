# SPDX-License-Identifier: Apache-2.0
"""`make install` and `make uninstall`, as they stand in docs/operator.md."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.cluster.api import Api
from tests.cluster.kubectl import Kubectl, eventually
from tests.cluster.operators import ROOT
from tests.operator.resources import SMALLEST

# The server around ours is of 1.20: it has one kind as v1beta1, and its document for kubectl knows no rules.
_KUBECTL = """#!/usr/bin/env bash
set -euo pipefail
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        -f) cat "$2" >"$0.yaml"; shift 2; arguments+=(-f "$0.yaml") ;;
        -k) kubectl kustomize "$2" >"$0.yaml"; shift 2; arguments+=(-f "$0.yaml") ;;
        apply) arguments+=(apply --validate=false); shift ;;
        delete) arguments+=(delete --wait=false); shift ;;
        *) arguments+=("$1"); shift ;;
    esac
    [ ! -e "$0.yaml" ] || sed -i 's#^apiVersion: policy/v1$#apiVersion: policy/v1beta1#' "$0.yaml"
done
exec kubectl "${arguments[@]}"
"""


@pytest.fixture
def make(api: Api, tmp_path: Path) -> list[str]:
    wrapper = tmp_path / "kubectl-for-an-old-server"
    wrapper.write_text(_KUBECTL)
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    return ["make", "-C", str(ROOT), f"KUBECTL={wrapper}"]


def test_install_and_uninstall(api: Api, kubectl: Kubectl, namespace: str, make: list[str]) -> None:
    environment = {**os.environ, "KUBECONFIG": str(api.kubeconfig)}

    def run(*targets: str) -> None:
        done = subprocess.run([*make, *targets], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    kubectl.apply(SMALLEST, "-n", namespace)
    try:
        run("install")
        run("install")
        assert kubectl.get("deployment", "kvcache-operator", "kvcache-system")
        eventually(lambda: kubectl.items("pod", "kvcache-system"))
        run("uninstall")
        assert kubectl.get("deployment", "kvcache-operator", "kvcache-system") is None
        assert kubectl.get("kvc", "qwen", namespace)
        assert "kvcaches.kvcache.dev" in kubectl("get", "crd", "-o", "name")
    finally:
        kubectl("apply", "-k", str(ROOT / "manifests" / "rbac" / "cluster"))
        kubectl("apply", "-f", str(ROOT / "manifests" / "operator" / "lease-role.yaml"))
