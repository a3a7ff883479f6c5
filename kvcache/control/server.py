# SPDX-License-Identifier: Apache-2.0
"""The end of the control socket inside vLLM: one for the scheduler, one for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvcache.control.wire import (
    Flush,
    Flushed,
    FlushResult,
    GetStats,
    RankSnapshot,
    SchedulerSnapshot,
    socket_path,
)
from kvcache.ipc import Server, ServerCounters
from kvcache.stats import RankStats, SchedulerStats


class ControlBackend(Protocol):
    """What the server asks of its process. Called on the server's thread."""

    def stats(self) -> RankStats | SchedulerStats:
        """A snapshot of now."""
        ...

    def flush(self, tiers: Sequence[str]) -> list[FlushResult]:
        """Drops what is stored in these tiers; one result for each of them that the process has."""
        ...


class ControlServer:
    """Serves one process's control socket until it is closed.

    Args:
        runtime_dir: folder of the sockets.
        name: `scheduler` or `rank<r>`.

    Raises:
        IpcError: the socket cannot be opened; the text says why.
    """

    def __init__(self, runtime_dir: str | Path, name: str, backend: ControlBackend) -> None:
        self._backend = backend
        self._server = Server(socket_path(runtime_dir, name), {GetStats: self._stats, Flush: self._flush})

    @property
    def path(self) -> Path:
        return self._server.path

    @property
    def counters(self) -> ServerCounters:
        return self._server.counters

    def close(self) -> None:
        """Ends the thread and removes the socket."""
        self._server.close()

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stats(self, _: GetStats) -> RankSnapshot | SchedulerSnapshot:
        stats = self._backend.stats()
        return RankSnapshot(stats) if isinstance(stats, RankStats) else SchedulerSnapshot(stats)

    def _flush(self, message: Flush) -> Flushed:
        return Flushed(self._backend.flush(message.tiers))
