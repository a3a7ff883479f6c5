# SPDX-License-Identifier: Apache-2.0
"""The control plane of a node with pods: etcd, the API server of Kubernetes 1.20, and in front of our group
that of 1.36 for custom resources.

The 1.36 server (`apiextensions-apiserver`) knows CEL rules, strict field validation and today's server-side
apply. It cannot stand alone, since it answers no discovery: it keeps its objects in the same etcd under
another prefix, and the 1.20 server passes on to it what concerns our group and CustomResourceDefinitions
themselves.

Unlike `api`, which listens on loopback for tests of this machine alone, this one knows its users by
certificates and listens where pods reach it."""

from __future__ import annotations

import json
import ssl
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.binaries import Binaries
from tests.cluster.pki import Pki, make_pki, write_kubeconfig
from tests.cluster.processes import ClusterError, Processes

SERVICE_RANGE = "10.96.0.0/16"
GROUP = "kvcache.dev"
VERSION = "v1alpha1"
CRD_SERVER = "apiextensions-apiserver"
READY_WITHIN_S = 60.0
_AGGREGATED_WITHIN_S = 30.0


@dataclass(frozen=True)
class Endpoints:
    """Where the servers listen: IPv4 address of the API servers, and TCP ports."""

    address: str = "127.0.0.1"
    api: int = 6443
    crd: int = 6444
    etcd: int = 2379
    etcd_peer: int = 2380


@dataclass(frozen=True)
class ControlPlane:
    """A control plane that was started; `folder` is its own."""

    folder: Path
    binaries: Binaries
    at: Endpoints
    pki: Pki

    @property
    def kubeconfig(self) -> Path:
        """Of the administrator."""
        return self.pki.kubeconfig("admin")

    def kubectl(self, *arguments: str, text: str | None = None, within_s: float = 30.0) -> str:
        """What kubectl prints, run as administrator.

        Args:
            text: Goes to its standard input.

        Raises:
            ClusterError: it fails or takes longer than `within_s`.
        """
        command = ["kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        try:
            done = subprocess.run(
                command, input=text, capture_output=True, text=True, timeout=within_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"kubectl {' '.join(arguments)} took longer than {within_s:g} s") from error
        if done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def is_ready(self, port: int | None = None) -> bool:
        """Whether the API server, or the one at `port`, says that it is."""
        try:
            return _open(self.pki, self.at, "/readyz", port) == b"ok"
        except OSError:
            return False


def request(pki: Pki, at: Endpoints, path: str) -> dict[str, Any]:
    """What the API server answers to a GET of the administrator, parsed.

    Raises:
        OSError: it refuses or does not answer.
    """
    answer: dict[str, Any] = json.loads(_open(pki, at, path))
    return answer


def _open(pki: Pki, at: Endpoints, path: str, port: int | None = None) -> bytes:
    context = ssl.create_default_context(cafile=pki.certificate("ca"))
    context.load_cert_chain(pki.certificate("admin"), pki.key("admin"))
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    with opener.open(f"https://{at.address}:{port or at.api}{path}", timeout=5) as answer:
        content: bytes = answer.read()
        return content


def start_control_plane(
    folder: Path, binaries: Binaries, processes: Processes, at: Endpoints
) -> ControlPlane:
    """Starts etcd and the API server and waits until it is ready.

    Raises:
        ClusterError: one of them did not come up.
    """
    pki = make_pki(folder / "pki", at.address, at.api)
    plane = ControlPlane(folder, binaries, at, pki)
    processes.start("etcd", etcd_command(folder / "etcd", at))
    processes.start("kube-apiserver", api_server_command(plane))
    processes.wait("kube-apiserver", plane.is_ready, READY_WITHIN_S)
    return plane


def start_crd_server(plane: ControlPlane, processes: Processes) -> bool:
    """Starts the 1.36 server for custom resources and puts it in front; False where the kit has none.

    Raises:
        ClusterError: it did not come up.
    """
    if plane.binaries.extensions is None:
        return False
    processes.start(CRD_SERVER, crd_server_command(plane))
    processes.wait(CRD_SERVER, lambda: plane.is_ready(plane.at.crd), READY_WITHIN_S)
    plane.kubectl("apply", "--validate=false", "-f", "-", text=_aggregation(plane.at))
    to_service = {"insecureSkipTLSVerify": True, "service": _CRD_SERVICE}
    patch = json.dumps({"spec": to_service})
    plane.kubectl("patch", "apiservice", "v1.apiextensions.k8s.io", "--type=merge", "-p", patch)
    # That of our group becomes available with its first CustomResourceDefinition.
    wait = ("wait", "--for=condition=Available", "apiservice/v1.apiextensions.k8s.io")
    plane.kubectl(*wait, f"--timeout={_AGGREGATED_WITHIN_S:g}s", within_s=_AGGREGATED_WITHIN_S + 10)
    return True


_CRD_SERVICE = {"name": "crd36", "namespace": "kube-system"}


def _aggregation(at: Endpoints) -> str:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _CRD_SERVICE,
        "spec": {"ports": [{"port": 443, "targetPort": at.crd}]},
    }
    endpoints = {
        "apiVersion": "v1",
        "kind": "Endpoints",
        "metadata": _CRD_SERVICE,
        "subsets": [{"addresses": [{"ip": at.address}], "ports": [{"port": at.crd}]}],
    }
    api_service = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"{VERSION}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "version": VERSION,
            "groupPriorityMinimum": 1000,
            "versionPriority": 15,
            "insecureSkipTLSVerify": True,
            "service": _CRD_SERVICE,
        },
    }
    return yaml.safe_dump_all([service, endpoints, api_service])


