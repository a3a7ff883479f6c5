# SPDX-License-Identifier: Apache-2.0
"""Brings the chunks of a lookup from the tiers below into host memory, before anything is loaded.

A lookup leases what is in host memory and goes on here: each chunk that follows is looked for in the tiers,
the fastest first; what is found and pays is claimed in host memory and read; what has arrived is leased to
the lookup. Whoever asked sees from `Standing` how far it is and whether more may come.

Nothing here waits. Tiers answer by their futures' callbacks on threads of their own, which never wait for the
lock: whoever has it carries out what they post.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeVar

from kvcache.memory.objects import MemoryObj
from kvcache.storage.lane import Lane
from kvcache.storage.plan import HOST, Found, worth_fetching
from kvcache.storage.tier import NO_PARENT, NO_TENANT, WantedObject
from kvcache.storage.tiers.cpu import CpuTier, Outcome
from kvcache.tokens.keys import CacheEngineKey

logger = logging.getLogger("vllm.kvcache")

R = TypeVar("R")

FIRST_HEADS = 16
"""Chunks that a tier is asked for at first; ever more after each answer, since most prompts that it has not
it has not from early on."""
MORE_HEADS = 4
BATCH_BYTES = 32 << 20
BATCH_OBJECTS = 64
MOST_BATCHES = 4
"""With a tier at a time. What waits before them can still be given up, and what has come can be used."""


@dataclass(frozen=True)
class Query:
    """What a lookup wants."""

    keys: Sequence[CacheEngineKey]
    num_tokens: int
    """That the keys stand for: all chunks but the last one are full."""
    tenant: bytes = NO_TENANT
    seconds_per_token: float = 0.0
    """What computing a token takes; 0 if that is not known."""
    skip: int = 0
    """Leading chunks that need not be there."""


class Standing(NamedTuple):
    """How far a lookup is."""

    chunks: int
    """Leading chunks that are in host memory, leased, or skipped."""
    most: int
    """Leading chunks that may be there later; as many as `chunks` once nothing more comes."""
    wait_s: float = 0.0
    """From the start of the lookup: the longest that the slowest tier which is asked may take."""
    stored: int = 0
    """Leading chunks that are in host memory, skipped ones too."""
    sources: tuple[tuple[str, int], ...] = ()
    """Where the leading chunks came from: the name of a tier and a number of chunks, in order."""


@dataclass(eq=False)
class _Search:
    """One lookup's way through the tiers."""

    owner: str
    query: Query
    chunk_tokens: int
    started: float
    held: int
    """Leading chunks that are leased, or skipped."""
    gap: int | None
    """The first of the skipped chunks that is not in host memory."""
    decided: int
    """Leading chunks that are leased or claimed."""
    sources: list[int]
    """Of the decided chunks."""
    ended: bool = False
    """Nothing is decided any more."""
    asking: bool = False
    """A tier has not answered yet, and nothing is decided before it does."""
    wait_s: float = 0.0
    answers: dict[int, dict[int, int | None]] = field(default_factory=dict)
    """Of each tier: chunk to bytes, None where it is not."""
    heads: dict[int, int] = field(default_factory=dict)
    """Of each tier: how many chunks it is asked for next."""

    def tokens(self, at: int) -> int:
        """Of a chunk."""
        return min(self.chunk_tokens, self.query.num_tokens - at * self.chunk_tokens)

    def parent(self, at: int) -> bytes:
        return self.query.keys[at - 1].chunk_hash if at else NO_PARENT


class _Item(NamedTuple):
    """A claimed chunk to read."""

    key: CacheEngineKey
    obj: MemoryObj


