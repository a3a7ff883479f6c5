# SPDX-License-Identifier: Apache-2.0
"""Rounds of questions to all processes of a vLLM, few enough not to be felt there.

Each takes time from the threads that vLLM computes with. So who asks now and then has an answer of now, and
many who ask all the time share so many rounds a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from kvcache.control.snapshot import Snapshot


class Pace:
    """Lets `burst` rounds through at once and `per_s` a second in the long run (a token bucket).

    Args:
        clock: seconds.
    """

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = float(burst)
        self._clock = clock
        self._left = self._burst
        self._at = clock()

    def allows(self) -> bool:
        """Whether there may be one more now; it is counted if so."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Rounds:
    """One round at a time. For one event loop.

    Args:
        ask: asks all processes.
        pace: of the rounds.
        first: the answer before there was a round.
    """

    def __init__(self, ask: Callable[[], Awaitable[Snapshot]], pace: Pace, first: Snapshot) -> None:
        self.latest = first
        """Of the last round, whoever asked for it."""
        self._ask = ask
        self._pace = pace
        self._running: asyncio.Task[Snapshot] | None = None
        self._outdated = False

    async def snapshot(self) -> Snapshot:
        """What the processes report: of the round that runs, of a new one, or, where those came too fast, of
        the last one."""
        if self._running is None or self._running.done() or self._outdated:
            if not self._pace.allows() and not self._outdated:
                return self.latest
            self._outdated = False
            self._running = asyncio.create_task(self._round(self._running))
        return await asyncio.shield(self._running)

    def outdate(self) -> None:
        """Something was changed: who asks from here on is told of a round that began after it."""
        self._outdated = True

    async def close(self) -> None:
        """Gives up on a round that runs."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _round(self, before: asyncio.Task[Snapshot] | None) -> Snapshot:
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        try:
            self.latest = await self._ask()
        except Exception:
            self._outdated = True  # what was changed is still not told
            raise
        return self.latest
