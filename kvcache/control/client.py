# SPDX-License-Identifier: Apache-2.0
"""The sidecar's end of the control sockets: asks all processes at once, each within one deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvcache.control.connections import Connections
from kvcache.control.snapshot import Snapshot
from kvcache.control.wire import (
    EVERYTHING,
    SCHEDULER,
    Configure,
    Configured,
    Flush,
    Flushed,
    FlushResult,
    FlushScope,
    GetStats,
    RankSnapshot,
    SchedulerSnapshot,
    rank_name,
    rank_of,
    served_names,
    socket_path,
)
from kvcache.ipc import IpcError, NoAnswerError, ReplyT, UnreachableError


class ControlClient:
    """Asks the scheduler and the ranks of one vLLM. For one event loop.

    Args:
        runtime_dir: folder of the control sockets. It need not exist yet.
        expected_ranks: ranks that must be there; those whose sockets are found otherwise.
        timeout_s: the longest that a process may take for its statistics.
        flush_timeout_s: the longest that it may take for a flush.
    """

    def __init__(
        self,
        runtime_dir: str | Path,
        expected_ranks: int | None = None,
        timeout_s: float = 2.0,
        flush_timeout_s: float = 10.0,
    ) -> None:
        self._runtime_dir = Path(runtime_dir)
        self._expected = [rank_name(rank) for rank in range(expected_ranks or 0)]
        self._timeout_s = timeout_s
        self._flush_timeout_s = flush_timeout_s
        self._connections = Connections()

    async def snapshot(self) -> Snapshot:
        """Statistics of every process that is expected or found; one that does not answer is missing."""
        ranks = self._ranks()
        asked = [SCHEDULER, *ranks]
        self._connections.forget_others([socket_path(self._runtime_dir, name) for name in asked])
        scheduler, *answers = await asyncio.gather(
            self._ask(SCHEDULER, GetStats(), SchedulerSnapshot, self._timeout_s),
            *(self._ask(name, GetStats(), RankSnapshot, self._timeout_s) for name in ranks),
        )
        missing = {
            name: answer
            for name, answer in zip(asked, [scheduler, *answers], strict=True)
            if isinstance(answer, str)
        }
        return Snapshot(
            taken_at=time.time(),
            scheduler=scheduler.stats if isinstance(scheduler, SchedulerSnapshot) else None,
            ranks={answer.stats.rank: answer.stats for answer in answers if isinstance(answer, RankSnapshot)},
            missing=missing,
        )

    async def flush(
        self, tiers: Sequence[str], scope: FlushScope = EVERYTHING
    ) -> dict[str, list[FlushResult]]:
        """Has every rank drop what it stores in these tiers and is in the scope.

        Returns:
            The name of each rank to one result a tier; those of a rank that does not answer say so.
        """
        ranks = self._ranks()
        answers = await asyncio.gather(
            *(self._ask(name, Flush(list(tiers), scope), Flushed, self._flush_timeout_s) for name in ranks)
        )
        return {name: _complete_results(tiers, answer) for name, answer in zip(ranks, answers, strict=True)}

    async def configure(self, names: Sequence[str], file: Mapping[str, Any]) -> dict[str, Configured | str]:
        """Hands these processes what the configuration file says.

        Returns:
            The name of each to what became of it there, or to why there is no answer.
        """
        message = Configure(dict(file))
        answers = await asyncio.gather(
            *(self._ask(name, message, Configured, self._flush_timeout_s) for name in names)
        )
        return dict(zip(names, answers, strict=True))

    async def ask_ranks(
        self, message: msgspec.Struct, reply: type[ReplyT], timeout_s: float
    ) -> dict[str, ReplyT | IpcError]:
        """The answer of every rank that is expected or found, or why there is none."""

        async def ask(name: str) -> ReplyT | IpcError:
            try:
                return await self._request(name, message, reply, timeout_s)
            except IpcError as error:
                return error

        ranks = self._ranks()
        return dict(zip(ranks, await asyncio.gather(*map(ask, ranks)), strict=True))

    def close(self) -> None:
        self._connections.close()

    def _ranks(self) -> list[str]:
        found = [name for name in served_names(self._runtime_dir) if name != SCHEDULER]
        return sorted({*self._expected, *found}, key=lambda name: rank_of(name) or 0)

    async def _ask(
        self, name: str, message: msgspec.Struct, reply: type[ReplyT], timeout_s: float
    ) -> ReplyT | str:
        """The answer, or in words why there is none."""
        try:
            return await self._request(name, message, reply, timeout_s)
        except IpcError as error:
            return in_words(error, timeout_s)

    async def _request(
        self, name: str, message: msgspec.Struct, reply: type[ReplyT], timeout_s: float
    ) -> ReplyT:
        path = socket_path(self._runtime_dir, name)
        return await self._connections.request(path, message, reply, timeout_s)


def in_words(error: IpcError, timeout_s: float) -> str:
    """Why a process that was given `timeout_s` did not answer."""
    if isinstance(error, UnreachableError):
        return "its control socket is not served; the process is gone or has not started yet"
    if isinstance(error, NoAnswerError):
        return f"it did not answer within {timeout_s:g} s"
    return str(error)


def _complete_results(tiers: Sequence[str], answer: Flushed | str) -> list[FlushResult]:
    """One result for each tier, whatever the rank answered."""
    if isinstance(answer, str):
        return [FlushResult(tier=tier, complete=False, reason=answer) for tier in tiers]
    by_tier = {result.tier: result for result in answer.results}
    return [
        by_tier.get(tier) or FlushResult(tier=tier, complete=False, reason="the rank has no such tier")
        for tier in tiers
    ]
