# SPDX-License-Identifier: Apache-2.0
"""The tier in files. `open_disk` makes it from its configuration."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from kvcache.config.base import Strict
from kvcache.config.tiers import DiskTierConfig
from kvcache.stats import TierStats
from kvcache.storage.policies import ADMISSIONS, POLICIES, AdmissionPolicy, EvictionPolicy
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
from kvcache.storage.tiers.disk.catalog import Catalog
from kvcache.storage.tiers.disk.directory import Directory
from kvcache.storage.tiers.disk.engine import (
    EngineName,
    FileEngine,
    ThreadEngine,
    UringEngine,
    uring_unavailable,
)
from kvcache.storage.tiers.disk.gather import gather
from kvcache.storage.tiers.disk.names import file_bytes
from kvcache.storage.tiers.disk.reader import Reader
from kvcache.storage.tiers.disk.room import Room
from kvcache.storage.tiers.disk.store import Store
from kvcache.storage.tiers.disk.transfers import DEPTH, Transfers
from kvcache.storage.tiers.disk.writer import Writer
from kvcache.tokens.keys import CacheEngineKey

logger = logging.getLogger("vllm.kvcache")

READERS = 4
WRITERS = 2
WINDOW_OBJECTS = 16
"""Written and flushed together: folders are flushed once for them."""
WINDOW_BYTES = 256 << 20
_POOL_THREADS = 16
"""Without io_uring: transfers at a time of all threads together."""


class DiskTier(Tier):
    """See `Tier`. Made by `open_disk`.

    Args:
        config: as validated.
        context: of the rank.
        engine: how files are read and written.
        sealer: for objects at rest.
    """

    name = "disk"

    def __init__(
        self, config: DiskTierConfig, context: TierContext, engine: EngineName, sealer: Sealer | None
    ) -> None:
        self.engine: EngineName = engine
        self._context = context
        self._sealer = sealer
        self._closed = False
        self._readers = ThreadPoolExecutor(READERS, "kvcache-disk-read")
        self._writers = ThreadPoolExecutor(WRITERS, "kvcache-disk-write")
        self._keeper = ThreadPoolExecutor(1, "kvcache-disk-keep")
        self._transfer_pool = ThreadPoolExecutor(_POOL_THREADS, "kvcache-disk-io")
        self._local = threading.local()
        self._all_transfers: list[Transfers] = []
        self._config = config
        own = CacheEngineKey(bytes(16), context.namespace, context.rank)
        catalog = Catalog(*_policies(config, context), own, self._note)
        directories = [Directory(path, config.direct_io) for path in config.directories]
        self._store = Store(directories, catalog, context, self._keep)
        self._reader = Reader(self._store)
        self._room = Room(self._store, config.capacity, heeds_use=_heeds_use(config))
        self._writer = Writer(self._store, self._room)
        for index in range(len(directories)):
            self._store.open(index, make=True)
        self._keep(self._room.trim)

    @property
    def direct(self) -> bool:
        """Whether files are read and written past the page cache, in all directories that are there."""
        return all(directory.direct for directory in self._store.directories if directory.folder is not None)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of files in all directories together."""
        return self._room.capacity

    def adapt(self, config: Strict) -> Collection[str]:
        """Takes over capacity and policies of another configuration; the names of these fields. A capacity
        that has no room for an object is not taken over."""
        if not isinstance(config, DiskTierConfig):
            return ()
        done = []
        if config.capacity >= file_bytes(self._context.shape.chunk_bytes):
            self._room.capacity = config.capacity
            done.append("capacity")
        if (config.eviction, config.admission) != (self._config.eviction, self._config.admission):
            with self._store.lock:
                self._store.catalog.set_policies(*_policies(config, self._context))
                self._room.heeds_use = _heeds_use(config)
        self._config = config
        self._keep(self._room.trim)
        return (*done, "eviction", "admission")

    def check_directories(self, *, insist_on_direct: bool) -> None:
        """Raises ValueError for two directories that are one, or without direct I/O although it must be."""
        seen: dict[tuple[int, int], str] = {}
        for directory in self._store.directories:
            folder = directory.folder
            if folder is None:
                continue
            twin = seen.setdefault(folder.identity, directory.path)
            if twin != directory.path:
                raise ValueError(f"disk.directories: {twin} and {directory.path} are the same; name it once")
            if insist_on_direct and not directory.direct:
                raise ValueError(
                    f"disk.direct_io is Enabled, and the file system of {directory.path} has none; take Auto"
                )

    @property
    def failures(self) -> dict[str, int]:
        """Reason in CamelCase to how often."""
        with self._store.lock:
            return dict(self._store.count.failures)

    def head(self, keys: Sequence[CacheEngineKey]) -> Future[list[int | None]]:
        answer: Future[list[int | None]] = Future()
        self._store.sync()
        readable = [directory.readable() is not None for directory in self._store.directories]
        with self._store.lock:
            found = [self._store.catalog.get(key.to_bytes()) for key in keys]
        answer.set_result(
            [
                entry.name.payload_bytes if entry is not None and readable[entry.directory] else None
                for entry in found
            ]
        )
        return answer

    def get(self, wanted: Sequence[WantedObject]) -> Future[list[bool]]:
        self._store.sync()
        started = time.perf_counter()
        # Each thread takes every n-th object, so that the first ones of a prefix come first.
        shares = [range(start, len(wanted), READERS) for start in range(min(READERS, len(wanted)))]

        def read(share: range) -> list[bool]:
            return self._reader.read([wanted[position] for position in share], self._transfers())

        def finish(parts: list[list[bool] | None]) -> list[bool]:
            answers = [False] * len(wanted)
            for share, part in zip(shares, parts, strict=True):
                for position, answer in zip(share, part or (), strict=False):
                    answers[position] = answer
            good = [want.key for want, answer in zip(wanted, answers, strict=True) if answer]
            self._store.used(good)
            self._store.count_read(-len(wanted), time.perf_counter() - started)
            return answers

        self._store.count_read(len(wanted), 0.0)
        return gather(self._readers, [partial(read, share) for share in shares], finish)

    def put(self, objects: Sequence[StoredObject]) -> Future[list[PutOutcome]]:
        clears = self._store.clears
        windows = list(_windows(objects, min(WINDOW_BYTES, self.capacity_bytes // 8)))

        def finish(parts: list[list[PutOutcome] | None]) -> list[PutOutcome]:
            outcomes: list[PutOutcome] = []
            for window, part in zip(windows, parts, strict=True):
                outcomes += part if part is not None else [PutOutcome.FAILED] * len(window)
            return outcomes

        jobs = [
            lambda window=window: self._writer.write(window, clears, self._transfers()) for window in windows
        ]
        return gather(self._writers, jobs, finish)

    def remove(self, keys: Sequence[CacheEngineKey]) -> Future[int]:
        return gather(self._keeper, [lambda: self._store.remove(keys)], lambda parts: parts[0] or 0)

    def clear(self, scope: ClearScope) -> Future[Cleared]:
        self._store.clear_begins(scope)
        unable = Cleared(0, 0, 0, complete=False, detail="the disk tier is closed or failed")
        return gather(self._keeper, [lambda: self._store.clear(scope)], lambda parts: parts[0] or unable)

    def health(self) -> Health:
        if self._closed:
            return Health("Closed", "the engine has stopped")
        self._store.look()
        found = [directory.health() for directory in self._store.directories]
        trouble = next((health for health in found if not health.ready), None)
        if trouble is not None:
            readable = any(health.ready or health.readable for health in found)
            return trouble._replace(readable=readable, writable=any(health.ready for health in found))
        return Health("Ready", self._sealer.problem if self._sealer is not None else "")

    def stats(self) -> TierStats:
        store, health = self._store, self.health()
        store.sync()
        with store.lock:
            count = store.count
            return TierStats(
                name=self.name,
                state=health.state,
                detail=health.detail,
                capacity_bytes=self.capacity_bytes,
                used_bytes=store.catalog.num_bytes + self._room.bytes_under_way,
                objects=len(store.catalog),
                leases=store.reading,
                evictions=count.evictions,
                rejected=count.rejected,
                hit_tokens=count.read_tokens,
                read_bytes=count.read_bytes,
                read_seconds=count.read_seconds,
                write_bytes=count.write_bytes,
                write_seconds=count.write_seconds,
            )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for executor in (self._readers, self._writers, self._keeper):
            executor.shutdown(wait=True, cancel_futures=True)
        for transfers in self._all_transfers:
            transfers.close()
        self._transfer_pool.shutdown()
        self._store.close()

    def _note(self, key: bytes, stored: bool) -> None:
        if self._context.changes is not None:
            self._context.changes.add(self.name, CacheEngineKey.from_bytes(key), stored)

    def _keep(self, job: Callable[[], object]) -> None:
        gather(self._keeper, [job], lambda parts: None)

    def _transfers(self) -> Transfers:
        """Those of this thread."""
        transfers: Transfers | None = getattr(self._local, "transfers", None)
        if transfers is None:
            transfers = Transfers(self._make_engine(), self._context.shape, self._sealer)
            self._local.transfers = transfers
            self._all_transfers.append(transfers)
        return transfers

    def _make_engine(self) -> FileEngine:
        if self.engine == "Uring":
            try:
                return UringEngine(DEPTH)
            except OSError as error:
                self._store.note("UringFailed", f"threads do the work of a ring ({error.strerror})")
        return ThreadEngine(self._transfer_pool)


def open_disk(config: DiskTierConfig, context: TierContext) -> DiskTier:
    """The tier of a rank. A directory that is not usable now is tried again later, and `health` says why.

    Raises:
        ValueError: what was asked for cannot be: no room for one object, two directories that are one, no
            io_uring or no direct I/O although the configuration insists, or no usable file of keys.
    """
    needed = file_bytes(context.shape.chunk_bytes)
    if config.capacity < needed:
        raise ValueError(
            f"disk.capacity is {config.capacity} bytes, and a chunk of {context.shape.chunk_tokens} tokens "
            f"takes {needed}; raise it"
        )
    unavailable = uring_unavailable() if config.engine != "Threads" else ""
    if config.engine == "Uring" and unavailable:
        raise ValueError(f"disk.engine is Uring, and there is no io_uring ({unavailable}); take Auto")
    sealer = Sealer(context.encryption_key_file) if context.encryption_key_file is not None else None
    engine: EngineName = "Threads" if config.engine == "Threads" or unavailable else "Uring"
    tier = DiskTier(config, context, engine, sealer)
    try:
        tier.check_directories(insist_on_direct=config.direct_io == "Enabled")
    except ValueError:
        tier.close()
        raise
    logger.info(
        "KV cache, disk tier: %s, %s I/O by %s, %s",
        ", ".join(config.directories),
        "direct" if tier.direct else "buffered",
        "io_uring" if engine == "Uring" else "threads",
        f"no io_uring: {unavailable}" if unavailable else "as configured",
    )
    return tier


def _policies(
    config: DiskTierConfig, context: TierContext
) -> tuple[EvictionPolicy[bytes], AdmissionPolicy[bytes] | None]:
    about = max(1, config.capacity // file_bytes(context.shape.chunk_bytes))
    eviction: EvictionPolicy[bytes] = POLICIES[config.eviction](about)
    if config.admission == "Always":
        return eviction, None
    return eviction, ADMISSIONS[config.admission](about)


def _heeds_use(config: DiskTierConfig) -> bool:
    """Whether use makes an object stay."""
    return config.eviction not in ("FIFO", "MRU")


def _windows(objects: Sequence[StoredObject], most_bytes: int) -> Iterator[Sequence[StoredObject]]:
    """Runs of objects that are written together."""
    start = num_bytes = 0
    for position, obj in enumerate(objects):
        num_bytes += obj.payload.nbytes
        if position > start and (position - start >= WINDOW_OBJECTS or num_bytes > most_bytes):
            yield objects[start:position]
            start, num_bytes = position, obj.payload.nbytes
    if start < len(objects):
        yield objects[start:]
