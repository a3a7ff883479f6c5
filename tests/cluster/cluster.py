# SPDX-License-Identifier: Apache-2.0
"""One cluster as seen from outside its namespaces: up, down, and commands inside."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import binaries, init, node, sandbox
from tests.cluster.processes import ClusterError

UP_WITHIN_S = 600.0
"""Images of some GiB have to be imported."""
LIFETIME_S = 3 * 3600.0
_PIDS = "pids.json"
_PROGRAMS = ("kubectl", "unshare", "nsenter", "ip", "mount")


@dataclass(frozen=True)
class Pids:
    """Processes of a cluster as this side numbers them, and the control group of its pods."""

    outer: int
    first: int
    cgroup: str


@dataclass(frozen=True)
class Cluster:
    """A cluster whose state lies in `folder`.

    Attributes:
        mode: `api` for the API servers alone, `node` for one that runs pods.
    """

    folder: Path
    mode: str

    @classmethod
    def of(cls, mode: str) -> Cluster:
        """The one cluster of this mode that a checkout has."""
        return cls(binaries.BUILD / mode, mode)

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "pki" / "admin.conf"

    @property
    def is_up(self) -> bool:
        pids = self._pids()
        return pids is not None and sandbox.is_alive(pids.first) and (self.folder / init.READY).exists()

    def missing(self) -> str:
        """What the cluster needs and this machine lacks; empty if nothing."""
        if os.geteuid() != 0:
            return "namespaces and containers need root; run it as root"
        absent = [program for program in _PROGRAMS if shutil.which(program) is None]
        if absent:
            return f"{', '.join(absent)} not on PATH; install them"
        return binaries.missing() or (node.missing() if self.mode == "node" else "")

    def up(self, images: list[Path] | None = None, lifetime_s: float = LIFETIME_S) -> dict[str, float]:
        """Starts it, unless it is up; returns the seconds that each step took.

        Args:
            images: Archives that the node shall have; only with mode `node`, and only where it starts now.

        Raises:
            ClusterError: it did not come up; what was started of it is ended.
        """
        if self.is_up:
            return dict(json.loads((self.folder / init.READY).read_text())["seconds"])
        self.down()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        cgroup = f"kvcache-cluster-{os.getpid()}"
        command = [sys.executable, "-m", "tests.cluster.init", str(self.folder), self.mode]
        command += ["--cgroup", cgroup, "--lifetime", str(lifetime_s)]
        command += [part for image in images or () for part in ("--image", str(image.resolve()))]
        try:
            outer, first = sandbox.start_first_process(command, self.folder / "init.log")
            pids = Pids(outer, first, cgroup)
            (self.folder / _PIDS).write_text(json.dumps(vars(pids)))
            return self._wait(pids)
        except BaseException:
            self.down()
            raise

    def down(self) -> bool:
        """Ends it and removes its data but not its logs; returns whether anything of it was there.

        Raises:
            ClusterError: something of it cannot be ended.
        """
        pids = self._pids()
        if pids is None:
            return False
        if sandbox.is_alive(pids.first) or sandbox.is_alive(pids.outer):
            sandbox.end(pids.outer, pids.first)
        left = sandbox.remove_cgroups(pids.cgroup)
        if left:
            raise ClusterError(f"control groups of the cluster are left: {'; '.join(left[:3])}")
        for name in ("containerd", "kubelet", "etcd", "pki", "cni"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / init.READY).unlink(missing_ok=True)
        (self.folder / _PIDS).unlink()
        return True

    def enter(self, command: list[str]) -> list[str]:
        """The command line that runs `command` inside.

        Raises:
            ClusterError: the cluster is not up.
        """
        pids = self._pids()
        if pids is None or not self.is_up:
            raise ClusterError(f"the cluster is not up; start it with: tests/cluster/up {self.mode}")
        return sandbox.enter_command(pids.first, command)

    def environment(self) -> dict[str, str]:
        """Environment of commands inside: no proxy reaches a cluster's addresses."""
        proxies = {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}
        kept = {name: value for name, value in os.environ.items() if name.lower() not in proxies}
        return kept | {"KUBECONFIG": str(self.kubeconfig)}

    def _wait(self, pids: Pids) -> dict[str, float]:
        deadline = time.monotonic() + UP_WITHIN_S
        while not (self.folder / init.READY).exists():
            if not sandbox.is_alive(pids.first):
                error = self.folder / init.ERROR
                log = self.folder / "init.log"
                raise ClusterError((error if error.exists() else log).read_text(errors="replace")[-4000:])
            if time.monotonic() > deadline:
                raise ClusterError(f"not up after {UP_WITHIN_S:g} s; its logs lie in {self.folder / 'log'}")
            time.sleep(0.1)
        return dict(json.loads((self.folder / init.READY).read_text())["seconds"])

    def _pids(self) -> Pids | None:
        file = self.folder / _PIDS
        return Pids(**json.loads(file.read_text())) if file.exists() else None
