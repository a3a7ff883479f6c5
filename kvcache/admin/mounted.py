# SPDX-License-Identifier: Apache-2.0
"""The mounted configuration: read again when it changes, checked, and handed to the processes that lack it.

A process reports the digest of the configuration that it last took in. Whatever made it differ from the
mounted one (a change of the file, a process that started with an older one, an answer that never came), the
remedy is the same: hand it over again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcache.config import ConfigError
from kvcache.config.live import file_digest
from kvcache.config.source import read_config_file
from kvcache.control.client import ControlClient
from kvcache.control.snapshot import Snapshot
from kvcache.control.wire import SCHEDULER, Configured, rank_name
from kvcache.stats import RankStats, SchedulerStats

logger = logging.getLogger(__name__)


@dataclass
class ProcessConfig:
    """How far one process is with the mounted configuration."""

    in_effect: bool
    """It runs all of it."""
    restart: list[str] = field(default_factory=list)
    """Fields that wait for the next start of the process."""
    problem: str = ""
    """Why it was not taken in."""


class MountedConfig:
    """The file, the last good content of it, and what the processes made of that.

    Args:
        path: the file, or None where none is mounted: then there is nothing to hand over.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._version: tuple[int, ...] | None = None
        self._refused: dict[str, tuple[int, str]] = {}
        """Name of a process to its id and the digest of what it refused."""
        self.good: dict[str, Any] | None = None
        """What the file said when it could last be used."""
        self.digest = ""
        """Of `good`."""
        self.problem = ""
        """What is wrong with the file as it is now; empty while it can be used."""
        self.changes: Counter[str] = Counter()
        """`accepted` and `refused` contents of the file."""
        self.processes: dict[str, ProcessConfig] = {}

    @property
    def valid(self) -> bool | None:
        """None where no file is mounted."""
        return None if self._path is None else not self.problem

    def look(self) -> None:
        """Reads the file if it is another one than at the last look."""
        if self._path is None:
            return
        version = _version(self._path)
        if version is not None and version == self._version:
            return
        before, self._version = self._version, version
        try:
            data = read_config_file(self._path)
        except ConfigError as error:
            if str(error) != self.problem:
                self.problem = str(error)
                self.changes["refused"] += 1
                kept = "the last good one stays" if self.good is not None else "there is no earlier one"
                logger.error("the configuration is refused, and %s: %s", kept, error)
            return
        digest = file_digest(data)
        if digest != self.digest:
            waiting = ProcessConfig(in_effect=False, problem="it was not handed over yet")
            self.processes = dict.fromkeys(self.processes, waiting)
        if self.problem or digest != self.digest:
            self.changes["accepted"] += 1
            if before is not None:
                logger.info("the configuration has changed; handing it to the processes")
        self.good, self.digest, self.problem = data, digest, ""

    async def hand_over(self, snapshot: Snapshot, control: ControlClient) -> bool:
        """Gives the last good content to every process that answers and has another one.

        A process that refused it is not asked again before the content or the process is another one.

        Returns:
            Whether any process was given it, and so is no longer as the snapshot says.
        """
        if self.good is None:
            return False
        reported = _reported(snapshot)
        self.processes = {name: found for name, found in self.processes.items() if name in reported}
        lacking = []
        for name, (pid, digest, restart) in reported.items():
            if digest == self.digest:
                self.processes[name] = ProcessConfig(in_effect=not restart, restart=restart)
            elif self._refused.get(name) != (pid, self.digest):
                lacking.append(name)
        for name, answer in (await control.configure(lacking, self.good) if lacking else {}).items():
            self.processes[name] = self._noted(name, answer)
            if isinstance(answer, Configured) and answer.refused:
                self._refused[name] = (reported[name][0], self.digest)
        return bool(lacking)

    def _noted(self, name: str, answer: Configured | str) -> ProcessConfig:
        if isinstance(answer, str):
            return ProcessConfig(in_effect=False, problem=answer)
        if answer.refused:
            logger.error("%s refuses the configuration: %s", name, answer.refused)
            return ProcessConfig(in_effect=False, problem=answer.refused)
        logger.info(
            "%s has taken in the configuration: in effect %s; after a restart %s",
            name,
            ", ".join(answer.applied) or "nothing new",
            ", ".join(answer.restart) or "nothing",
        )
        return ProcessConfig(in_effect=not answer.restart, restart=list(answer.restart))


def _reported(snapshot: Snapshot) -> Mapping[str, tuple[int, str, list[str]]]:
    """Process id, digest and fields that wait for a restart, of every process that answered."""
    found: dict[str, RankStats | SchedulerStats] = {
        rank_name(rank): stats for rank, stats in snapshot.ranks.items()
    }
    if snapshot.scheduler is not None:
        found[SCHEDULER] = snapshot.scheduler
    return {
        name: (stats.pid, stats.config_digest, list(stats.config_restart)) for name, stats in found.items()
    }


def _version(path: Path) -> tuple[int, ...] | None:
    # Kubernetes puts another folder behind a link of the path, an editor changes the file in place.
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
