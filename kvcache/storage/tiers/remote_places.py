# SPDX-License-Identifier: Apache-2.0
"""The places of a remote store, each behind its breaker, and the probes that close them again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvcache.storage.health import Breaker, BreakerPolicy, Pace, Problem
from kvcache.storage.tier import Health
from kvcache.storage.tiers.remote_batch import AlarmClock, Part, Workers
from kvcache.storage.tiers.remote_client import CONNECTING, SLOW, RemoteClient, RemoteError

logger = logging.getLogger("vllm.kvcache")


class Places:
    """Which places of a store are asked. Thread-safe.

    Args:
        name: of the tier.
        client: of the store.
        deadline_s: of a probe; may be changed.
        policy: of the breakers.
        alarms: wakes the probes.
    """

    def __init__(
        self, name: str, client: RemoteClient, deadline_s: float, policy: BreakerPolicy, alarms: AlarmClock
    ) -> None:
        self.pace = Pace()
        self._name = name
        self._client = client
        self.deadline_s = deadline_s
        self._policy = policy
        self._alarms = alarms
        self._prober = Workers(1, f"{name}-probe")
        self._lock = threading.Lock()
        self._breakers: dict[str, Breaker] = {}
        self._progress: dict[str, float] = {}
        self._closed = False

    def start(self) -> None:
        """Waits for the first answers of the store, one deadline at most."""
        asked = threading.Event()
        for place in self._client.places():
            breaker = self._breaker(place)
            breaker.open(Problem(CONNECTING, f"{self._client.where} has not answered yet; it is being asked"))
            self._prober.submit(partial(self._probe, place, breaker))
        self._prober.submit(asked.set)
        asked.wait(self.deadline_s)

    def closed(self, place: str) -> bool:
        """Whether the place's breaker is closed: it may be asked."""
        return self._breaker(place).closed

    def usable(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Indexes of the names whose places may be asked, by place."""
        found: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            found.setdefault(self._client.place_of(name), []).append(index)
        return {place: indexes for place, indexes in found.items() if self.closed(place)}

    def came(self, place: str) -> None:
        """Something came from the place."""
        self._progress[place] = time.monotonic()

    def answered(self, place: str) -> None:
        """The place did what it was asked."""
        self.came(place)
        self._breaker(place).succeeded()

    def failed(self, place: str, error: RemoteError) -> None:
        breaker = self._breaker(place)
        if not self._closed and breaker.failed(Problem(error.reason, error.detail), missed=error.missed):
            logger.warning("KV cache: %s is not asked for a while: %s", self._name, error.detail)
            self._probe_later(place, breaker)

    def silent(self, part: Part, detail: str) -> None:
        """A deadline passed: the place is to blame if nothing came from it for some time."""
        if part.started is None:
            return
        last = max(part.started, self._progress.get(part.place, part.started))
        if time.monotonic() - last >= part.silence_s:
            self.failed(part.place, RemoteError(SLOW, detail, missed=True))

    def health(self) -> Health:
        memories = [(place, breaker.memory) for place, breaker in list(self._breakers.items())]
        problems = [(place, memory.problem) for place, memory in memories if memory.problem is not None]
        if not problems:
            return Health("Ready")
        place, problem = problems[0]
        if len(problems) == len(memories):
            return Health(problem.reason, problem.detail)
        return Health(
            "Ready", f"{len(problems)} of {len(memories)} nodes are left out; {place}: {problem.detail}"
        )

    def close(self) -> bool:
        """Whether no probe runs any more."""
        self._closed = True
        return self._prober.close(self.deadline_s)

    def _breaker(self, place: str) -> Breaker:
        breaker = self._breakers.get(place)
        if breaker is None:
            with self._lock:
                breaker = self._breakers.setdefault(place, Breaker(self._policy))
        return breaker

    def _probe_later(self, place: str, breaker: Breaker) -> None:
        probe: Callable[[], None] = partial(self._probe, place, breaker)
        self._alarms.at(breaker.memory.retry_at, lambda: self._prober.submit(probe))

    def _probe(self, place: str, breaker: Breaker) -> None:
        if self._closed or not breaker.begin_probe():
            return
        started = time.monotonic()
        first = breaker.memory.pause_s == 0
        try:
            self._client.ping(place, started + self.deadline_s)
        except RemoteError as error:
            breaker.probe_failed(Problem(error.reason, error.detail))
            if first:
                logger.warning("KV cache: %s is not there yet: %s", self._name, error.detail)
            if not self._closed:
                self._probe_later(place, breaker)
            return
        self.pace.answered(time.monotonic() - started)
        breaker.probe_answered()
        if not first:
            logger.warning("KV cache: %s answers again", self._client.where)
        if place not in self._client.places():
            with self._lock:  # a cluster has no such node any more
                self._breakers.pop(place, None)
