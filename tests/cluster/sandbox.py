# SPDX-License-Identifier: Apache-2.0
"""Namespaces of a cluster's own (mounts, network, processes), seen from both sides.

Outside: `start_first_process`, `enter_command` and `end`: the kernel kills every process of a namespace whose
first one dies, pods included. Inside: `prepare`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.cluster.processes import ClusterError

NODE_ADDRESS = "10.222.0.1"
BRIDGE = "node0"
_GONE_WITHIN_S = 15.0
_CGROUPS = Path("/sys/fs/cgroup")
_SYSCTLS = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}
"""The kubelet sees to these values, and would write them for the whole machine."""
_TEMPORARY = ("/run", "/var/lib/cni")


def start_first_process(command: list[str], log: Path) -> tuple[int, int]:
    """Starts `command` as the first process of fresh namespaces.

    Returns:
        Process ids of `unshare`, with which all ends, and of the first process.
    """
    unshare = ["unshare", "-m", "-n", "-p", "-f", "--mount-proc", "--kill-child", "--", *command]
    with log.open("wb") as output:
        outer = subprocess.Popen(
            unshare, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline and outer.poll() is None:
        found = children.read_text().split()
        if found:
            return outer.pid, int(found[0])
        time.sleep(0.02)
    said = log.read_text(errors="replace").strip()[-500:]
    raise ClusterError(f"no namespaces can be made here (unshare needs root): {said}")


def enter_command(first_pid: int, command: list[str]) -> list[str]:
    """The command line that runs `command` inside the namespaces of the process `first_pid`."""
    return ["nsenter", "-t", str(first_pid), "-m", "-n", "-p", f"--wdns={Path.cwd()}", "--", *command]


def end(outer_pid: int, first_pid: int) -> None:
    """Ends the namespaces and all in them; returns when the first process is gone.

    Raises:
        ClusterError: it is still there after 15 seconds.
    """
    for pid in (first_pid, outer_pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + _GONE_WITHIN_S
    while is_alive(first_pid):
        if time.monotonic() > deadline:
            raise ClusterError(f"process {first_pid} is still there after {_GONE_WITHIN_S:g} s")
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def prepare(folder: Path) -> None:
    """Makes the namespaces that this process is the first one of into a node's.

    Args:
        folder: `var-log` and `kubelet` below it take the place of /var/log and /var/lib/kubelet.

    Raises:
        ClusterError: a mount or a link cannot be made.
    """
    _run("mount", "--make-rshared", "/")
    for target in _TEMPORARY:
        Path(target).mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "tmpfs", target)
    for name, target in (("var-log", "/var/log"), ("kubelet", "/var/lib/kubelet")):
        source = folder / name
        source.mkdir(parents=True, exist_ok=True)
        Path(target).mkdir(parents=True, exist_ok=True)
        _run("mount", "--bind", str(source), target)
    for name, value in _SYSCTLS.items():
        file = Path("/run") / name.replace("/", "_")
        file.write_text(value)
        _run("mount", "--bind", str(file), f"/proc/sys/{name}")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    _make_network()


def _make_network() -> None:
    """A bridge with the node's address; the pair of links gives it a carrier."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", BRIDGE, "type", "bridge")
    _run("ip", "addr", "add", f"{NODE_ADDRESS}/24", "dev", BRIDGE)
    _run("ip", "link", "set", BRIDGE, "up")
    _run("ip", "link", "add", "carrier0", "type", "veth", "peer", "name", "carrier1")
    _run("ip", "link", "set", "carrier0", "master", BRIDGE, "up")
    _run("ip", "link", "set", "carrier1", "up")
    # The addresses of services are reached by a rule of kube-proxy, for which there must be some route.
    _run("ip", "route", "add", "default", "dev", BRIDGE)
    # The kubelet asks a cloud's metadata service who it is, and would wait for an answer for ten seconds.
    _run("ip", "route", "add", "unreachable", "169.254.0.0/16")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")


def cgroup_folders(name: str) -> list[Path]:
    """The group `/name` in each hierarchy of this machine: one with cgroups v2, about ten with v1."""
    if (_CGROUPS / "cgroup.procs").exists():
        return [_CGROUPS / name]
    return [entry / name for entry in sorted(_CGROUPS.iterdir()) if (entry / "cgroup.procs").exists()]


def make_cgroups(name: str) -> None:
    """Makes the group that holds all pods of a cluster, so that two clusters do not meet."""
    for folder in cgroup_folders(name):
        folder.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):
            # In v1 a new group has no processors, and no process can be put into it.
            parent, own = folder.parent / setting, folder / setting
            if own.exists() and parent.exists() and not own.read_text().strip():
                own.write_text(parent.read_text())


def remove_cgroups(name: str) -> list[str]:
    """Removes the group with all below it; returns what is left since processes are in it."""
    left = []
    for top in cgroup_folders(name):
        folders = sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True)
        for folder in [*folders, top] if top.exists() else []:
            try:
                folder.rmdir()
            except OSError as error:
                left.append(f"{folder}: {error.strerror}")
    return left