class Fetcher:
    """Of one rank. Thread-safe.

    Args:
        cpu: where chunks are fetched to.
        lanes: the tiers below, the fastest first.
        arrived: called with the keys that came and the tier that they came from.
        forget_after_s: a lookup that nobody asked about or ended for so long is given up.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cpu: CpuTier,
        lanes: Sequence[Lane],
        arrived: Callable[[list[CacheEngineKey], Lane], None],
        forget_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cpu = cpu
        self._lanes = lanes
        self._chunk_tokens = cpu.shape.chunk_tokens
        self._token_bytes = cpu.shape.token_bytes
        self._arrived = arrived
        self._forget_after_s = forget_after_s
        self._clock = clock
        self._lock = threading.Lock()
        self._posted: deque[Callable[[], None]] = deque()
        self._searches: dict[str, _Search] = {}
        self._queues: list[deque[_Item]] = [deque() for _ in lanes]
        self._batches = [0 for _ in lanes]

    def begin(self, owner: str, query: Query, found: int, stored: int) -> Standing:
        """Goes on with a lookup of which host memory has `found` leading chunks, leased to `owner`, of which
        `stored` are there without a gap. One of the same owner before it is given up."""
        gap = stored if stored < found else None
        search = _Search(
            owner, query, self._chunk_tokens, self._clock(), found, gap, found, sources=[HOST] * found
        )
        with self._lock:
            self._forget_old()
            before = self._searches.pop(owner, None)
            if before is not None:
                before.ended = True
            self._searches[owner] = search
            self._advance(search)
        self._carry_out()
        with self._lock:
            standing = self._standing(search)
            if search.ended and all(tier == HOST for tier in search.sources):
                self._searches.pop(owner, None)
        self._carry_out()
        return standing

    def standing(self, owner: str) -> Standing:
        """How far the owner's lookup is; nothing of it is there if it is not known."""
        with self._lock:
            search = self._searches.get(owner)
            standing = Standing(0, 0) if search is None else self._standing(search)
        self._carry_out()
        return standing

    def end(self, owner: str) -> dict[CacheEngineKey, Lane]:
        """The owner waits no more: what is not being read yet is not read for it. Which of its chunks came
        from below."""
        with self._lock:
            search = self._searches.pop(owner, None)
            if search is not None:
                search.ended = True
        self._carry_out()
        if search is None:
            return {}
        keys = search.query.keys
        return {keys[at]: self._lanes[tier] for at, tier in enumerate(search.sources) if tier != HOST}

    def end_where(self, ended: Callable[[str], bool]) -> None:
        """As `end`, of all owners that `ended` says so of."""
        for owner in [owner for owner in list(self._searches) if ended(owner)]:
            self.end(owner)

    def _post_answer(self, came: Callable[[Future[R]], None], future: Future[R]) -> None:
        """Carries out, under the lock, what follows an answer: now, or by whoever has the lock now."""
        self._posted.append(partial(came, future))
        self._carry_out()

    def _carry_out(self) -> None:
        """Not under the lock."""
        while self._posted and self._lock.acquire(blocking=False):
            try:
                while self._posted:
                    self._posted.popleft()()
            except Exception:
                logger.exception("KV cache: fetching from the tiers below failed")
            finally:
                self._lock.release()

    # Finding

    def _advance(self, search: _Search) -> None:
        """Decides as much as is known."""
        run: list[Found] = []
        while not (search.ended or search.asking):
            at = search.decided + len(run)
            place = self._place(search, at) if at < len(search.query.keys) else None
            if place is not None:
                run.append(place)
            else:
                search.ended = not search.asking
        self._claim(search, run)

    def _place(self, search: _Search, at: int) -> Found | None:
        """The fastest tier that has a chunk; None where none has it, or where one is being asked."""
        if search.query.keys[at] in self._cpu:
            return Found(HOST, 0, search.tokens(at))
        for lane in self._lanes:
            answers = search.answers.setdefault(lane.index, {})
            if at not in answers:
                self._ask(search, lane, at)
            if search.asking:
                return None
            size = answers[at]
            if size is not None:
                return Found(lane.index, size, search.tokens(at))
        return None

    def _ask(self, search: _Search, lane: Lane, at: int) -> None:
        """Asks a tier for the chunks from `at` on."""
        if not lane.readable():
            search.answers[lane.index][at] = None
            return
        count = search.heads.get(lane.index, FIRST_HEADS)
        search.heads[lane.index] = count * MORE_HEADS
        wanted = list(self._unplaced(search, lane, at, count))
        future = lane.head([search.query.keys[index] for index in wanted])
        if future.done():
            self._take_heads(search, lane, wanted, future)
            return
        search.asking = True
        search.wait_s = max(search.wait_s, lane.deadline_s)
        came = partial(self._heads_came, search, lane, wanted)
        future.add_done_callback(partial(self._post_answer, came))

    def _unplaced(self, search: _Search, lane: Lane, at: int, count: int) -> Iterator[int]:
        """Chunks from `at` on that neither host memory nor a faster tier has as far as known."""
        faster = [search.answers.get(other.index, {}) for other in self._lanes[: lane.index]]
        for index in range(at, len(search.query.keys)):
            if count <= 0:
                return
            there = search.query.keys[index] in self._cpu or any(found.get(index) for found in faster)
            if not there or index == at:
                count -= 1
                yield index

    def _heads_came(
        self, search: _Search, lane: Lane, wanted: list[int], future: Future[list[int | None]]
    ) -> None:
        search.asking = False
        self._take_heads(search, lane, wanted, future)
        self._advance(search)

    def _take_heads(
        self, search: _Search, lane: Lane, wanted: list[int], future: Future[list[int | None]]
    ) -> None:
        sizes = _result(future, len(wanted))
        for index, size in zip(wanted, sizes or [None] * len(wanted), strict=True):
            right = size == search.tokens(index) * self._token_bytes
            search.answers[lane.index][index] = size if right else None

    # Claiming

    def _claim(self, search: _Search, run: Sequence[Found]) -> None:
        """Takes what pays of the chunks that follow the decided ones."""
        costs = {lane.index: lane.cost() for lane in self._lanes}
        worth = worth_fetching(run, costs, search.query.seconds_per_token)
        for found in run[worth:]:
            if found.tier != HOST:
                self._lanes[found.tier].count.not_worth_tokens += found.num_tokens
        search.ended = search.ended or worth < len(run)
        for found in run[:worth]:
            if not self._claim_one(search, found):
                search.ended = True
                break
            search.sources.append(found.tier)
            search.decided += 1
        for lane in self._lanes:
            self._pump(lane)

    def _claim_one(self, search: _Search, found: Found) -> bool:
        at, query = search.decided, search.query
        outcome, obj = self._cpu.claim(
            query.keys[at], found.num_tokens, search.owner, query.tenant, search.parent(at), found.tier
        )
        if outcome not in (Outcome.PRESENT, Outcome.IN_FLIGHT, Outcome.RESERVED):
            return False
        if found.tier == HOST:
            if obj is not None:  # it was there a moment ago
                self._cpu.failed(query.keys[at], obj)
            return obj is None
        lane = self._lanes[found.tier]
        search.wait_s = max(search.wait_s, lane.deadline_s)
        if obj is not None:
            lane.queued_bytes += obj.nbytes
            self._queues[found.tier].append(_Item(query.keys[at], obj))
        return True

    # Reading

    def _pump(self, lane: Lane) -> None:
        """Has the tier read what waits, as far as it may have at a time."""
        while self._batches[lane.index] < MOST_BATCHES:
            batch = self._next_batch(lane)
            if not batch:
                return
            self._batches[lane.index] += 1
            came = partial(self._came, lane, batch, self._clock())
            future = lane.get([WantedObject(item.key, item.obj.buffer) for item in batch])
            future.add_done_callback(partial(self._post_answer, came))

    def _next_batch(self, lane: Lane) -> list[_Item]:
        queue, batch, size = self._queues[lane.index], list[_Item](), 0
        while queue and len(batch) < BATCH_OBJECTS:
            item = queue[0]
            if not self._cpu.wanted(item.key, item.obj):
                self._finish(lane, queue.popleft(), came=False)
                continue
            size += item.obj.nbytes
            if batch and size > BATCH_BYTES:
                break
            batch.append(queue.popleft())
        return batch

    def _came(self, lane: Lane, batch: list[_Item], started: float, future: Future[list[bool]]) -> None:
        self._batches[lane.index] -= 1
        came = _result(future, len(batch)) or [False] * len(batch)
        read = [item for item, ok in zip(batch, came, strict=True) if ok]
        lane.observe_read(sum(item.obj.nbytes for item in read), started)
        lane.count.fetched_objects += len(read)
        lane.count.fetch_failures += len(batch) - len(read)
        arrived = [
            item.key for item, ok in zip(batch, came, strict=True) if self._finish(lane, item, came=ok)
        ]
        if arrived:
            self._arrived(arrived, lane)
        self._pump(lane)

    def _finish(self, lane: Lane, item: _Item, *, came: bool) -> bool:
        """Whether a chunk that was to be read is there."""
        lane.queued_bytes -= item.obj.nbytes
        if came:
            return self._cpu.arrived(item.key, item.obj)
        self._cpu.failed(item.key, item.obj)
        return False

    # Telling

    def _standing(self, search: _Search) -> Standing:
        held, coming = self._cpu.standing(search.owner, search.query.keys, search.held, search.decided)
        search.held = held
        if held < search.decided and not coming:
            # It did not come, and what is behind it is of no use.
            search.ended, search.decided = True, held
            del search.sources[held:]
        most = search.decided if search.ended else len(search.query.keys)
        runs = groupby(search.sources[:held])
        sources = tuple(
            (self._cpu.name if tier == HOST else self._lanes[tier].name, len(list(run))) for tier, run in runs
        )
        return Standing(held, most, search.wait_s, held if search.gap is None else search.gap, sources)

    def _forget_old(self) -> None:
        """Searches are few and begin in order: the oldest are the first."""
        before = self._clock() - self._forget_after_s
        while self._searches:
            owner, oldest = next(iter(self._searches.items()))
            if oldest.started > before:
                return
            oldest.ended = True
            del self._searches[owner]


def _result(future: Future[list[R]], count: int) -> list[R] | None:
    """What the tier answered for each of `count` objects; None if it did not."""
    if future.cancelled() or future.exception() is not None:
        return None
    answer = future.result()
    return answer if len(answer) == count else None
