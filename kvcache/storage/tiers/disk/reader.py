# SPDX-License-Identifier: Apache-2.0
"""Reading: what is served is what the checksums vouch for; what cannot be served goes."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence

from kvcache.storage.object_format import ObjectFormatError
from kvcache.storage.tier import WantedObject
from kvcache.storage.tiers.disk.catalog import Entry
from kvcache.storage.tiers.disk.store import TOUCH_AFTER_S, Store
from kvcache.storage.tiers.disk.transfers import Source, Transfers

_UNREADABLE = (errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN)
"""The device lost what it had there, or the file system did."""


class Reader:
    """Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, wanted: Sequence[WantedObject], transfers: Transfers) -> list[bool]:
        """Reads objects; True where the target holds the whole object."""
        answers = [False] * len(wanted)
        found: dict[int, tuple[int, Entry]] = {}
        sources = self._open(wanted, found)
        for source, problem in transfers.read(sources):
            position, entry = found.pop(source.fd)
            if problem is None:
                answers[position] = True
                self._used(entry, source.fd)
            else:
                self._failed(entry, problem)
        return answers

    def _open(self, wanted: Sequence[WantedObject], found: dict[int, tuple[int, Entry]]) -> Iterator[Source]:
        """Opens what is there; `found` tells by descriptor what it is."""
        store = self._store
        for position, want in enumerate(wanted):
            with store.lock:
                entry = store.catalog.get(want.key.to_bytes())
            if entry is None or entry.name.payload_bytes != want.target.nbytes:
                continue
            directory = store.directories[entry.directory]
            folder = directory.readable()
            if folder is None:
                continue
            try:
                fd = folder.open_object(entry.name, direct=directory.direct)
            except FileNotFoundError:
                store.lost(entry, folder)
            except OSError as error:
                directory.failed(error)
            except ObjectFormatError as error:
                store.discard(entry, error.reason, str(error))
            else:
                found[fd] = (position, entry)
                yield Source(want, fd)

    def _used(self, entry: Entry, fd: int) -> None:
        store, now = self._store, time.time()
        store.directories[entry.directory].worked(writing=False)
        with store.lock:
            store.count.read_bytes += entry.name.payload_bytes
            store.count.read_tokens += entry.name.num_tokens
            stale = now - entry.touched > TOUCH_AFTER_S
            entry.touched = max(entry.touched, now)
        if stale:
            with contextlib.suppress(OSError):  # a file system that is read-only
                os.utime(fd)

    def _failed(self, entry: Entry, problem: Exception) -> None:
        store = self._store
        if isinstance(problem, ObjectFormatError):
            store.discard(entry, problem.reason, str(problem))
        elif isinstance(problem, OSError):
            store.directories[entry.directory].failed(problem)
            if problem.errno in _UNREADABLE:
                store.discard(entry, "DiskReadFailed", problem.strerror or str(problem))