def etcd_command(data: Path, at: Endpoints) -> list[str]:
    """Without syncing to the disk: a test's data need not outlive the machine."""
    client, peer = f"http://127.0.0.1:{at.etcd}", f"http://127.0.0.1:{at.etcd_peer}"
    return [
        "etcd",
        "--name=e",
        f"--data-dir={data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=e={peer}",
        "--unsafe-no-fsync",
        "--log-level=error",
    ]


def api_server_command(plane: ControlPlane) -> list[str]:
    """kube-apiserver 1.20 with RBAC, aggregation and the node restriction."""
    at, pki = plane.at, plane.pki
    return [
        str(plane.binaries.kube_apiserver),
        f"--etcd-servers=http://127.0.0.1:{at.etcd}",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        f"--secure-port={at.api}",
        f"--bind-address={at.address}",
        f"--advertise-address={at.address}",
        f"--tls-cert-file={pki.certificate('apiserver')}",
        f"--tls-private-key-file={pki.key('apiserver')}",
        f"--client-ca-file={pki.certificate('ca')}",
        f"--service-account-key-file={pki.folder / 'sa.pub'}",
        f"--service-account-signing-key-file={pki.key('sa')}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        # By name, exec and logs would ask a DNS that is not there.
        "--kubelet-preferred-address-types=InternalIP",
        f"--kubelet-client-certificate={pki.certificate('apiserver-kubelet-client')}",
        f"--kubelet-client-key={pki.key('apiserver-kubelet-client')}",
        f"--kubelet-certificate-authority={pki.certificate('ca')}",
        f"--requestheader-client-ca-file={pki.certificate('front-proxy-ca')}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={pki.certificate('front-proxy-client')}",
        f"--proxy-client-key-file={pki.key('front-proxy-client')}",
        # There is no kube-proxy where the API server runs alone: it looks the endpoints up itself.
        "--enable-aggregator-routing=true",
    ]


def crd_server_command(plane: ControlPlane) -> list[str]:
    """apiextensions-apiserver 1.36, on the same etcd."""
    at, pki = plane.at, plane.pki
    admin = pki.kubeconfig("admin")
    write_kubeconfig(pki, "admin", f"https://{at.address}:{at.crd}", "admin-crd")
    return [
        str(plane.binaries.extensions),
        f"--etcd-servers=http://127.0.0.1:{at.etcd}",
        "--etcd-prefix=/registry36",
        f"--secure-port={at.crd}",
        f"--bind-address={at.address}",
        f"--tls-cert-file={pki.certificate('apiserver')}",
        f"--tls-private-key-file={pki.key('apiserver')}",
        f"--client-ca-file={pki.certificate('ca')}",
        f"--kubeconfig={admin}",
        f"--authentication-kubeconfig={admin}",
        f"--authorization-kubeconfig={admin}",
        # The 1.20 server has no kinds for these two to read.
        "--disable-admission-plugins=ValidatingAdmissionPolicy,MutatingAdmissionPolicy",
        "--enable-priority-and-fairness=false",
    ]
