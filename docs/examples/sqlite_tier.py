# SPDX-License-Identifier: Apache-2.0
"""A tier of a third party: chunks in one SQLite file. An example of the interface (docs/tiers.md), and not a
fast one.

Its distribution names it in its metadata:

    [project.entry-points."kvcache.tiers"]
    sqlite = "sqlite_tier:open_sqlite"

and the cache's configuration says:

    tiers: {plugins: [{name: sqlite, options: {path: /var/cache/kv.db}}]}
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvcache.stats import TierStats
from kvcache.storage.object_format import HEADER_BYTES, ObjectFormatError, encode_object, open_object
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
from kvcache.tokens.keys import CacheEngineKey

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (key BLOB PRIMARY KEY, tenant BLOB NOT NULL, size INTEGER NOT NULL,
                                    object BLOB NOT NULL) WITHOUT ROWID
"""


class SqliteTier(Tier):
    """All work is done by one thread: SQLite writes one after the other anyway.

    Args:
        path: of the file; made if it is not there.
        context: what a tier may know of its rank.

    Raises:
        sqlite3.Error: the file cannot be opened. The cache then says so and does without the tier.
    """

    name = "sqlite"

    def __init__(self, path: str, context: TierContext) -> None:
        self._path = path
        self._context = context
        self._health = Health("Ready")
        self._lock = threading.Lock()
        self._count: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sqlite tier")
        try:
            self._thread.submit(self._open).result()
        except BaseException:
            self._thread.shutdown()
            raise

    # Each of these returns at once; the thread completes the future, and holds no lock when it does.

    def head(self, keys: Sequence[CacheEngineKey]) -> Future[list[int | None]]:
        def sizes() -> list[int | None]:
            return [self._size(key) for key in keys]

        nothing: list[int | None] = [None] * len(keys)
        return self._thread.submit(self._guarded, sizes, nothing)

    def get(self, wanted: Sequence[WantedObject]) -> Future[list[bool]]:
        def read() -> list[bool]:
            return [self._read(one) for one in wanted]

        return self._thread.submit(self._guarded, read, [False] * len(wanted))

    def put(self, objects: Sequence[StoredObject]) -> Future[list[PutOutcome]]:
        def write() -> list[PutOutcome]:
            with self._database:  # one transaction: after a crash all of it is there or none
                return [self._write(one) for one in objects]

        return self._thread.submit(self._guarded, write, [PutOutcome.FAILED] * len(objects))

    def remove(self, keys: Sequence[CacheEngineKey]) -> Future[int]:
        return self._thread.submit(self._guarded, lambda: self._delete(keys)[0], 0)

    def clear(self, scope: ClearScope) -> Future[Cleared]:
        failed = Cleared(0, 0, 0, complete=False, detail=f"{self._path} cannot be changed")
        return self._thread.submit(self._guarded, lambda: self._clear(scope), failed)

    # These are asked often, and do no I/O.

    def health(self) -> Health:
        return self._health

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                name=self.name,
                state=self._health.state,
                capacity_bytes=0,
                used_bytes=self._count["used_bytes"],
                objects=self._count["objects"],
                leases=0,
                evictions=0,
                rejected=0,
                hit_tokens=0,
                read_bytes=self._count["read_bytes"],
                read_seconds=0.0,
                write_bytes=self._count["write_bytes"],
                write_seconds=0.0,
            )

    def close(self) -> None:
        self._thread.submit(lambda: self._database.close())
        self._thread.shutdown()

    # On the thread

    def _open(self) -> None:
        self._database = sqlite3.connect(self._path, timeout=1.0)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute(_SCHEMA)
        sums = self._database.execute("SELECT count(*), coalesce(sum(size), 0) FROM objects").fetchone()
        self._add(objects=sums[0], used_bytes=sums[1])

    def _guarded(self, work: Callable[[], T], failed: T) -> T:
        """A tier answers; it does not raise for what its place does."""
        try:
            result = work()
        except sqlite3.Error as error:
            self._health = Health("DatabaseFailed", f"{self._path}: {error}; see whether its disk is full")
            return failed
        self._health = Health("Ready")
        return result

    def _size(self, key: CacheEngineKey) -> int | None:
        row = self._database.execute("SELECT size FROM objects WHERE key = ?", [key.to_bytes()]).fetchone()
        return None if row is None else int(row[0])

    def _read(self, wanted: WantedObject) -> bool:
        sql = "SELECT object FROM objects WHERE key = ?"
        row = self._database.execute(sql, [wanted.key.to_bytes()]).fetchone()
        if row is None or len(row[0]) != HEADER_BYTES + len(wanted.target):
            return False
        wanted.target[:] = row[0][HEADER_BYTES:]
        try:
            open_object(row[0][:HEADER_BYTES], wanted.target, wanted.key, self._context.shape)
        except ObjectFormatError:
            self._delete([wanted.key])
            return False
        self._add(read_bytes=len(wanted.target))
        return True

    def _write(self, stored: StoredObject) -> PutOutcome:
        if self._size(stored.key) is not None:
            return PutOutcome.PRESENT
        encoded = encode_object(stored, self._context.shape)
        size, data = len(stored.payload), encoded.header + bytes(encoded.payload)
        row = (stored.key.to_bytes(), stored.tenant, size, data)
        self._database.execute("INSERT INTO objects VALUES (?, ?, ?, ?)", row)
        self._add(objects=1, used_bytes=size, write_bytes=size)
        return PutOutcome.STORED

    def _clear(self, scope: ClearScope) -> Cleared:
        covered, kept = [], 0
        for raw, tenant in self._database.execute("SELECT key, tenant FROM objects"):
            key = CacheEngineKey.from_bytes(raw)
            if scope.covers(key, tenant):
                if self._context.pinned(key) and not scope.pinned_too:
                    kept += 1
                else:
                    covered.append(key)
        objects, num_bytes = self._delete(covered)
        return Cleared(objects, num_bytes, kept)

    def _delete(self, keys: Sequence[CacheEngineKey]) -> tuple[int, int]:
        sizes = [size for key in keys if (size := self._size(key)) is not None]
        with self._database:
            rows = [[key.to_bytes()] for key in keys]
            self._database.executemany("DELETE FROM objects WHERE key = ?", rows)
        self._add(objects=-len(sizes), used_bytes=-sum(sizes))
        return len(sizes), sum(sizes)

    def _add(self, **counts: int) -> None:
        with self._lock:
            self._count.update(counts)


def open_sqlite(options: dict[str, object], context: TierContext) -> Tier:
    """The factory that the entry point names.

    Raises:
        ValueError: an option is missing or unknown.
    """
    if set(options) != {"path"} or not isinstance(options["path"], str):
        raise ValueError(f"options: {sorted(options)} was read; give path, the file to keep chunks in")
    return SqliteTier(options["path"], context)
