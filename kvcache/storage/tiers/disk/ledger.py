# SPDX-License-Identifier: Apache-2.0
"""How many bytes and objects lie in one folder, for all processes that use it, exactly.

Whatever adds, renames or removes a file does so in a *section*, under a lock of the file `ledger`, and
leaves the sums there. A process that is killed in a section leaves the mark that one has begun: whoever
comes next counts the folder anew. So does each process when it opens the folder, whatever the file says.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

FILE = "ledger"
LOCK_TIMEOUT_S = 10.0
"""A section takes milliseconds: who waits longer waits for a process that is stopped."""

_MAGIC = b"\x93KVLEDG\n"
_RECORD = struct.Struct("<8sI4xQQ16s")
_POLL_S = (0.0002, 0.002)


@dataclass
class Totals:
    """Sums of a folder."""

    num_bytes: int = 0
    """Of objects and of those being written."""
    objects: int = 0
    """That are complete."""
    sound: bool = True
    """False: somebody died in a section, or the ledger is new; count the folder first."""


class LedgerBusyError(OSError):
    """Another process has held the lock for too long. `errno` is EBUSY."""


class Ledger:
    """Thread-safe.

    Args:
        folder: descriptor of the folder; stays the caller's.

    Raises:
        OSError: the ledger can be neither opened nor made.
    """

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self._mutex = threading.Lock()
        self._fd = -1
        self.directory_id = bytes(16)
        """Random, of the folder, known after the first section: processes may name it by different paths."""
        self._open()

    @contextlib.contextmanager
    def section(self) -> Iterator[Totals]:
        """Alone with the folder. What is done to the totals is kept, also when an exception leaves it.

        Raises:
            LedgerBusyError: the lock was not to be had in time.
            OSError: the ledger cannot be read or written.
        """
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        if not self._mutex.acquire(timeout=LOCK_TIMEOUT_S):
            raise _busy()
        try:
            if self._fd < 0:
                raise OSError(errno.EBADF, "the ledger is closed")
            self._lock(deadline)
            try:
                totals = self._begin()
                try:
                    yield totals
                finally:
                    self._write(totals, begun=not totals.sound)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def close(self) -> None:
        with self._mutex:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(FILE, flags, 0o600, dir_fd=self._folder)

    def _lock(self, deadline: float) -> None:
        pause, longest = _POLL_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _busy() from None
                time.sleep(pause)
                pause = min(2 * pause, longest)
                continue
            if os.fstat(self._fd).st_nlink:
                return
            os.close(self._fd)  # somebody removed it: the next one is everybody's
            self._fd = -1
            self._open()

    def _begin(self) -> Totals:
        data = os.pread(self._fd, _RECORD.size, 0)
        sound = len(data) == _RECORD.size
        magic, begun, num_bytes, objects, name = _RECORD.unpack(data) if sound else (b"", 0, 0, 0, b"")
        sound = sound and magic == _MAGIC
        self.directory_id = name if sound else secrets.token_bytes(16)
        totals = Totals(num_bytes, objects, sound and not begun)
        self._write(totals, begun=True)
        return totals

    def _write(self, totals: Totals, *, begun: bool) -> None:
        record = _RECORD.pack(_MAGIC, begun, totals.num_bytes, totals.objects, self.directory_id)
        os.pwrite(self._fd, record, 0)


def _busy() -> LedgerBusyError:
    return LedgerBusyError(
        errno.EBUSY,
        f"its ledger has been locked for {LOCK_TIMEOUT_S:.0f} s; look for a stopped process that uses it",
    )
