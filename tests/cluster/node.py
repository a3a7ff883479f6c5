# SPDX-License-Identifier: Apache-2.0
"""The node: containerd, controller manager, scheduler, kubelet and kube-proxy, with the settings that they
need inside namespaces on a machine without systemd."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from tests.cluster.control_plane import ControlPlane
from tests.cluster.pause import PROGRAM
from tests.cluster.pki import NODE
from tests.cluster.processes import ClusterError, Processes
from tests.cluster.sandbox import NODE_ADDRESS

DNS_PORT = 53
POD_RANGE = "10.244.0.0/24"
PAUSE_IMAGE = "localhost/pause:1"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
CONTAINERD_WITHIN_S = 30.0
NODE_WITHIN_S = 90.0
IMPORT_WITHIN_S = 300.0
PROGRAMS = ("containerd", "ctr", "runc", "containerd-shim-runc-v2", "iptables", "conntrack", "ip", "nsenter")
_CNI_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin")


def missing() -> str:
    """What a node needs and this machine lacks; empty if nothing."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if cni_folder() is None:
        absent.append(f"the CNI plugin bridge in {' or '.join(_CNI_FOLDERS)}")
    if not PROGRAM.exists():
        absent.append(str(PROGRAM))
    if absent:
        debian = "containerd runc containernetworking-plugins iptables conntrack catatonit"
        return f"{', '.join(absent)} not found; on Debian: apt-get install {debian}"
    return ""


def cni_folder() -> str | None:
    """Where the CNI plugins lie."""
    return next((folder for folder in _CNI_FOLDERS if (Path(folder) / "bridge").exists()), None)


def start_containerd(folder: Path, processes: Processes) -> None:
    """Starts containerd with its data in `folder` and waits until it answers.

    Raises:
        ClusterError: it does not.
    """
    cni = folder / "cni"
    cni.mkdir(parents=True, exist_ok=True)
    (cni / "10-cluster.conflist").write_text(json.dumps(cni_config(cni / "addresses"), indent=1))
    config = folder / "containerd.toml"
    config.write_text(containerd_config(folder / "containerd", cni))
    processes.start("containerd", ["containerd", "--config", str(config)])
    processes.wait("containerd", lambda: _ctr("version").returncode == 0, CONTAINERD_WITHIN_S)


def import_image(archive: Path) -> None:
    """Brings the images of an archive of docker's or OCI's form into the node.

    Raises:
        ClusterError: containerd refuses it.
    """
    done = _ctr("--namespace=k8s.io", "images", "import", str(archive))
    if done.returncode != 0:
        raise ClusterError(f"{archive} cannot be imported: {done.stderr.strip()[-500:]}")


def image_names() -> list[str]:
    """The images that the node has."""
    return _ctr("--namespace=k8s.io", "images", "list", "--quiet").stdout.split()


def start_node(plane: ControlPlane, cgroup: str, processes: Processes) -> None:
    """Starts what runs pods, and waits until the node is ready.

    Args:
        cgroup: Name of the group below which the kubelet makes those of the pods; it must exist.

    Raises:
        ClusterError: a part did not come up.
    """
    folder, pki = plane.folder, plane.pki
    processes.start("kube-controller-manager", controller_manager_command(plane))
    processes.start("kube-scheduler", scheduler_command(plane))
    kubelet = folder / "kubelet.yaml"
    kubelet.write_text(yaml.safe_dump(kubelet_config(plane, cgroup)))
    processes.start(
        "kubelet",
        [
            str(plane.binaries.program("kubelet")),
            f"--config={kubelet}",
            f"--kubeconfig={pki.kubeconfig('kubelet')}",
            f"--hostname-override={NODE}",
            f"--node-ip={NODE_ADDRESS}",
            "--container-runtime=remote",
            f"--container-runtime-endpoint=unix://{CONTAINERD_SOCKET}",
            f"--pod-infra-container-image={PAUSE_IMAGE}",
        ],
    )
    proxy = folder / "kube-proxy.yaml"
    proxy.write_text(yaml.safe_dump(proxy_config(plane)))
    processes.start("kube-proxy", [str(plane.binaries.program("kube-proxy")), f"--config={proxy}"])
    dns = [sys.executable, "-m", "tests.cluster.dns", str(folder), NODE_ADDRESS, str(DNS_PORT)]
    processes.start("dns", dns)
    processes.wait("kubelet", lambda: _node_is_ready(plane), NODE_WITHIN_S)


def _node_is_ready(plane: ControlPlane) -> bool:
    ready = '{.status.conditions[?(@.type=="Ready")].status}'
    try:
        return plane.kubectl("get", "node", NODE, "-o", f"jsonpath={ready}") == "True"
    except ClusterError:
        return False


def _ctr(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["ctr", f"--address={CONTAINERD_SOCKET}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_WITHIN_S, check=False)


def cni_config(addresses: Path) -> dict[str, object]:
    """A bridge for the pods; `addresses` keeps which are given out."""
    ipam = {
        "type": "host-local",
        "dataDir": str(addresses),
        "ranges": [[{"subnet": POD_RANGE}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "cluster", "plugins": [{**bridge, "ipam": ipam}, ports]}


def containerd_config(root: Path, cni: Path) -> str:
    """For containerd 1.6, whose CRI v1alpha2 is what kubelet 1.20 speaks."""
    return f"""\
version = 2
root = "{root}"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.internal.v1.opt",
  "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing",
]
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # Nothing here may lower a score: in many containers and VMs root lacks CAP_SYS_RESOURCE.
  restrict_oom_score_adj = true
  disable_apparmor = true
  disable_hugetlb_controller = true
  tolerate_missing_hugetlb_controller = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni_folder()}"
    conf_dir = "{cni}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


def controller_manager_command(plane: ControlPlane) -> list[str]:
    """With short periods for a node that is watched by tests."""
    pki = plane.pki
    config = pki.kubeconfig("controller-manager")
    return [
        str(plane.binaries.program("kube-controller-manager")),
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--leader-elect=false",
        "--use-service-account-credentials=true",
        f"--root-ca-file={pki.certificate('ca')}",
        f"--service-account-private-key-file={pki.key('sa')}",
        f"--cluster-signing-cert-file={pki.certificate('ca')}",
        f"--cluster-signing-key-file={pki.key('ca')}",
        "--bind-address=127.0.0.1",
        "--node-monitor-period=2s",
        "--node-monitor-grace-period=16s",
    ]


def scheduler_command(plane: ControlPlane) -> list[str]:
    config = plane.pki.kubeconfig("scheduler")
    return [
        str(plane.binaries.program("kube-scheduler")),
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
    ]


def kubelet_config(plane: ControlPlane, cgroup: str) -> dict[str, object]:
    """Of a node that evicts and collects nothing by itself."""
    pki = plane.pki
    one_percent = "1%"
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_ADDRESS,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": pki.certificate("ca")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": pki.certificate("kubelet"),
        "tlsPrivateKeyFile": pki.key("kubelet"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "enforceNodeAllocatable": ["pods"],
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "syncFrequency": "5s",
        "nodeStatusUpdateFrequency": "1s",
        "imageMinimumGCAge": "24h",
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": one_percent,
            "imagefs.available": one_percent,
            "nodefs.inodesFree": one_percent,
        },
        "clusterDNS": [NODE_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": "",
    }


def proxy_config(plane: ControlPlane) -> dict[str, object]:
    """conntrack's settings are the machine's and stay as they are."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": NODE,
        "clusterCIDR": POD_RANGE,
        "clientConnection": {"kubeconfig": str(plane.pki.kubeconfig("proxy"))},
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
