# SPDX-License-Identifier: Apache-2.0
"""What all remote tiers share: threads, deadlines, breakers, checks and statistics around a `RemoteClient`.

A request asks twice: whether objects are there, and for their bytes. The first takes at most a quarter of the
deadline and the second the rest. What has not come by then is a miss, and nothing writes into the targets
afterwards. A place from which nothing came for the last quarter of an operation's time is not asked again
until a probe, for which no request waits, was answered. A batch that is merely too large for its time is not
held against the place.

A remote has its own limits and its own eviction: the tier knows neither its capacity nor what is in it, and
tenants' quotas do not count there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

from kvcache.config.base import Strict
from kvcache.config.tiers import RemoteTierConfig
from kvcache.stats import TierStats
from kvcache.storage.health import BreakerPolicy
from kvcache.storage.object_format import HEADER_BYTES, ObjectFormatError, encode_object, open_object
from kvcache.storage.sealing import Sealer
from kvcache.storage.tier import (
    Cleared,
    ClearScope,
    Health,
    PutOutcome,
    StoredObject,
    Tier,
    TierContext,
    WantedObject,
)
from kvcache.storage.tiers.remote_batch import AlarmClock, Batch, Part, Source, Workers
from kvcache.storage.tiers.remote_clear import clear
from kvcache.storage.tiers.remote_client import (
    CORRUPT,
    DeadlineError,
    Expired,
    Load,
    Read,
    RemoteClient,
    RemoteError,
    Write,
    name_of,
)
from kvcache.storage.tiers.remote_places import Places
from kvcache.tokens.keys import CacheEngineKey

logger = logging.getLogger("vllm.kvcache")

HEAD_SHARE = 0.25
"""Of the deadline, for asking whether objects are there; the rest is for their bytes."""
SILENCE_SHARE = 0.25
"""Of an operation's time: a place from which nothing came for so long is to blame."""
SPOILED = ("ObjectTruncated", "ObjectForeign", "ObjectCorrupt", "ObjectMismatch", "ObjectUnsealed")
"""Nobody can use such an object, and it stands in the way of a good one: it is removed. Those of another
version or of a key that is not at hand may be good for somebody else."""
_DAMAGED = ("ObjectTruncated", "ObjectForeign", "ObjectCorrupt")

A = TypeVar("A")


