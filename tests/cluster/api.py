# SPDX-License-Identifier: Apache-2.0
"""etcd, kube-apiserver 1.20, the API server for custom resources of 1.36 behind it, and the controllers.

All on 127.0.0.1 with ports that the kernel gives. Nothing is a pod and nothing runs one: controllers make
Deployments to ReplicaSets to Pods, and a test plays scheduler and kubelet by writing a pod's status.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.cluster.binaries import Binaries, binaries

ADMIN_TOKEN = "token-of-the-admin"
OPERATOR_TOKEN = "token-of-the-operator"
OPERATOR_USER = "system:serviceaccount:kvcache-system:kvcache-operator"
"""The service account of manifests/, so that what its RBAC forbids is forbidden in tests too."""
READY_WITHIN_S = 90.0
_CONTROLLERS = ("deployment", "replicaset", "statefulset", "garbagecollector", "disruption", "endpoint")
_PR_SET_PDEATHSIG = 1

Start = Callable[[list[str], Path], subprocess.Popen[bytes]]


@dataclass(frozen=True)
class Api:
    """A running API."""

    url: str
    kubeconfig: Path
    """Of an administrator."""
    operator_kubeconfig: Path
    """Of the operator's service account."""
    authority: Path
    """Certificate that the server signs with."""
    has_rules: bool
    """Custom resources are served by 1.36, with CEL rules, and not by 1.20."""
    pids: tuple[int, ...]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for entry in sockets:
            entry.bind(("127.0.0.1", 0))
        return [entry.getsockname()[1] for entry in sockets]


@contextmanager
def running_api(folder: Path, definition: dict[str, Any], rules: bool = True) -> Iterator[Api]:
    """Runs the API as long as the context; everything ends with it, and with this process.

    Args:
        folder: for keys, data and logs; empty.
        definition: a CustomResourceDefinition, whose group the newer server serves.
        rules: whether to start the newer server.
    """
    processes: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
            )
        processes.append(process)
        return process

    try:
        yield start_api(folder, definition, start, rules)
    finally:
        for process in reversed(processes):
            process.kill()
        for process in processes:
            process.wait()


def die_with_parent() -> None:
    """Run in a new process: it is killed when the one that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start_api(folder: Path, definition: dict[str, Any], start: Start, rules: bool = True) -> Api:
    """Starts everything through `start` and waits until it answers.

    Raises:
        RuntimeError: something ended or was not ready in time; the text has the end of its log.
    """
    found = binaries()
    etcd_port, peer_port, port, extensions_port = free_ports(4)
    _certificates(folder)
    etcd = _etcd(folder, etcd_port, peer_port)
    server = _kube_apiserver(found, folder, etcd_port, port)
    url = f"https://127.0.0.1:{port}"
    processes = [start(etcd, folder / "etcd.log"), start(server, folder / "kube-apiserver.log")]
    _wait(f"{url}/readyz", processes[-1], folder / "kube-apiserver.log")
    admin = _kubeconfig(folder, "admin", url, ADMIN_TOKEN)
    operator = _kubeconfig(folder, "operator", url, OPERATOR_TOKEN)
    manager = [
        str(found.controller_manager),
        f"--kubeconfig={admin}",
        f"--controllers={','.join(_CONTROLLERS)}",
        f"--service-account-private-key-file={folder / 'sa.key'}",
        *("--port=0", "--secure-port=0", "--leader-elect=false"),
    ]
    processes.append(start(manager, folder / "kube-controller-manager.log"))
    has_rules = rules and found.extensions is not None
    if has_rules:
        extensions = _extensions(found, folder, etcd_port, extensions_port, admin)
        processes.append(start(extensions, folder / "apiextensions.log"))
        own_url = f"https://127.0.0.1:{extensions_port}"
        _wait(f"{own_url}/readyz", processes[-1], folder / "apiextensions.log")
        # First the definition, then the hand-over: a group without any resource counts as unavailable, and
        # is looked at again only after half a minute.
        _define(own_url, definition)
        _aggregate(url, definition["spec"]["group"], extensions_port)
    else:
        _define(url, definition)
    return Api(
        url=url,
        kubeconfig=admin,
        operator_kubeconfig=operator,
        authority=folder / "pki" / "apiserver.crt",
        has_rules=has_rules,
        pids=tuple(process.pid for process in processes),
    )


def _etcd(folder: Path, port: int, peer_port: int) -> list[str]:
    client, peer = (f"http://127.0.0.1:{number}" for number in (port, peer_port))
    return [
        "etcd",
        *("--data-dir", str(folder / "etcd"), "--log-level=error", "--unsafe-no-fsync"),
        *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
        *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
        f"--initial-cluster=default={peer}",
    ]


def _kube_apiserver(found: Binaries, folder: Path, etcd_port: int, port: int) -> list[str]:
    tokens = folder / "tokens.csv"
    tokens.write_text(
        f'{ADMIN_TOKEN},admin,1,"system:masters"\n'
        f'{OPERATOR_TOKEN},{OPERATOR_USER},2,"system:serviceaccounts,system:authenticated"\n'
    )
    return [
        str(found.kube_apiserver),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        *(f"--secure-port={port}", "--bind-address=127.0.0.1", "--endpoint-reconciler-type=none"),
        f"--cert-dir={folder / 'pki'}",
        *(f"--token-auth-file={tokens}", "--authorization-mode=RBAC"),
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={folder / 'sa.key'}",
        f"--service-account-key-file={folder / 'sa.key'}",
        "--service-cluster-ip-range=10.96.0.0/16",
        # Nobody makes service accounts' tokens here.
        "--disable-admission-plugins=ServiceAccount",
        f"--requestheader-client-ca-file={folder / 'front.crt'}",
        "--requestheader-allowed-names=front",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={folder / 'front-client.crt'}",
        f"--proxy-client-key-file={folder / 'front-client.key'}",
    ]


def _extensions(found: Binaries, folder: Path, etcd_port: int, port: int, kubeconfig: Path) -> list[str]:
    return [
        str(found.extensions),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--etcd-prefix=/registry-extensions",
        *(f"--secure-port={port}", "--bind-address=127.0.0.1", f"--cert-dir={folder / 'pki-extensions'}"),
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--authorization-always-allow-paths=/readyz,/healthz,/livez",
        "--disable-admission-plugins=ValidatingAdmissionPolicy,MutatingAdmissionPolicy",
        "--enable-priority-and-fairness=false",
    ]


def _certificates(folder: Path) -> None:
    """A key for service accounts, and the authority by which the newer server knows the older one."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("genrsa", "-out", "sa.key", "2048")
    openssl("req", "-x509", *key, "-days", "2", "-keyout", "front.key", "-out", "front.crt", "-subj", "/CN=a")
    openssl("req", *key, "-keyout", "front-client.key", "-out", "front-client.csr", "-subj", "/CN=front")
    (folder / "front.ext").write_text("extendedKeyUsage=clientAuth\nkeyUsage=digitalSignature\n")
    signed = ("-CA", "front.crt", "-CAkey", "front.key", "-CAcreateserial", "-extfile", "front.ext")
    openssl("x509", "-req", "-in", "front-client.csr", *signed, "-days", "2", "-out", "front-client.crt")


