# SPDX-License-Identifier: Apache-2.0
"""A real kube-apiserver with etcd, as processes on free ports: enough for what the operator writes.

Nothing is downloaded: the folder CLUSTER_CACHE holds `kube-1.20.2-*.tar.zst` with kube-apiserver, and etcd is
on PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import yaml

from tests.operator.toy_run import free_ports

READY_WITHIN_S = 60.0
TOKEN = "token-of-this-test"


def missing() -> str:
    """Why there can be no API server here; empty if there can."""
    cache = os.environ.get("CLUSTER_CACHE")
    if not cache:
        return "CLUSTER_CACHE names no folder with the binaries of Kubernetes"
    if not list(Path(cache).glob("kube-1.20.2-*.tar.zst")):
        return f"there is no kube-1.20.2-*.tar.zst in {cache}"
    absent = [program for program in ("etcd", "openssl", "tar", "zstd") if shutil.which(program) is None]
    return f"{', '.join(absent)} not on PATH" if absent else ""


@contextmanager
def api_server(folder: Path) -> Iterator[Path]:
    """Runs etcd and kube-apiserver; gives the path of a kubeconfig."""
    etcd_port, peer_port, port = free_ports(3)
    archive = next(Path(os.environ["CLUSTER_CACHE"]).glob("kube-1.20.2-*.tar.zst"))
    subprocess.run(["tar", "--zstd", "-C", folder, "-xf", archive, "kube-apiserver"], check=True)
    key = folder / "service-account.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    tokens = folder / "tokens.csv"
    tokens.write_text(f'{TOKEN},admin,1,"system:masters"\n')
    etcd_url, peer_url = (f"http://127.0.0.1:{number}" for number in (etcd_port, peer_port))
    etcd = ["etcd", "--data-dir", str(folder / "etcd"), "--log-level=error"]
    etcd += [f"--listen-client-urls={etcd_url}", f"--advertise-client-urls={etcd_url}"]
    etcd += [f"--listen-peer-urls={peer_url}", f"--initial-advertise-peer-urls={peer_url}"]
    etcd += [f"--initial-cluster=default={peer_url}"]
    server = [
        str(folder / "kube-apiserver"),
        f"--etcd-servers={etcd_url}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        "--endpoint-reconciler-type=none",
        f"--cert-dir={folder / 'pki'}",
        f"--token-auth-file={tokens}",
        "--authorization-mode=AlwaysAllow",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={key}",
        f"--service-account-key-file={key}",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--disable-admission-plugins=ServiceAccount",
    ]
    with ExitStack() as stack:
        for command in (etcd, server):
            stack.enter_context(_running(command, folder / f"{Path(command[0]).name}.log"))
        _wait_until_ready(f"https://127.0.0.1:{port}", folder)
        yield _kubeconfig(folder, port)


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.kill()
            process.wait()


def _wait_until_ready(url: str, folder: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    with httpx.Client(verify=False, trust_env=False) as client:  # noqa: S501
        while True:
            try:
                if (
                    client.get(f"{url}/readyz", headers={"Authorization": f"Bearer {TOKEN}"}).status_code
                    == 200
                ):
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > deadline:
                log = (folder / "kube-apiserver.log").read_text()[-2000:]
                raise RuntimeError(f"kube-apiserver is not ready after {READY_WITHIN_S:g} s; it says: {log}")
            time.sleep(0.1)


def _kubeconfig(folder: Path, port: int) -> Path:
    # The server signs its own certificate, which is the authority for itself.
    authority = str(folder / "pki" / "apiserver.crt")
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "c",
                "cluster": {"server": f"https://127.0.0.1:{port}", "certificate-authority": authority},
            }
        ],
        "users": [{"name": "u", "user": {"token": TOKEN}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file
