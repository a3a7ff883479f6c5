# SPDX-License-Identifier: Apache-2.0
"""What reading and writing share: the directories, the index of what lies in them, and how the two stay
one."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcache.storage.tier import Cleared, ClearScope, TierContext
from kvcache.storage.tiers.disk.catalog import Catalog, Entry
from kvcache.storage.tiers.disk.directory import FULL, Directory
from kvcache.storage.tiers.disk.folder import Folder, Scan, Section
from kvcache.storage.tiers.disk.names import KEY_BYTES, ObjectName, file_bytes, parse_name
from kvcache.storage.tiers.disk.watch import Changes
from kvcache.tokens.keys import CacheEngineKey

logger = logging.getLogger("vllm.kvcache")

TOUCH_AFTER_S = 60.0
"""The time of a file's last use, which other processes and later ones see, is this much behind at most."""
_REMOVALS_A_SECTION = 256
_RANKED_AT_ONCE = 200
_BREATH_S = 0.0005
"""In which those who wait for the lock get it."""
_CLEARS_KEPT = 64
_LIST_SHARE = 20
"""A folder is listed again, where the kernel tells of no changes, in a twentieth of the time at most."""


@dataclass
class Counters:
    """What the tier did."""

    evictions: int = 0
    rejected: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    read_tokens: int = 0
    write_bytes: int = 0
    write_seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    """Reason in CamelCase to count."""


