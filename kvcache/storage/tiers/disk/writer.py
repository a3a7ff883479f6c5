# SPDX-License-Identifier: Apache-2.0
"""Writing: how an object becomes visible, once and whole.

A window of objects goes through three steps: in a section of every directory, parts are claimed and room is
made; outside of it they are written and flushed; in a section again they get their names. A full disk makes
room once more by itself: what others have filled is no longer ours.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.storage.tier import PutOutcome, StoredObject
from kvcache.storage.tiers.disk.directory import FULL
from kvcache.storage.tiers.disk.folder import Claim
from kvcache.storage.tiers.disk.names import ObjectName
from kvcache.storage.tiers.disk.room import Room, Sections
from kvcache.storage.tiers.disk.store import Store
from kvcache.storage.tiers.disk.transfers import Transfers
from kvcache.tokens.hashing import digest128


@dataclass
class Job:
    """One object on its way, and what becomes of it."""

    obj: StoredObject
    name: ObjectName
    outcome: PutOutcome = PutOutcome.FAILED
    index: int = 0
    """Of its directory."""
    claim: Claim | None = None
    full: bool = False
    """The disk had no room for it, although the capacity had."""


class Writer:
    """Thread-safe."""

    def __init__(self, store: Store, room: Room) -> None:
        self._store = store
        self._room = room

    def write(self, objects: Sequence[StoredObject], clears: int, transfers: Transfers) -> list[PutOutcome]:
        """Writes a window of objects.

        Args:
            objects: parents before their children.
            clears: `Store.clears` when they were handed over.
            transfers: of this thread.
        """
        started = time.perf_counter()
        named = [self._job(obj) for obj in objects]
        jobs = [job for job in named if job is not None]
        try:
            self._attempt(jobs, clears, transfers, squeeze=False)
            full = [job for job in jobs if job.full]
            if full:
                self._attempt(full, clears, transfers, squeeze=True)
        except OSError as error:  # of a ledger: what was claimed stays behind, and others will see that
            for job in jobs:
                self._failed(job, error)
        finally:
            for job in jobs:
                self._close(job)
        self._conclude(jobs, time.perf_counter() - started)
        return [PutOutcome.FAILED if job is None else job.outcome for job in named]

    def _job(self, obj: StoredObject) -> Job | None:
        try:
            return Job(obj, ObjectName.of(obj))
        except ValueError as error:
            self._store.note("EncodeFailed", str(error))
            return None

    def _attempt(self, jobs: Sequence[Job], clears: int, transfers: Transfers, *, squeeze: bool) -> None:
        for job in jobs:
            job.full = False
        with self._room.sections() as sections:
            for job in jobs:
                try:
                    job.outcome = self._claim(job, clears, sections, squeeze=squeeze)
                except OSError as error:
                    self._failed(job, error)
        claimed = {id(job.claim): job for job in jobs if job.claim is not None}
        writes = [(job.obj, job.claim) for job in claimed.values() if job.claim is not None]
        for claim, problem in transfers.write(writes):
            job = claimed[id(claim)]
            if problem is None:
                job.outcome = PutOutcome.STORED
            elif isinstance(problem, OSError):
                self._failed(job, problem)
            else:
                self._store.note("EncodeFailed", f"{job.name.file}: {problem}")
        for index in {job.index for job in claimed.values()}:
            self._publish(index, [job for job in claimed.values() if job.index == index])

    def _claim(self, job: Job, clears: int, sections: Sections, *, squeeze: bool) -> PutOutcome:
        """Claims an object's part; the outcome of one that is not to be written."""
        name, store = job.name, self._store
        with store.lock:
            if store.catalog.get(name.key_bytes) is not None:
                return PutOutcome.PRESENT
            if not squeeze:
                store.catalog.offered(name.key_bytes)
        if store.cleared_since(clears, name):
            return PutOutcome.DECLINED
        if not sections:
            return PutOutcome.FAILED
        job.index = _place(name, sections)
        section = sections[job.index]
        claim = section.claim(name, direct=store.directories[job.index].direct)
        if claim is None:
            return PutOutcome.PRESENT
        # Its bytes are counted from here on, and there are none yet: the sum may be too high for a moment.
        job.claim = claim
        self._room.take(name)
        try:
            fits = self._room.make(name, sections, admitted=squeeze)
            if fits and squeeze and not self._room.squeeze(name, job.index, sections):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._give_up(job, sections)
            raise
        if not fits:
            self._give_up(job, sections)
            return PutOutcome.DECLINED
        return PutOutcome.FAILED  # so far

    def _give_up(self, job: Job, sections: Sections) -> None:
        with contextlib.suppress(OSError):
            sections[job.index].remove_part(job.name)
        self._close(job)

    def _publish(self, index: int, jobs: Sequence[Job]) -> None:
        """Gives written objects their names, and takes back the parts of the others."""
        store, directory = self._store, self._store.directories[index]
        folder = next(job.claim.folder for job in jobs if job.claim is not None)
        published = False
        try:
            with folder.section() as section:
                for job in reversed(jobs):  # the end of a chain is the first to leave
                    if job.claim is None:
                        continue
                    if job.outcome is not PutOutcome.STORED:
                        section.remove_part(job.name)
                    elif not section.publish(job.claim):
                        job.outcome = PutOutcome.DECLINED
                    else:
                        published = True
                        with store.lock:
                            if directory.folder is folder:
                                store.catalog.add(job.name, index, time.time())
                            else:  # its directory vanished meanwhile
                                job.outcome = PutOutcome.FAILED
                    # Under its name and under way: not both.
                    self._close(job)
            if published:
                folder.sync()
                directory.worked(writing=True)
        except OSError as error:
            directory.failed(error, writing=True)
            for job in jobs:
                job.outcome = PutOutcome.FAILED

    def _failed(self, job: Job, error: OSError) -> None:
        job.outcome = PutOutcome.FAILED
        if error.errno in FULL:
            job.full = True
        else:
            self._store.directories[job.index].failed(error, writing=True)

    def _conclude(self, jobs: Sequence[Job], seconds: float) -> None:
        for job in jobs:
            if job.full:
                job.outcome = PutOutcome.DECLINED
                error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._store.directories[job.index].failed(error, writing=True)
        stored = [job.name.payload_bytes for job in jobs if job.outcome is PutOutcome.STORED]
        with self._store.lock:
            self._store.count.write_bytes += sum(stored)
            self._store.count.write_seconds += seconds

    def _close(self, job: Job) -> None:
        """Lets go of a claim."""
        if job.claim is not None:
            self._room.give_back(job.name)
            job.claim.close()
            job.claim = None


def _place(name: ObjectName, sections: Sections) -> int:
    """The directory of an object among those that can be written: when one fails, only its share moves."""
    if len(sections) == 1:
        return next(iter(sections))
    return max(sections, key=lambda index: digest128(sections[index].directory_id, name.key_bytes))
