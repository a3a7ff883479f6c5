# SPDX-License-Identifier: Apache-2.0
"""The appliance of one sample resource, run on this machine by `python -m kvcache_operator local`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from demo.server import DemoError
from kvcache_operator.local.report import RunReport
from kvcache_operator.local.report import report as report_of
from kvcache_operator.local.state import StateFolder


class Appliance:
    """One local run.

    Args:
        root: The repository; the state folder and the claims lie below it.
        sample: The resource's file, relative to `root`.
        name: The resource's name.
        claims: Folders, relative to `root`, that stand for the resource's claims, by their names.
    """

    def __init__(self, root: Path, sample: str, name: str, claims: Mapping[str, str]) -> None:
        self.claims = claims
        self.root = root
        self.sample = sample
        self.name = name

    def up(self) -> RunReport:
        """Starts it and waits until it is ready; the command shows its own progress.

        Raises:
            DemoError: it did not come up; the command has said why and has stopped what it had started.
        """
        claims = [part for name, folder in self.claims.items() for part in ("--claim", f"{name}={folder}")]
        if self._local("up", "-f", self.sample, *claims) != 0:
            raise DemoError(f"{self.sample} did not come up; the reason stands above")
        run = report_of(StateFolder(self.root / "build" / "local" / self.name))
        if run is None:
            raise DemoError(f"{self.name} has no state, although it came up; somebody has ended it")
        return run

    def down(self) -> None:
        """Stops it.

        Raises:
            DemoError: something may be left running.
        """
        if self._local("down", self.name) != 0:
            raise DemoError(f"{self.name} may still be running; end it with: {self.down_command}")

    @property
    def down_command(self) -> str:
        return f".venv/bin/python -m kvcache_operator local down {self.name}"

    def _local(self, *arguments: str) -> int:
        command: Sequence[str] = [sys.executable, "-m", "kvcache_operator", "local", *arguments]
        process = subprocess.Popen(command, cwd=self.root, stdin=subprocess.DEVNULL)
        try:
            return process.wait()
        except BaseException:
            # It stops what it started when it is told to end; that takes as long as the pod's own grace.
            process.terminate()
            process.wait()
            raise