class Store:
    """Thread-safe. `lock` guards catalog and counters; it is never held during I/O, and taken within a
    section, never around one.

    Args:
        directories: one a device.
        catalog: empty.
        context: of the rank.
        maintain: runs a job in the background, one after the other.
    """

    def __init__(
        self,
        directories: Sequence[Directory],
        catalog: Catalog,
        context: TierContext,
        maintain: Callable[[Callable[[], object]], object],
    ) -> None:
        self.directories = directories
        self.catalog = catalog
        self.context = context
        self.count = Counters()
        self.reading = 0
        """Objects that are being read."""
        self.lock = threading.RLock()
        self._maintain = maintain
        self._ranking = threading.Lock()
        self._listing: set[int] = set()
        """Directories that a job is to list, to open or to look at."""
        self._seen: dict[int, tuple[int, float]] = {}
        """Of directories that are not watched: when they had changed, and when to look again."""
        self._clears: list[ClearScope] = []
        self._clears_before = 0
        self._logged: set[str] = set()

    # Directories

    def open(self, index: int, *, make: bool = False) -> None:
        """Opens a directory and takes in what lies there. Trouble is the directory's to tell."""
        directory = self.directories[index]
        try:
            folder, scan = directory.open(make=make)
        except OSError:
            return
        with self.lock:
            self.catalog.drop_directory(index)
            directory.attach(folder)
        twins = self._take_in(index, folder, scan)
        self._maintain(self.rank)
        if twins:
            self._maintain(lambda: self._remove(index, twins))

    def sync(self) -> None:
        """Takes in what other processes have changed. No I/O: directories are opened and listed by jobs."""
        self.look()
        for index, directory in enumerate(self.directories):
            folder = directory.folder
            if folder is None:
                continue
            if folder.watch is None:
                if self._has_changed(index, folder):
                    self._start(index, self.relist)
            else:
                with self.lock:
                    changes = folder.changes()
                    if changes is not None:
                        self._apply(index, folder, changes)

    def look(self) -> None:
        """Has jobs look at the directories that failed, each one when it is time."""
        for index, directory in enumerate(self.directories):
            if directory.is_due():
                self._start(index, self._probe)

    def relist(self, index: int) -> None:
        """Puts index and sums right by what lies in a directory."""
        directory = self.directories[index]
        folder = directory.folder
        if folder is None:
            return
        started = time.monotonic()
        try:
            with folder.section() as section:
                self.take_in(index, section)
        except OSError as error:
            directory.failed(error, writing=True)
        now = time.monotonic()
        with self.lock:
            self._seen[index] = (_changed_ns(folder), now + max(1.0, _LIST_SHARE * (now - started)))

    def take_in(self, index: int, section: Section) -> Scan:
        """As `relist`, within a section. Raises OSError."""
        scan = section.recount()
        for twin in self._take_in(index, section.folder, scan):
            section.remove(twin)
        return scan

    def vanished(self, index: int, folder: Folder) -> None:
        """The path of a directory does not lead to this folder any more."""
        directory = self.directories[index]
        with self.lock:
            if directory.folder is not folder:
                return
            directory.attach(None)
            self.catalog.drop_directory(index)
        directory.failed(FileNotFoundError(errno.ENOENT, "it is gone, or another is in its place"))

    def rank(self) -> None:
        """Gives what was found its place in the order of leaving, by the time of last use. Lets others in
        between."""
        with self._ranking:
            with self.lock:
                found = self.catalog.found()
            used: list[tuple[float, bytes]] = []
            for index, raw in found:
                folder = self.directories[index].folder
                when = None
                with contextlib.suppress(OSError):
                    when = folder.modified(ObjectName(raw)) if folder is not None else None
                used.append((when or 0.0, raw[:KEY_BYTES]))
            used.sort()
            for start in range(0, len(used), _RANKED_AT_ONCE):
                with self.lock:
                    some = used[start : start + _RANKED_AT_ONCE]
                    self.catalog.rank({key: when for when, key in some})
                time.sleep(_BREATH_S)

    # Objects

    def lost(self, entry: Entry, folder: Folder) -> None:
        """An object's file is not there: another process removed it, or the folder is gone."""
        self._forget(entry)
        if not folder.is_there():
            self.vanished(entry.directory, folder)

    def discard(self, entry: Entry, reason: str, text: str) -> None:
        """An object cannot be served: nobody sees it any more, and its file is removed."""
        self._forget(entry)
        self.note(reason, f"{entry.name.file}: {text}; it was removed")
        self._maintain(lambda: self._remove(entry.directory, [entry.name]))

    def remove(self, keys: Sequence[CacheEngineKey]) -> int:
        """Removes objects; how many were there."""
        self.sync()
        with self.lock:
            entries = [entry for key in keys if (entry := self.catalog.get(key.to_bytes())) is not None]
        return sum(
            len(self._remove(index, [entry.name for entry in entries if entry.directory == index]))
            for index in range(len(self.directories))
        )

    def is_pinned(self, name: ObjectName) -> bool:
        """A pin holds for a prefix in all ranks: of other ranks' objects, this rank's twin is asked about."""
        key = name.key
        if key.namespace == self.context.namespace:
            key = key._replace(rank=self.context.rank)
        return self.context.pinned(key)

    def used(self, keys: Sequence[CacheEngineKey]) -> None:
        """A request has read the objects, in the order of their chain."""
        with self.lock:
            for key in reversed(keys):
                self.catalog.used(key.to_bytes())

    def count_read(self, objects: int, seconds: float) -> None:
        """So many reads more are under way, and a call took so long."""
        with self.lock:
            self.reading += objects
            self.count.read_seconds += seconds

    def close(self) -> None:
        for directory in self.directories:
            directory.attach(None)

    # Clearing

    def clear_begins(self, scope: ClearScope) -> None:
        """What was to be written before now and is in the scope will not be, see `cleared_since`."""
        with self.lock:
            self._clears.append(scope)
            if len(self._clears) > _CLEARS_KEPT:
                del self._clears[0]
                self._clears_before += 1

    @property
    def clears(self) -> int:
        """How many have begun."""
        return self._clears_before + len(self._clears)

    def cleared_since(self, clears: int, name: ObjectName) -> bool:
        """Whether one that began after so many others covers the object; to be safe, after too many."""
        with self.lock:
            if clears < self._clears_before:
                return True
            later = self._clears[clears - self._clears_before :]
        return any(scope.covers(name.key, name.tenant) for scope in later)

    def clear(self, scope: ClearScope) -> Cleared:
        """Removes the objects in a scope, whoever wrote or writes them."""
        objects = num_bytes = kept = 0
        troubles: list[str] = []
        for index, directory in enumerate(self.directories):
            if directory.folder is None and directory.is_due():
                self.open(index)
            folder = directory.folder
            try:
                if folder is None or not folder.is_there():
                    raise FileNotFoundError(errno.ENOENT, "it is not there")
                with folder.section() as section:
                    scan = self.take_in(index, section)
                    for part in scan.parts:
                        if scope.covers(part.key, part.tenant):
                            section.remove_part(part)
                names = [ObjectName(raw) for raw in scan.objects]
                names = [name for name in names if scope.covers(name.key, name.tenant)]
                leaving = [name for name in names if scope.pinned_too or not self.is_pinned(name)]
                kept += len(names) - len(leaving)
                removed = self._remove(index, leaving)
                objects += len(removed)
                num_bytes += sum(name.payload_bytes for name in removed)
                if len(removed) < len(leaving) and not directory.health().ready:
                    troubles.append(directory.health().detail)
            except OSError as error:
                directory.failed(error, writing=True)
                troubles.append(directory.health().detail)
        return Cleared(objects, num_bytes, kept, not troubles, "; ".join(troubles))

    def note(self, reason: str, text: str) -> None:
        """Counts a failure, and logs the first of its kind."""
        with self.lock:
            self.count.failures[reason] += 1
            if reason in self._logged:
                return
            self._logged.add(reason)
        logger.warning("KV cache, disk tier: %s (%s)", text, reason)

    # Inside

    def _probe(self, index: int) -> None:
        """Looks whether a directory that failed works again: who is told that it failed does not ask."""
        directory = self.directories[index]
        folder = directory.folder
        if folder is None:
            self.open(index)
        elif not folder.is_there():
            self.vanished(index, folder)
        else:
            needed = file_bytes(self.context.shape.chunk_bytes)
            try:
                folder.probe(needed)
            except OSError as error:
                # Where it is full and much of that is ours, who writes makes room.
                if error.errno not in FULL or self.catalog.bytes_in(index) < needed:
                    directory.failed(error, writing=True)
                    return
            directory.worked(writing=True)

    def _start(self, index: int, job: Callable[[int], None]) -> None:
        with self.lock:
            if index in self._listing:
                return
            self._listing.add(index)

        def run() -> None:
            try:
                job(index)
            finally:
                with self.lock:
                    self._listing.discard(index)

        self._maintain(run)

    def _apply(self, index: int, folder: Folder, changes: Changes) -> None:
        if changes.gone:
            self.vanished(index, folder)
            return
        now = time.time()
        for file, added in changes.changes:
            raw = parse_name(file)
            if raw is None:
                continue
            if added:
                self.catalog.add(ObjectName(raw), index, now)
            elif (entry := self.catalog.get(raw[:KEY_BYTES])) is not None and entry.directory == index:
                self.catalog.pop(raw[:KEY_BYTES])
        if changes.lost:
            self._start(index, self.relist)

    def _take_in(self, index: int, folder: Folder, scan: Scan) -> list[ObjectName]:
        """Makes the index say what a scan says; objects that lie in another directory too."""
        with self.lock:
            if self.directories[index].folder is not folder:
                return []
            return self.catalog.take_in(index, scan.objects)

    def _has_changed(self, index: int, folder: Folder) -> bool:
        changed, look_at = self._seen.get(index, (0, 0.0))
        return time.monotonic() >= look_at and _changed_ns(folder) != changed

    def _remove(self, index: int, names: Sequence[ObjectName]) -> list[ObjectName]:
        """Removes files of a directory, some in a section; those that were there."""
        removed: list[ObjectName] = []
        folder = self.directories[index].folder
        if folder is None:
            return removed
        try:
            for start in range(0, len(names), _REMOVALS_A_SECTION):
                with folder.section() as section:
                    for name in names[start : start + _REMOVALS_A_SECTION]:
                        if section.remove(name):
                            removed.append(name)
                        with self.lock:
                            entry = self.catalog.get(name.key_bytes)
                            if entry is not None and entry.directory == index:
                                self.catalog.pop(name.key_bytes)
        except OSError as error:
            self.directories[index].failed(error, writing=True)
        return removed

    def _forget(self, entry: Entry) -> None:
        with self.lock:
            if self.catalog.get(entry.name.key_bytes) is entry:
                self.catalog.pop(entry.name.key_bytes)


def _changed_ns(folder: Folder) -> int:
    try:
        return os.fstat(folder.fd).st_mtime_ns
    except OSError:
        return 0
