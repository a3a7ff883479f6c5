# SPDX-License-Identifier: Apache-2.0
"""What other processes add to a folder and take from it, as the kernel tells (inotify), without I/O."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import NamedTuple

_IN_MOVED_TO = 0x80
_IN_DELETE = 0x200
_IN_DELETE_SELF = 0x400
_IN_Q_OVERFLOW = 0x4000
_IN_IGNORED = 0x8000
_IN_UNMOUNT = 0x2000
_EVENT = struct.Struct("iIII")
_READ_BYTES = 256 << 10

_libc = ctypes.CDLL(None, use_errno=True)


class Change(NamedTuple):
    """One file came under its name, or went."""

    name: str
    added: bool


class Changes(NamedTuple):
    """Since the last question, in order."""

    changes: list[Change]
    lost: bool
    """There were more than the kernel keeps: list the folder."""
    gone: bool
    """The folder was removed or its file system unmounted."""


class Watch:
    """Changes of one folder. One thread at a time.

    Args:
        folder: its descriptor; not needed afterwards.

    Raises:
        OSError: there is no inotify, or the user has as many as fs.inotify allows.
    """

    def __init__(self, folder: int) -> None:
        self._fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        mask = _IN_MOVED_TO | _IN_DELETE | _IN_DELETE_SELF
        try:
            _checked(_libc.inotify_add_watch(self._fd, f"/proc/self/fd/{folder}".encode(), mask))
        except OSError:
            self.close()
            raise

    def changes(self) -> Changes | None:
        """None where nothing has changed."""
        found: list[Change] = []
        lost = gone = False
        while True:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                break
            at = 0
            while at < len(data):
                _, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size + length
                if mask & _IN_Q_OVERFLOW:
                    lost = True
                elif mask & (_IN_DELETE_SELF | _IN_IGNORED | _IN_UNMOUNT):
                    gone = True
                else:
                    name = os.fsdecode(data[at - length : at].rstrip(b"\0"))
                    found.append(Change(name, bool(mask & _IN_MOVED_TO)))
        return Changes(found, lost, gone) if found or lost or gone else None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"inotify: {os.strerror(number)}")
    return result
