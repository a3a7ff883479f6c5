# SPDX-License-Identifier: Apache-2.0
"""Whether a remote place is worth asking: a circuit breaker, and what its answers took lately.

A breaker is closed while the place answers. It opens at a missed deadline, or after a few failures in a row
that came quickly; from then on nobody waits for the place. Once its pause is over one probe may go there: an
answer closes the breaker, none doubles the pause. A place that fails again soon after it came back goes on
with its long pause: one that answers probes but no real requests is not asked every second.

The state is a value and its changes are functions of it and the time; `Breaker` keeps one for several
threads.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple


class BreakerState(Enum):
    CLOSED = auto()
    OPEN = auto()
    PROBING = auto()


class Problem(NamedTuple):
    """Why a place is not asked."""

    reason: str
    """In CamelCase, as in `kvcache.storage.tier.Health`."""
    detail: str


@dataclass(frozen=True)
class BreakerPolicy:
    """When a breaker opens, and for how long."""

    failures: int = 3
    """In a row, none of which cost a deadline."""
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    relapse_s: float = 30.0
    """A place that fails within this time after it came back has not recovered: its pause goes on growing."""


@dataclass(frozen=True)
class BreakerMemory:
    """All that a breaker remembers. Times are seconds of one monotonic clock."""

    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    pause_s: float = 0.0
    """The last pause, without its jitter; 0 before the first."""
    retry_at: float = 0.0
    """While open: when a probe is due."""
    closed_at: float = float("-inf")
    problem: Problem | None = None


def opened(
    memory: BreakerMemory, policy: BreakerPolicy, now: float, problem: Problem, jitter: float
) -> BreakerMemory:
    """Open, with the pause that is due now.

    Args:
        jitter: 0 to 1; takes up to half of the pause away, so that many processes do not probe at once.
    """
    relapse = memory.state is BreakerState.PROBING or now - memory.closed_at < policy.relapse_s
    pause = (
        min(memory.pause_s * 2, policy.longest_pause_s)
        if relapse and memory.pause_s
        else policy.first_pause_s
    )
    return replace(
        memory,
        state=BreakerState.OPEN,
        failures=0,
        pause_s=pause,
        retry_at=now + pause * (1 - jitter / 2),
        problem=problem,
    )


def failed(
    memory: BreakerMemory, policy: BreakerPolicy, now: float, problem: Problem, jitter: float, *, missed: bool
) -> BreakerMemory:
    """After an operation that failed; `missed`: it cost its deadline.

    Operations that began before the breaker opened change nothing any more.
    """
    if memory.state is not BreakerState.CLOSED:
        return memory
    if missed or memory.failures + 1 >= policy.failures:
        return opened(memory, policy, now, problem, jitter)
    return replace(memory, failures=memory.failures + 1)


def succeeded(memory: BreakerMemory) -> BreakerMemory:
    """After an operation that the place answered."""
    if memory.state is BreakerState.CLOSED and memory.failures:
        return replace(memory, failures=0)
    return memory


def probe_begun(memory: BreakerMemory, now: float) -> BreakerMemory | None:
    """If a probe is due: the memory while it runs."""
    if memory.state is BreakerState.OPEN and now >= memory.retry_at:
        return replace(memory, state=BreakerState.PROBING)
    return None


def probe_answered(memory: BreakerMemory, now: float) -> BreakerMemory:
    """Closed again; the last pause is remembered for a relapse."""
    return replace(memory, state=BreakerState.CLOSED, failures=0, closed_at=now, problem=None)


class Breaker:
    """A breaker for several threads.

    Args:
        policy: when it opens, and for how long.
        clock: seconds, monotonic.
        jitter: 0 to 1, one for each pause.
    """

    def __init__(
        self,
        policy: BreakerPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy or BreakerPolicy()
        self._clock = clock
        self._jitter = jitter
        self._lock = threading.Lock()
        self._memory = BreakerMemory()

    @property
    def memory(self) -> BreakerMemory:
        return self._memory

    @property
    def closed(self) -> bool:
        return self._memory.state is BreakerState.CLOSED

    def failed(self, problem: Problem, *, missed: bool) -> bool:
        """True if this opened it."""
        with self._lock:
            before = self._memory
            self._memory = failed(before, self._policy, self._clock(), problem, self._jitter(), missed=missed)
            return self._memory.state is not before.state

    def succeeded(self) -> None:
        with self._lock:
            self._memory = succeeded(self._memory)

    def open(self, problem: Problem) -> None:
        """Opens it whatever was before; a probe is due at once."""
        with self._lock:
            self._memory = BreakerMemory(BreakerState.OPEN, retry_at=self._clock(), problem=problem)

    def begin_probe(self) -> bool:
        """True if a probe is due: the caller runs it and says how it went."""
        with self._lock:
            memory = probe_begun(self._memory, self._clock())
            if memory is None:
                return False
            self._memory = memory
            return True

    def probe_answered(self) -> None:
        with self._lock:
            self._memory = probe_answered(self._memory, self._clock())

    def probe_failed(self, problem: Problem) -> None:
        with self._lock:
            self._memory = opened(self._memory, self._policy, self._clock(), problem, self._jitter())


class Pace:
    """What a place took lately: means in which each new operation weighs a fifth. Thread-safe."""

    WEIGHT = 0.2

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.latency_s = 0.0
        """Of an answer without payload; 0 before the first."""
        self.bytes_per_second = 0.0
        """Of one transfer; 0 before the first."""

    def answered(self, seconds: float) -> None:
        with self._lock:
            self.latency_s = self._mean(self.latency_s, seconds)

    def transferred(self, num_bytes: int, seconds: float) -> None:
        if num_bytes > 0 and seconds > 0:
            with self._lock:
                # Seconds per byte are what adds up, so they are what is averaged.
                per_byte = seconds / num_bytes
                before = 1 / self.bytes_per_second if self.bytes_per_second else 0.0
                self.bytes_per_second = 1 / self._mean(before, per_byte)

    def seconds_for(self, num_bytes: int) -> float:
        """What a transfer of so many bytes would take; 0 while nothing was measured."""
        return num_bytes / self.bytes_per_second if self.bytes_per_second else 0.0

    def _mean(self, before: float, value: float) -> float:
        return value if not before else before + self.WEIGHT * (value - before)