def _client() -> httpx.Client:
    # The servers sign their own certificates, and live on this machine for the time of a test.
    return httpx.Client(
        verify=False,  # noqa: S501
        trust_env=False,
        timeout=10,
        headers={"Authorization": f"Bearer {ADMIN_TOKEN}"},
    )


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    with _client() as client:
        while True:
            try:
                if client.get(url).is_success:
                    return
            except httpx.HTTPError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{log.stem} did not get ready; it says: {log.read_text()[-2000:]}")
            time.sleep(0.1)


def _define(url: str, definition: dict[str, Any]) -> None:
    """Installs a definition and waits until its resources are served."""
    path = f"{url}/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    spec = definition["spec"]
    resources = f"{url}/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
    with _client() as client:
        answer = client.post(path, json=definition)
        if answer.is_error:
            raise RuntimeError(f"the definition was refused: {answer.text}")
        _until(lambda: client.get(resources).is_success, f"{resources} is not served")


def _aggregate(url: str, group: str, port: int) -> None:
    """Hands our group, and the definitions of custom resources, to the newer server.

    A Service's endpoints may not be loopback addresses, but an ExternalName may be `localhost`.
    """
    service = {"namespace": "kube-system", "name": "extensions", "port": port}
    spec: dict[str, Any] = {"insecureSkipTLSVerify": True, "service": service}
    entry = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"v1alpha1.{group}"},
        "spec": {
            **spec,
            "group": group,
            "version": "v1alpha1",
            "groupPriorityMinimum": 1000,
            "versionPriority": 15,
        },
    }
    outside = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "extensions", "namespace": "kube-system"},
        "spec": {"type": "ExternalName", "externalName": "localhost"},
    }
    services = f"{url}/apis/apiregistration.k8s.io/v1/apiservices"
    system = f"{url}/api/v1/namespaces/kube-system"
    with _client() as client:
        _until(lambda: client.get(system).is_success, "the namespace kube-system does not appear")
        client.post(f"{system}/services", json=outside).raise_for_status()
        client.post(services, json=entry).raise_for_status()
        # This entry is made by the server itself at its start, and is left alone afterwards.
        client.patch(
            f"{services}/v1.apiextensions.k8s.io",
            content=json.dumps({"spec": spec}),
            headers={"Content-Type": "application/merge-patch+json"},
        ).raise_for_status()
        for path in (f"/apis/{group}/v1alpha1", "/apis/apiextensions.k8s.io/v1"):
            _until(functools.partial(_is_served, client, f"{url}{path}"), f"{path} is not served")
        _until(
            lambda: group in client.get(f"{url}/apis").text, f"{group} is not among the groups of the server"
        )


def _is_served(client: httpx.Client, url: str) -> bool:
    return client.get(url).is_success


def _until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{otherwise} after {READY_WITHIN_S:g} s")
        time.sleep(0.05)


def _kubeconfig(folder: Path, name: str, url: str, token: str) -> Path:
    # The server signs its own certificate, which is the authority for itself.
    authority = (folder / "pki" / "apiserver.crt").read_bytes()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "c",
                "cluster": {
                    "server": url,
                    "certificate-authority-data": base64.b64encode(authority).decode(),
                },
            }
        ],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file = folder / f"{name}.kubeconfig"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(yaml.safe_dump(config))
    return file
