# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes on this machine, for tests: `python -m tests.cluster {up,down,run,status}`.

    up api        etcd and the API servers
    up node       and controller manager, scheduler, containerd, kubelet and kube-proxy: pods run
    run COMMAND   in the cluster's namespaces, with KUBECONFIG set
    down          ends all of it

Needs root. All of it lives in namespaces of its own and below build/cluster/MODE, and ends by itself after
three hours.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.cluster.cluster import LIFETIME_S, Cluster
from tests.cluster.processes import ClusterError


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster",
        description="A real Kubernetes on this machine, for tests. Needs root.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, text in (
        ("up", "start a cluster; nothing to do where it is up"),
        ("down", "end it; nothing to do where it is not up"),
        ("run", "run a command in its namespaces"),
        ("status", "say whether it is up; exit code 0 if so"),
    ):
        command = commands.add_parser(name, help=text)
        if name == "run":
            command.add_argument("--mode", choices=("api", "node"), default="node")
            command.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND")
            continue
        command.add_argument("mode", choices=("api", "node"), nargs="?", default="node")
        if name == "up":
            text = "archive of an image to bring into the node; may be given more than once"
            command.add_argument("--image", type=Path, action="append", default=[], help=text)
            text = "seconds after which it ends by itself; default: %(default)g"
            command.add_argument("--lifetime", type=float, default=LIFETIME_S, help=text)
    options = parser.parse_args()
    cluster = Cluster.of(options.mode)
    try:
        if options.command == "up":
            reason = cluster.missing()
            if reason:
                raise ClusterError(reason)
            for step, seconds in cluster.up(options.image, options.lifetime).items():
                print(f"  {seconds:6.2f} s  {step}")
            print(f"up; KUBECONFIG={cluster.kubeconfig}, to be used in: tests/cluster/run COMMAND")
        elif options.command == "down":
            print("down" if cluster.down() else "was not up")
        elif options.command == "status":
            print("up" if cluster.is_up else "down")
            return 0 if cluster.is_up else 1
        elif not options.argv:
            parser.error("run needs a command")
        else:
            inside = cluster.enter(options.argv)
            os.execvpe(inside[0], inside, cluster.environment())  # noqa: S606
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
