# SPDX-License-Identifier: Apache-2.0
"""The end of the control socket inside vLLM: one for the scheduler, one for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from kvcache.control.wire import (
    Configure,
    Configured,
    Flush,
    Flushed,
    FlushResult,
    FlushScope,
    GetPins,
    GetStats,
    Locate,
    Located,
    Pin,
    Pinned,
    Pins,
    Prefix,
    RankSnapshot,
    SchedulerSnapshot,
    Unpin,
    Unpinned,
    socket_path,
)
from kvcache.ipc import Server, ServerCounters
from kvcache.stats import RankStats, SchedulerStats


class ControlBackend(Protocol):
    """What the server asks of its process. Called on the server's thread."""

    def stats(self) -> RankStats | SchedulerStats:
        """A snapshot of now."""
        ...

    def flush(self, tiers: Sequence[str], scope: FlushScope) -> Future[list[FlushResult]]:
        """Drops what is stored in these tiers, all if none is named; one result for each of them that the
        process has."""
        ...

    def pin(self, owner: str, prefix: Prefix, check: bool) -> Pinned:
        """Keeps a prefix, or checks whether it can be kept."""
        ...

    def unpin(self, owner: str) -> Unpinned:
        """Lets go of all that the owner has pinned."""
        ...

    def pins(self) -> Pins:
        """What every owner has pinned."""
        ...

    def locate(self, prefix: Prefix) -> Future[Located]:
        """Which part of a prompt is stored, and where."""
        ...

    def configure(self, file: Mapping[str, Any]) -> Configured:
        """Takes in what the configuration file says, as far as it can without a restart."""
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
        self._server = Server(
            socket_path(runtime_dir, name),
            {
                GetStats: self._stats,
                Flush: self._flush,
                Pin: self._pin,
                Unpin: self._unpin,
                GetPins: self._pins,
                Locate: self._locate,
                Configure: self._configure,
            },
        )

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

    def _configure(self, message: Configure) -> Configured:
        return self._backend.configure(message.file)

    def _flush(self, message: Flush) -> Future[Flushed]:
        reply: Future[Flushed] = Future()

        def answer(results: Future[list[FlushResult]]) -> None:
            try:
                reply.set_result(Flushed(results.result()))
            except Exception as error:
                reply.set_exception(error)

        self._backend.flush(message.tiers, message.scope).add_done_callback(answer)
        return reply

    def _pin(self, message: Pin) -> Pinned:
        return self._backend.pin(message.owner, message.prefix, message.check)

    def _unpin(self, message: Unpin) -> Unpinned:
        return self._backend.unpin(message.owner)

    def _pins(self, _: GetPins) -> Pins:
        return self._backend.pins()

    def _locate(self, message: Locate) -> Future[Located]:
        return self._backend.locate(message.prefix)
