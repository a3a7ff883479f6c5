# SPDX-License-Identifier: Apache-2.0
"""A tier below host memory as the storage manager uses it: what it is there for, how fast it was, and
whether it answers.

A tier is not asked for objects while such a call is open and none was answered for as long as its deadline:
whatever it does, it costs those who wait for it one deadline and no more until it answers again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from kvcache.config.tiers import WriteMode
from kvcache.stats import TierStats
from kvcache.storage.plan import Cost
from kvcache.storage.policies import AdmissionPolicy
from kvcache.storage.tier import Health, PutOutcome, StoredObject, Tier, WantedObject
from kvcache.tokens.keys import CacheEngineKey

logger = logging.getLogger("vllm.kvcache")

STALLED = "Stalled"
"""State of a tier that has not answered within its deadline."""
SMOOTHING = 0.3
"""Weight of a new measurement."""
MEASURED_FOR_S = 30.0
"""After this a measurement counts no more: a tier that was slow is tried again."""

T = TypeVar("T")


@dataclass
class LaneCounters:
    """What the manager did with the tier."""

    hit_tokens: int = 0
    """Loaded by the requests for which they were fetched from here."""
    fetched_objects: int = 0
    fetch_failures: int = 0
    """Objects that the tier said it had and did not give."""
    not_worth_tokens: int = 0
    """Found, but sooner computed than fetched."""
    writes_dropped: int = 0
    """Objects that were to be written and were not, since too much waited before them."""
    writes_declined: int = 0
    """By the tier's admission, a tenant's quota, or for lack of room."""
    write_failures: int = 0


@dataclass
class _Average:
    """An exponentially weighted mean that is forgotten after a while."""

    value: float | None = None
    measured_at: float = 0.0

    def add(self, value: float, now: float) -> None:
        self.value = value if self.get(now) is None else self.value_after(value)
        self.measured_at = now

    def value_after(self, value: float) -> float:
        return value if self.value is None else self.value + SMOOTHING * (value - self.value)

    def get(self, now: float) -> float | None:
        return self.value if now - self.measured_at <= MEASURED_FOR_S else None


@dataclass(eq=False)
class Lane:
    """One tier in its place. Thread-safe; calls to the tier that raise are failed futures.

    Args:
        index: 0 for the fastest tier below host memory.
        tier: it.
        write: written when a chunk is stored above, or when it leaves host memory.
        deadline_s: the longest that a request waits for the tier.
        write_queue_bytes: what may wait to be written.
        admission: which chunk is written at all, where the tier does not say so itself.
        clock: seconds, monotonic.
    """

    index: int
    tier: Tier
    write: WriteMode = "Through"
    deadline_s: float = 2.0
    write_queue_bytes: int = 512 << 20
    admission: AdmissionPolicy[CacheEngineKey] | None = None
    clock: Callable[[], float] = time.monotonic
    count: LaneCounters = field(default_factory=LaneCounters)
    queued_bytes: int = 0
    """Of fetches that are under way or wait."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, float] = {}
        """Calls that somebody waits for, and since when."""
        self._calls = 0
        self._last_answer = -math.inf
        self._logged: set[type[Exception]] = set()
        self._latency, self._seconds_per_byte = _Average(), _Average()
        self._last_read_end = -math.inf

    @property
    def name(self) -> str:
        return self.tier.name

    @property
    def bit(self) -> int:
        """Stands for the tier in a set of tiers."""
        return 1 << self.index

    def stalled(self) -> bool:
        with self._lock:
            since = max(min(self._open.values(), default=math.inf), self._last_answer)
        return self.clock() - since > self.deadline_s

    def readable(self) -> bool:
        """Whether to ask it for objects now."""
        health = self.tier.health()
        return (health.ready or health.readable) and not self.stalled()

    def accepts(self) -> bool:
        """Whether it takes objects, as far as it knows itself."""
        health = self.tier.health()
        return health.ready or health.writable

    def writable(self) -> bool:
        """Whether it takes objects now."""
        return self.accepts() and not self.stalled()

    def admits(self, key: CacheEngineKey) -> bool:
        """Whether to write a chunk that is there to be written once more."""
        if self.admission is None:
            return True
        with self._lock:
            self.admission.seen(key)
            return self.admission.admits(key, None)

    def head(self, keys: Sequence[CacheEngineKey]) -> Future[list[int | None]]:
        started = self.clock()
        future = self._watched(lambda: self.tier.head(keys))
        if not future.done():
            # One that is answered at once says nothing about the tier's distance.
            future.add_done_callback(lambda _: self._latency.add(self.clock() - started, self.clock()))
        return future

    def get(self, wanted: Sequence[WantedObject]) -> Future[list[bool]]:
        return self._watched(lambda: self.tier.get(wanted))

    def put(self, objects: Sequence[StoredObject]) -> Future[list[PutOutcome]]:
        return self._call(lambda: self.tier.put(objects))

    def observe_read(self, num_bytes: int, started: float) -> None:
        """A read has just ended. Reads are taken one after the other: what a tier does at the same time
        counts once."""
        now = self.clock()
        with self._lock:
            seconds = now - max(started, self._last_read_end)
            self._last_read_end = now
            if num_bytes:
                self._seconds_per_byte.add(max(0.0, seconds) / num_bytes, now)

    def cost(self) -> Cost | None:
        """What reading from it takes, as far as was measured lately."""
        now = self.clock()
        seconds_per_byte = self._seconds_per_byte.get(now)
        if seconds_per_byte is None:
            return None
        return Cost(self._latency.get(now) or 0.0, seconds_per_byte, self.queued_bytes)

    def stats(self) -> TierStats:
        """The tier's own figures with the manager's."""
        stats, cost, health = self.tier.stats(), self.cost(), self.tier.health()
        if health.ready and self.stalled():
            health = Health(STALLED, f"it has not answered for {self.deadline_s:g} s; requests do without it")
        return msgspec.structs.replace(
            stats,
            state=health.state,
            detail=health.detail,
            hit_tokens=self.count.hit_tokens,
            fetch_failures=self.count.fetch_failures,
            not_worth_tokens=self.count.not_worth_tokens,
            declined=self.count.writes_declined,
            writes_dropped=self.count.writes_dropped,
            write_failures=self.count.write_failures,
            fetch_latency_seconds=cost.latency_s if cost else 0.0,
            fetch_bytes_per_second=1 / cost.seconds_per_byte if cost and cost.seconds_per_byte else 0.0,
        )

    def _watched(self, ask: Callable[[], Future[T]]) -> Future[T]:
        """A call that somebody waits for."""
        with self._lock:
            self._calls += 1
            call = self._calls
            self._open[call] = self.clock()
        future = self._call(ask)
        future.add_done_callback(lambda _: self._answered(call))
        return future

    def _call(self, ask: Callable[[], Future[T]]) -> Future[T]:
        try:
            return ask()
        except Exception as error:
            if type(error) not in self._logged:
                self._logged.add(type(error))
                logger.exception("KV cache: the tier %s raised instead of answering", self.name)
            future: Future[T] = Future()
            future.set_exception(error)
            return future

    def _answered(self, call: int) -> None:
        with self._lock:
            del self._open[call]
            self._last_answer = self.clock()
