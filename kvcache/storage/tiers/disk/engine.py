# SPDX-License-Identifier: Apache-2.0
"""How bytes get to and from files: io_uring where the kernel lets it, threads otherwise. One interface."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Literal, NamedTuple, Protocol

from typing_extensions import Buffer

from kvcache import _native

EngineName = Literal["Uring", "Threads"]


_SECTOR = 512


class Transferred(NamedTuple):
    """A transfer that ended."""

    tag: int
    num_bytes: int
    """Fewer than asked for only at the end of the file; the negative errno of a failure."""


class FileEngine(Protocol):
    """Up to `depth` transfers at a time. For one thread."""

    def submit(self, tag: int, fd: int, offset: int, buffers: Sequence[Buffer], *, write: bool) -> None:
        """Starts a transfer between a file from `offset` on and the buffers, one after the other.

        The buffers must stay as they are until `wait` gives the tag back. A write is on the device then.
        """

    def wait(self) -> Transferred:
        """The next transfer that ended."""

    @property
    def under_way(self) -> int:
        """Transfers that `wait` has not given back."""

    def close(self) -> None:
        """Waits for what is under way."""


class UringEngine:
    """Through io_uring. Raises OSError where there is none."""

    def __init__(self, depth: int) -> None:
        self._ring = _native.Uring(depth)

    def submit(self, tag: int, fd: int, offset: int, buffers: Sequence[Buffer], *, write: bool) -> None:
        self._ring.submit(tag, fd, offset, list(buffers), write, durable=write)

    def wait(self) -> Transferred:
        return Transferred(*self._ring.wait())

    @property
    def under_way(self) -> int:
        return self._ring.under_way

    def close(self) -> None:
        self._ring.close()


class ThreadEngine:
    """By `preadv` and `pwritev` in the threads of a pool, which others may use too."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._done: SimpleQueue[Transferred] = SimpleQueue()
        self.under_way = 0

    def submit(self, tag: int, fd: int, offset: int, buffers: Sequence[Buffer], *, write: bool) -> None:
        views = [memoryview(buffer) for buffer in buffers]
        self._pool.submit(self._run, tag, fd, offset, views, write)
        self.under_way += 1

    def wait(self) -> Transferred:
        if not self.under_way:
            raise RuntimeError("nothing is under way")
        self.under_way -= 1
        return self._done.get()

    def close(self) -> None:
        while self.under_way:
            self.wait()

    def _run(self, tag: int, fd: int, offset: int, views: list[memoryview], write: bool) -> None:
        try:
            result = _transfer(fd, offset, views, write)
        except OSError as error:
            result = -(error.errno or 5)
        self._done.put(Transferred(tag, result))


def uring_unavailable() -> str:
    """Why there is no io_uring; empty where there is."""
    try:
        _native.Uring(1).close()
    except OSError as error:
        return f"{error.strerror}: the kernel, kernel.io_uring_disabled or the container's seccomp profile"
    return ""


def _transfer(fd: int, offset: int, views: list[memoryview], write: bool) -> int:
    done, flushed = 0, True
    while views:
        if not write:
            moved = os.preadv(fd, views, offset + done)
        elif flushed:
            try:
                moved = os.pwritev(fd, views, offset + done, os.RWF_DSYNC)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                flushed = False
                continue
        else:
            moved = os.pwritev(fd, views, offset + done)
        done += moved
        if moved == 0 or (not write and done % _SECTOR):
            break  # the end of the file; direct I/O cannot ask again from within a sector
        views = _rest(views, moved)
    if not flushed:
        os.fdatasync(fd)
    return done


def _rest(views: list[memoryview], moved: int) -> list[memoryview]:
    """The views without their first bytes."""
    for index, view in enumerate(views):
        if moved < view.nbytes:
            return [view[moved:], *views[index + 1 :]]
        moved -= view.nbytes
    return []
