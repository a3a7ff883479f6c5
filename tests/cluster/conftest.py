# SPDX-License-Identifier: Apache-2.0
"""What the tests against a real API server share: `make test-cluster` runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache_operator.crd import crd
from tests.cluster.api import Api, running_api
from tests.cluster.binaries import missing
from tests.cluster.kubectl import Kubectl
from tests.cluster.operators import Operators


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    wanted = "cluster" in (config.option.markexpr or "")
    reason = "run by `make test-cluster`" if not wanted else missing()
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.cluster)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The newer server for our group where its binary is there, else the older one for everything."""
    with running_api(tmp_path_factory.mktemp("api"), crd()) as running:
        grant(Kubectl(running.kubeconfig))
        yield running


@pytest.fixture(scope="session")
def old_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Kubernetes 1.20 alone: no CEL rules, and older kinds."""
    with running_api(tmp_path_factory.mktemp("old-api"), crd(), rules=False) as running:
        grant(Kubectl(running.kubeconfig))
        yield running


def grant(kubectl: Kubectl) -> None:
    """The operator's rights as manifests/ has them."""
    manifests = Path(__file__).resolve().parents[2] / "manifests"
    kubectl("create", "namespace", "kvcache-system")
    for part in ("rbac/cluster", "operator/lease-role.yaml"):
        path = manifests / part
        flag = "-k" if path.is_dir() else "-f"
        kubectl("apply", flag, str(path))


@pytest.fixture
def kubectl(api: Api) -> Kubectl:
    return Kubectl(api.kubeconfig)


@pytest.fixture
def namespace(kubectl: Kubectl, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own; its resources go afterwards, so that later operators have less to do."""
    name = f"t{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**8}"
    kubectl("create", "namespace", name)
    yield name
    kubectl.run("delete", "kvc", "--all", "-n", name, "--wait=false")


@pytest.fixture
def operators(api: Api, tmp_path: Path) -> Iterator[Operators]:
    """Starts operators with the rights of the manifests; ends them all."""
    with Operators(api, tmp_path) as running:
        yield running
