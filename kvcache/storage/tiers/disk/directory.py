# SPDX-License-Identifier: Apache-2.0
"""One configured directory, its folder while there is one, and what is wrong with it.

A disk that fails is left alone for a while, for longer each time, and asked again: nobody has to tell us that
it is back. One that is full or read-only is still read.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvcache.storage.tier import Health
from kvcache.storage.tiers.disk.folder import Folder, Scan

PAUSE_S = (1.0, 30.0)
"""Between a failure and the next attempt: at first, and at most."""

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENODEV, errno.ENXIO)
FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Trouble:
    """What is wrong, until an attempt succeeds."""

    state: str
    detail: str
    readable: bool
    """Reads go on."""
    failures: int
    """In a row."""
    retry_at: float


class Directory:
    """Thread-safe.

    Args:
        path: absolute.
        direct_io: as in the configuration.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        path: str,
        direct_io: Literal["Auto", "Enabled", "Disabled"],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.direct = False
        """Whether files are opened past the page cache."""
        self._direct_io = direct_io
        self._clock = clock
        self._lock = threading.Lock()
        self._was_mount = False
        self._folder: Folder | None = None
        self._trouble: Trouble | None = None

    def open(self, *, make: bool = False) -> tuple[Folder, Scan]:
        """Opens the folder, puts its sums right and lists it. Nobody uses it before `attach`.

        Args:
            make: make the directory if it is not there.

        Raises:
            OSError: it cannot be opened; noted as the trouble.
        """
        try:
            if make:
                Path(self.path).mkdir(mode=0o700, parents=True, exist_ok=True)
            is_mount = Path(self.path).is_mount()
            if self._was_mount and not is_mount:  # what is there instead is another disk's
                raise FileNotFoundError(errno.ENOENT, "its file system is not mounted")
            self._was_mount = is_mount
            folder = Folder(self.path)
        except OSError as error:
            self.failed(error)
            raise
        try:
            with folder.section() as section:
                scan = section.recount()
            self.worked(writing=True)
        except OSError as error:
            self.failed(error, writing=True)
            scan = folder.scan()
        self.direct = self._direct_io != "Disabled" and folder.direct_io()
        return folder, scan

    def attach(self, folder: Folder | None) -> None:
        """From now on this is the folder. Who uses the one of before still may."""
        with self._lock:
            self._folder = folder

    @property
    def folder(self) -> Folder | None:
        """The folder, whatever is wrong with it."""
        return self._folder

    def readable(self) -> Folder | None:
        """The folder, if it is to be read now."""
        with self._lock:
            trouble = self._trouble
            resting = trouble is not None and not trouble.readable and self._clock() < trouble.retry_at
            return None if resting else self._folder

    def writable(self) -> Folder | None:
        """The folder, if it is to be written now."""
        with self._lock:
            resting = self._trouble is not None and self._clock() < self._trouble.retry_at
            return None if resting else self._folder

    def is_due(self) -> bool:
        """Whether it is time to look if it works again."""
        with self._lock:
            if self._trouble is None:
                return self._folder is None
            return self._clock() >= self._trouble.retry_at

    def failed(self, error: OSError, *, writing: bool = False) -> None:
        """Notes a failure of the disk; it is left alone for a while.

        Args:
            writing: what failed was a write, or what only a write needs.
        """
        number = error.errno or errno.EIO
        if number == errno.EINVAL and self.direct and self._direct_io == "Auto":
            self.direct = False  # a file system that lets itself be opened so, and no more
            return
        reason = error.strerror or str(error)
        state, readable, advice = _judge(number, writing)
        with self._lock:
            failures = self._trouble.failures + 1 if self._trouble is not None else 1
            first, most = PAUSE_S
            pause = min(most, first * 2.0 ** min(failures - 1, 10))
            self._trouble = Trouble(
                state, f"{self.path}: {reason}; {advice}", readable, failures, self._clock() + pause
            )

    def worked(self, *, writing: bool) -> None:
        """The disk did what it was asked to do."""
        with self._lock:
            if self._trouble is not None and (writing or not self._trouble.readable):
                self._trouble = None

    def health(self) -> Health:
        with self._lock:
            if self._trouble is None:
                return Health("Ready")
            readable = self._trouble.readable and self._folder is not None
            return Health(self._trouble.state, self._trouble.detail, readable)


def _judge(number: int, writing: bool) -> tuple[str, bool, str]:
    """State, whether reads go on, and what to do."""
    if number in _GONE:
        return "DiskVanished", False, "mount it or make it again"
    if number in FULL:
        return "DiskFull", True, "others take its room: free some, or lower the tier's capacity"
    if number in _FORBIDDEN and writing:
        return "DiskReadOnly", True, "mount it for writing, or let this user write to it"
    if number in _FORBIDDEN:
        return "DiskForbidden", False, "let this user read and write it"
    if number == errno.EBUSY:
        return "DiskBusy", True, "another process must let go of it"
    return "DiskError", False, "look at the kernel's log and at the device"
