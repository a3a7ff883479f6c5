# SPDX-License-Identifier: Apache-2.0
"""The first process of a cluster's namespaces: starts all parts, says when they are ready, watches over them.

    python -m tests.cluster.init FOLDER {api,node} --cgroup NAME --lifetime SECONDS [--image ARCHIVE]...

When it ends, by itself or not, the kernel ends all that was started in its namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from tests.cluster import node, sandbox
from tests.cluster.binaries import binaries
from tests.cluster.control_plane import Endpoints, start_control_plane, start_crd_server
from tests.cluster.pause import write_pause_image
from tests.cluster.processes import ClusterError, Processes

READY = "ready.json"
ERROR = "error.txt"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.cluster.init")
    parser.add_argument("folder", type=Path)
    parser.add_argument("mode", choices=("api", "node"))
    parser.add_argument("--cgroup", required=True)
    parser.add_argument("--lifetime", type=float, required=True)
    parser.add_argument("--image", type=Path, action="append", default=[])
    options = parser.parse_args()
    folder: Path = options.folder
    processes = Processes(folder / "log")
    try:
        times = start(folder, options.mode, options.cgroup, options.image, processes)
        fresh = folder / f".{READY}"
        fresh.write_text(json.dumps({"mode": options.mode, "seconds": times}))
        fresh.rename(folder / READY)
        watch(processes, options.lifetime)
    except (ClusterError, RuntimeError) as error:
        (folder / ERROR).write_text(str(error))
        return 1
    return 0


def start(folder: Path, mode: str, cgroup: str, images: list[Path], processes: Processes) -> dict[str, float]:
    """Starts the parts that `mode` asks for; returns the seconds that each step took.

    Raises:
        ClusterError, RuntimeError: a step failed.
    """
    times: dict[str, float] = {}
    begun = time.monotonic()

    def took(step: str) -> None:
        nonlocal begun
        now = time.monotonic()
        times[step] = round(now - begun, 2)
        begun = now

    sandbox.prepare(folder)
    took("namespaces")
    found = binaries()
    took("binaries")
    plane = start_control_plane(folder, found, processes, Endpoints(address=sandbox.NODE_ADDRESS))
    took("etcd and kube-apiserver")
    if start_crd_server(plane, processes):
        took("apiextensions-apiserver")
    if mode == "node":
        sandbox.make_cgroups(cgroup)
        node.start_containerd(folder, processes)
        took("containerd")
        pause = folder / "pause.tar"
        write_pause_image(pause, node.PAUSE_IMAGE)
        for image in [pause, *images]:
            node.import_image(image)
            took(f"import {image.name}")
        node.start_node(plane, cgroup, processes)
        took("node ready")
    return times


def watch(processes: Processes, lifetime_s: float) -> None:
    """Collects orphans, as a first process has to; returns after `lifetime_s`.

    Raises:
        ClusterError: a part of the cluster has ended.
    """
    ends = time.monotonic() + lifetime_s
    while time.monotonic() < ends:
        collect_orphans(set(processes.pids().values()))
        processes.check()
        time.sleep(0.5)


def collect_orphans(own: set[int]) -> None:
    """Takes note of the end of children that nobody here has started, such as containers' shims."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in own:
            return
        os.waitpid(ended.si_pid, 0)


if __name__ == "__main__":
    sys.exit(main())