class RemoteTier(Tier):
    """A remote store as a tier. Opening waits for a first answer of the store, one deadline at most.

    Args:
        name: in statistics.
        client: of the store; the tier closes it.
        context: of the rank.
        deadline_s: the longest that a request waits.
        connections: at a time, for reads and for writes each; questions have up to two more.
        write_queue_bytes: of payload that wait to be written.
        policy: of the breakers.

    Raises:
        ValueError: the file of encryption keys is no good.
    """

    def __init__(
        self,
        name: str,
        client: RemoteClient,
        context: TierContext,
        *,
        deadline_s: float,
        connections: int = 4,
        write_queue_bytes: int = 512 << 20,
        policy: BreakerPolicy | None = None,
    ) -> None:
        self.name = name
        self._client = client
        self._context = context
        self._sealer = Sealer(context.encryption_key_file) if context.encryption_key_file else None
        self._deadline_s = deadline_s
        self._connections = connections
        self._write_queue_bytes = write_queue_bytes
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        self._totals: Counter[str] = Counter()
        self._seconds = {"read": 0.0, "write": 0.0}
        self._waiting_bytes = 0
        self._closed = False
        self._alarms = AlarmClock(f"{name}-alarms")
        self._places = Places(name, client, deadline_s, policy or BreakerPolicy(), self._alarms)
        self._askers = Workers(min(2, connections), f"{name}-ask")
        self._readers = Workers(connections, f"{name}-read")
        self._writers = Workers(connections, f"{name}-write")
        self._attendant = Workers(1, f"{name}-clear")
        self._places.start()

    def head(self, keys: Sequence[CacheEngineKey]) -> Future[list[int | None]]:
        names = [name_of(key) for key in keys]
        batch: Batch[int | None] = Batch([None] * len(keys))
        time_s = self._deadline_s * HEAD_SHARE
        due = time.monotonic() + time_s
        tasks = []
        for place, indexes in self._usable(names).items():
            part = batch.part(place, time_s * SILENCE_SHARE)
            tasks.append(self._task(batch, part, partial(self._ask, batch, part, names, indexes, due)))
        return self._begin(batch, tasks, self._askers, due)

    def get(self, wanted: Sequence[WantedObject]) -> Future[list[bool]]:
        reads = [Read(i, name_of(w.key), w.target.cast("B")) for i, w in enumerate(wanted)]
        batch: Batch[bool] = Batch([False] * len(reads), reads)
        time_s = self._deadline_s * (1 - HEAD_SHARE)
        due = time.monotonic() + time_s
        self._timed(batch, "read")
        tasks = []
        for place, indexes in self._usable([read.name for read in reads]).items():
            source = Source.shared([reads[index] for index in indexes])
            count = min(self._connections, len(indexes))
            load = Load(-(-len(indexes) // count), self._connections // count)
            for _ in range(count):
                part = batch.part(place, time_s * SILENCE_SHARE)
                work = partial(self._read, batch, part, wanted, source, due, load)
                tasks.append(self._task(batch, part, work))
        return self._begin(batch, tasks, self._readers, due)

    def put(self, objects: Sequence[StoredObject]) -> Future[list[PutOutcome]]:
        batch = Batch([PutOutcome.FAILED] * len(objects))
        self._timed(batch, "write")
        names = [name_of(obj.key) for obj in objects]
        tasks = []
        for place, indexes in self._usable(names).items():
            if admitted := [index for index in indexes if self._admit(objects[index], batch, index)]:
                part = batch.part(place, self._deadline_s * SILENCE_SHARE)
                work = partial(self._write_missing, batch, part, objects, names, admitted)
                tasks.append(self._task(batch, part, work))
        return self._begin(batch, tasks, self._writers)

    def remove(self, keys: Sequence[CacheEngineKey]) -> Future[int]:
        return self._later(partial(self._remove, [name_of(key) for key in keys]), 0)

    def clear(self, scope: ClearScope) -> Future[Cleared]:
        failed = Cleared(0, 0, 0, complete=False, detail="an error of our own; see the log")
        return self._later(lambda: clear(self._client, scope, self._context.pinned, self._deadline_s), failed)

    def adapt(self, config: Strict) -> Collection[str]:
        """Takes over deadline and queue of another configuration; the names of these fields."""
        if not isinstance(config, RemoteTierConfig):
            return ()
        deadline_s = config.deadline_ms / 1000
        if deadline_s != self._deadline_s:
            self._client.set_time(deadline_s)
            self._deadline_s = self._places.deadline_s = deadline_s
        self._write_queue_bytes = config.write_queue
        return ("deadline_ms", "write_queue")

    def health(self) -> Health:
        return self._places.health()

    def stats(self) -> TierStats:
        """Its size and what is in it are the store's affair: zeros."""
        health, totals, pace = self.health(), self._totals, self._places.pace
        return TierStats(
            name=self.name,
            state=health.state,
            detail=health.detail,
            capacity_bytes=0,
            used_bytes=0,
            objects=0,
            leases=0,
            evictions=0,
            rejected=totals["rejected"],
            hit_tokens=0,
            read_bytes=totals["read"],
            read_seconds=self._seconds["read"],
            write_bytes=totals["write"],
            write_seconds=self._seconds["write"],
            fetch_failures=totals["fetch_failures"],
            write_failures=totals["write_failures"],
            fetch_latency_seconds=pace.latency_s,
            fetch_bytes_per_second=pace.bytes_per_second * self._connections,
        )

    def close(self) -> None:
        self._closed = True
        self._client.close()
        ended = self._places.close()
        for workers in (self._askers, self._readers, self._writers, self._attendant):
            ended = workers.close(self._deadline_s) and ended
        if ended:
            self._client.release()
        self._alarms.close()

    # what the threads do

    def _ask(
        self, batch: Batch[int | None], part: Part, names: list[str], indexes: list[int], due: float
    ) -> None:
        started = time.monotonic()
        sizes = self._client.sizes(part.place, [names[index] for index in indexes], due)
        self._places.pace.answered(time.monotonic() - started)
        self._places.answered(part.place)
        token, chunk = self._context.shape.token_bytes, self._context.shape.chunk_bytes
        for index, size in zip(indexes, sizes, strict=True):
            payload = (size or 0) - HEADER_BYTES
            if 0 < payload <= chunk and payload % token == 0:
                batch.answer(index, payload)

    def _read(
        self,
        batch: Batch[bool],
        part: Part,
        wanted: Sequence[WantedObject],
        source: Callable[[Callable[[Read], bool]], Source[Read]],
        due: float,
        load: Load,
    ) -> None:
        pace = self._places.pace
        first = True

        def go_on(read: Read) -> bool:
            # What cannot come in time is not begun; the first always is, so that the pace is measured anew.
            nonlocal first
            in_time = first or time.monotonic() + pace.seconds_for(read.num_bytes) < due
            first = False
            return in_time and batch.open and self._places.closed(part.place)

        since = time.monotonic()
        with closing(self._client.read(part.place, source(go_on), due, load)) as reads:
            for read, found in reads:
                now = time.monotonic()
                self._places.came(part.place)
                if not found:
                    self._count("fetch_failures", 1)
                elif self._good(part.place, read, wanted[read.index].key):
                    batch.answer(read.index, True)
                    self._count("read", read.target.nbytes)
                    pace.transferred(read.num_bytes, now - since)
                since = time.monotonic()

    def _good(self, place: str, read: Read, key: CacheEngineKey) -> bool:
        """Whether what came is the object that was asked for; its payload is plain text then."""
        try:
            with read:
                open_object(read.header, read.target, key, self._context.shape, self._sealer)
        except ObjectFormatError as error:
            text = f"{self._client.where}: {read.name}: {error}"
            self._count("fetch_failures", 1)
            self._log(error.reason, f"{text}; it is a miss")
            if error.reason in SPOILED:
                self.remove([key])
            if error.reason in _DAMAGED:
                self._places.failed(place, RemoteError(CORRUPT, text))
            return False
        self._places.answered(place)
        return True

    def _write_missing(
        self,
        batch: Batch[PutOutcome],
        part: Part,
        objects: Sequence[StoredObject],
        names: list[str],
        indexes: list[int],
    ) -> None:
        """Asks which of the objects are there, and hands the others to all writers."""
        due = time.monotonic() + self._deadline_s
        sizes = self._client.sizes(part.place, [names[index] for index in indexes], due)
        missing, spoiled = [], []
        for index, size in zip(indexes, sizes, strict=True):
            if size == HEADER_BYTES + objects[index].payload.nbytes:
                batch.answer(index, PutOutcome.PRESENT)
                continue
            missing.append(index)
            if size is not None:
                spoiled.append(names[index])
        if spoiled:
            self._client.remove(part.place, spoiled, due)
        source = Source.shared(missing)
        others = [
            batch.part(part.place, part.silence_s) for _ in range(min(self._connections, len(missing)) - 1)
        ]
        for other in others:
            self._writers.submit(
                self._task(batch, other, partial(self._write, batch, other, objects, names, source))
            )
        self._write(batch, part, objects, names, source)

    def _write(
        self,
        batch: Batch[PutOutcome],
        part: Part,
        objects: Sequence[StoredObject],
        names: list[str],
        source: Callable[[Callable[[int], bool]], Source[int]],
    ) -> None:
        def encoded() -> Iterator[Write]:
            for index in source(lambda _: self._places.closed(part.place) and not self._closed):
                header, payload = encode_object(objects[index], self._context.shape, self._sealer)
                yield Write(index, names[index], header, memoryview(payload).cast("B"))

        for write, outcome in self._client.write(part.place, encoded(), self._deadline_s):
            self._places.answered(part.place)
            batch.answer(write.index, outcome)
            if outcome is PutOutcome.STORED:
                self._count("write", write.payload.nbytes)
            elif outcome is PutOutcome.DECLINED:
                self._count("rejected", 1)
                self._log("full", f"{self._client.where} has no room for more; {self._client.when_full}")

    def _task(self, batch: Batch[Any], part: Part, work: Callable[[], None]) -> Callable[[], None]:
        def task() -> None:
            part.started = time.monotonic()
            try:
                if batch.open and not self._closed and self._places.closed(part.place):
                    work()
            except Expired:
                pass
            except DeadlineError as error:
                self._places.silent(part, error.detail)
            except RemoteError as error:
                self._places.failed(part.place, error)
            finally:
                batch.end(part)

        return task

    def _remove(self, names: list[str]) -> int:
        removed = 0
        for place, indexes in self._usable(names).items():
            due = time.monotonic() + self._deadline_s
            try:
                removed += self._client.remove(place, [names[index] for index in indexes], due)
            except RemoteError as error:
                self._places.failed(place, error)
        return removed

    def _later(self, work: Callable[[], A], otherwise: A) -> Future[A]:
        """What the attendant's work gives, when it comes to it."""
        future: Future[A] = Future()

        def task() -> None:
            result = otherwise
            try:
                result = work()
            finally:
                future.set_result(result)

        self._attendant.submit(task)
        return future

    # batches

    def _usable(self, names: Sequence[str]) -> dict[str, list[int]]:
        return {} if self._closed else self._places.usable(names)

    def _begin(
        self, batch: Batch[A], tasks: list[Callable[[], None]], workers: Workers, due: float | None = None
    ) -> Future[list[A]]:
        if not tasks:
            batch.close()
        for task in tasks:
            workers.submit(task)
        if tasks and due is not None:
            self._alarms.at(due, partial(self._expire, batch))
        return batch.future

    def _expire(self, batch: Batch[Any]) -> None:
        late = [part for part in batch.parts if not part.ended]
        if batch.close():
            for part in late:
                self._places.silent(part, f"{self._client.where} did not answer in time; look at its load")

    def _admit(self, obj: StoredObject, batch: Batch[PutOutcome], index: int) -> bool:
        """Whether the queue has room for the object; it is left when the batch is done."""
        num_bytes = obj.payload.nbytes
        with self._lock:
            admitted = self._waiting_bytes + num_bytes <= self._write_queue_bytes
            if admitted:
                self._waiting_bytes += num_bytes
        if admitted:
            batch.future.add_done_callback(lambda _: self._leave(num_bytes))
        else:
            self._count("rejected", 1)
            batch.answer(index, PutOutcome.DECLINED)
        return admitted

    def _leave(self, num_bytes: int) -> None:
        with self._lock:
            self._waiting_bytes -= num_bytes

    def _timed(self, batch: Batch[Any], direction: str) -> None:
        started = time.monotonic()

        def ended(future: Future[list[Any]]) -> None:
            with self._lock:
                self._seconds[direction] += time.monotonic() - started
                self._totals["write_failures"] += future.result().count(PutOutcome.FAILED)

        batch.future.add_done_callback(ended)

    def _count(self, what: str, number: int) -> None:
        with self._lock:
            self._totals[what] += number

    def _log(self, what: str, text: str) -> None:
        """Once for each kind of trouble."""
        if what not in self._logged:
            self._logged.add(what)
            logger.warning("KV cache: %s", text)
