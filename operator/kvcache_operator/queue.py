# SPDX-License-Identifier: Apache-2.0
"""A queue of keys: each is worked on by one worker at a time, and what comes in meanwhile counts once.

Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


class Key(NamedTuple):
    """A resource."""

    namespace: str
    name: str


@dataclass
class KeyedQueue:
    """Keys that wait, now or until later."""

    _waiting: deque[Key] = field(default_factory=deque)
    _queued: set[Key] = field(default_factory=set)
    _active: set[Key] = field(default_factory=set)
    _again: set[Key] = field(default_factory=set)
    """Asked for while they were worked on."""
    _later: list[tuple[float, int, Key]] = field(default_factory=list)
    _due: dict[Key, float] = field(default_factory=dict)
    _count: itertools.count[int] = field(default_factory=itertools.count)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    added: int = 0
    """Keys that were asked for, those included that had been waiting already."""

    def add(self, key: Key) -> None:
        """Has the key worked on as soon as a worker is free; once, however often it is asked for."""
        self.added += 1
        self._due.pop(key, None)
        if key in self._active:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._waiting.append(key)
            self._changed.set()

    def add_after(self, key: Key, seconds: float) -> None:
        """Has the key worked on after that time, or before if somebody asks; the earliest time holds."""
        due = asyncio.get_running_loop().time() + max(0.0, seconds)
        if key in self._queued or self._due.get(key, float("inf")) <= due:
            return
        self._due[key] = due
        heapq.heappush(self._later, (due, next(self._count), key))
        self._changed.set()

    async def get(self) -> Key:
        """The next key. Call `done` with it afterwards."""
        while True:
            self._wake()
            if self._waiting:
                key = self._waiting.popleft()
                self._queued.discard(key)
                self._active.add(key)
                return key
            self._changed.clear()
            timeout = None
            if self._later:
                timeout = max(0.0, self._later[0][0] - asyncio.get_running_loop().time())
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def done(self, key: Key) -> None:
        """The worker has finished with the key."""
        self._active.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    @property
    def depth(self) -> int:
        """Keys that wait for a worker now."""
        return len(self._waiting)

    def _wake(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._later and self._later[0][0] <= now:
            due, _, key = heapq.heappop(self._later)
            # A time that was replaced by an earlier one, or by a request, is void.
            if self._due.get(key) == due:
                self.add(key)
