# SPDX-License-Identifier: Apache-2.0
"""Room for objects: who is let in, and who leaves for it."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from kvcache.storage.tiers.disk.catalog import Entry
from kvcache.storage.tiers.disk.folder import Section
from kvcache.storage.tiers.disk.names import ObjectName
from kvcache.storage.tiers.disk.store import Store

MOST_CHANCES = 16
"""Candidates in a row that stay because another process has used them lately; the next one leaves."""
_CLOCK_SLACK_S = 1.0
_RECOUNT_AFTER_S = 30.0

Sections = Mapping[int, Section]
"""Of all directories that can be written, by their index."""
EntryTest = Callable[[Entry], bool]


class Room:
    """Thread-safe. What takes sections is called within them.

    Args:
        store: of the tier.
        capacity: bytes of files in all directories together.
        heeds_use: whether the order of leaving depends on use, so that use by other processes counts.
    """

    def __init__(self, store: Store, capacity: int, *, heeds_use: bool) -> None:
        self._store = store
        self.capacity = capacity
        self.heeds_use = heeds_use
        self._under_way: Counter[bytes] = Counter()
        """Tenant to bytes that are claimed and have no name yet."""
        self.bytes_under_way = 0
        self._recount_at = 0.0

    @contextlib.contextmanager
    def sections(self) -> Iterator[dict[int, Section]]:
        """Alone with all directories that can be written, in an order that is the same for everybody."""
        store = self._store
        if store.catalog.has_found:
            store.rank()
        folders = []
        for index, directory in enumerate(store.directories):
            folder = directory.writable()
            if folder is not None and not folder.is_there():
                store.vanished(index, folder)
            elif folder is not None:
                folders.append((folder.identity, index, folder))
        with contextlib.ExitStack() as stack:
            sections: dict[int, Section] = {}
            for _, index, folder in sorted(folders, key=lambda item: item[0]):
                try:
                    sections[index] = stack.enter_context(folder.section())
                except OSError as error:
                    store.directories[index].failed(error, writing=True)
            store.sync()
            yield sections

    def take(self, name: ObjectName) -> None:
        """An object is claimed: its bytes count."""
        self._count(name, name.file_bytes)

    def give_back(self, name: ObjectName) -> None:
        """It has its name, or is given up."""
        self._count(name, -name.file_bytes)

    def make(self, name: ObjectName, sections: Sections, *, admitted: bool) -> bool:
        """Whether an object, which is claimed and counted, fits now and is let in. Others leave if need be.

        Args:
            admitted: it was let in already.

        Raises:
            OSError: one that was to leave cannot be removed.
        """
        self._recount(sections)
        newcomer = None if admitted else name.key_bytes
        while (may_leave := self._lack(name, sections)) is not None:
            if not self._give_up(sections, may_leave, newcomer):
                return False
            newcomer = None
        with self._store.lock:
            return newcomer is None or self._store.catalog.admits(newcomer, None)

    def squeeze(self, name: ObjectName, index: int, sections: Sections) -> bool:
        """Gives up as many bytes as the object has in a directory whose disk is full; False if there are not
        so many. Raises OSError."""
        section = sections[index]
        goal = section.totals.num_bytes - name.file_bytes
        while section.totals.num_bytes > goal:
            if not self._give_up({index: section}, lambda entry: True, None):
                return False
        return True

    def trim(self) -> None:
        """Gives up what is above the capacity, as after it was lowered."""
        with contextlib.suppress(OSError), self.sections() as sections:
            self._recount(sections)
            while self._used(sections) > self.capacity and self._give_up(sections, lambda entry: True, None):
                pass

    def _lack(self, name: ObjectName, sections: Sections) -> EntryTest | None:
        """Which objects may leave to make room for this one; None if it fits."""
        catalog, tenant = self._store.catalog, name.tenant
        quota = self._store.context.quota(tenant) if catalog.is_own(name.key_bytes) else None
        if quota is not None and catalog.tenant_bytes(tenant) + self._under_way[tenant] > quota:
            if name.file_bytes > quota:
                return lambda entry: False
            return lambda entry: entry.name.tenant == tenant and catalog.is_own(entry.name.key_bytes)
        return (lambda entry: True) if self._used(sections) > self.capacity else None

    def _used(self, sections: Sections) -> int:
        """Bytes in all directories; of those that can only be read, what is known of them."""
        used = sum(section.totals.num_bytes for section in sections.values())
        others = set(range(len(self._store.directories))) - sections.keys()
        return used + sum(self._store.catalog.bytes_in(index) for index in others)

    def _give_up(self, sections: Sections, may_leave: EntryTest, newcomer: bytes | None) -> bool:
        """Removes the object whose turn it is; False if none may leave, or not for the newcomer."""
        store = self._store
        chances = MOST_CHANCES if self.heeds_use else 0

        def test(entry: Entry) -> bool:
            return entry.directory in sections and may_leave(entry) and not store.is_pinned(entry.name)

        while True:
            with store.lock:
                candidate = store.catalog.candidate(test)
            if candidate is None:
                with store.lock:
                    store.count.rejected += 1
                return False
            if chances and self._used_elsewhere(candidate, sections):
                chances -= 1
                continue
            with store.lock:
                if store.catalog.candidate(test) is not candidate:
                    continue  # it was used meanwhile
                if newcomer is not None and not store.catalog.admits(newcomer, candidate):
                    return False
                store.catalog.evict(candidate)
            break
        try:
            removed = sections[candidate.directory].remove(candidate.name)
        except OSError:
            with store.lock:
                store.catalog.add(candidate.name, candidate.directory, candidate.touched)
            raise
        with store.lock:
            store.count.evictions += removed
        return True

    def _used_elsewhere(self, candidate: Entry, sections: Sections) -> bool:
        """Whether another process has used it later than this one knew; it counts as used then."""
        used = sections[candidate.directory].folder.modified(candidate.name)
        if used is None or used <= candidate.touched + _CLOCK_SLACK_S:
            return False
        with self._store.lock:
            candidate.touched = used
            self._store.catalog.touch(candidate.name.key_bytes)
        return True

    def _recount(self, sections: Sections) -> None:
        """Where the room is full of what nobody here knows, it may be what a process left that died."""
        total = sum(section.totals.num_bytes for section in sections.values())
        known = self._store.catalog.num_bytes + self.bytes_under_way
        if total <= self.capacity or total <= known or time.monotonic() < self._recount_at:
            return
        for index, section in sections.items():
            self._store.take_in(index, section)
        self._store.rank()
        self._recount_at = time.monotonic() + _RECOUNT_AFTER_S

    def _count(self, name: ObjectName, num_bytes: int) -> None:
        with self._store.lock:
            self._under_way[name.tenant] += num_bytes
            if not self._under_way[name.tenant]:
                del self._under_way[name.tenant]
            self.bytes_under_way += num_bytes
