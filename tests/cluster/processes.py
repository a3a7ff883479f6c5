# SPDX-License-Identifier: Apache-2.0
"""Long-lived programs of a cluster: started with a log each, watched, and ended by their process ids."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

STOP_WITHIN_S = 10.0
_TAIL_BYTES = 3000


class ClusterError(Exception):
    """A part of the cluster did not come up, or has ended. The text names it and shows its log's end."""


class Processes:
    """Programs in the order of their start.

    Args:
        logs: Folder for `NAME.log` of each.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Starts a program in a session of its own; its output goes into its log.

        Raises:
            ClusterError: there is no such program.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._log(name).open("wb") as log:
            try:
                self._running[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(env or {})},
                    start_new_session=True,
                )
            except OSError as error:
                raise ClusterError(f"{name} cannot be started: {error}") from error

    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: process.pid for name, process in self._running.items()}

    def check(self) -> None:
        """Sees to it that all are there still.

        Raises:
            ClusterError: one has ended.
        """
        for name, process in self._running.items():
            code = process.poll()
            if code is not None:
                raise ClusterError(f"{name} has ended with code {code}; its log says: {self.tail(name)}")

    def wait(self, name: str, ready: Callable[[], bool], within_s: float) -> float:
        """Waits until `name` is ready; returns the seconds that it took.

        Raises:
            ClusterError: it is not in time, or one of the programs has ended.
        """
        started = time.monotonic()
        while not ready():
            self.check()
            if time.monotonic() - started > within_s:
                raise ClusterError(
                    f"{name} is not ready after {within_s:g} s; its log says: {self.tail(name)}"
                )
            time.sleep(0.1)
        return time.monotonic() - started

    def stop(self) -> None:
        """Ends all, the last one first: by SIGTERM, and after ten seconds by SIGKILL."""
        for process in reversed(self._running.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_WITHIN_S
        for process in reversed(self._running.values()):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()

    def tail(self, name: str) -> str:
        """The end of a program's log."""
        log = self._log(name)
        return log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip() if log.exists() else ""

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"
