# SPDX-License-Identifier: Apache-2.0
"""Shared memory that killed processes leave behind.

POSIX shared memory is a file in /dev/shm that outlives everyone who has it mapped, and its names (`psm_...`
of Python, `torch_...`) do not say whose it is. So the supervisor notes, while its processes run, which files
they have open or mapped; after their end exactly those are removed that are still the same files, of this
user, and used by nobody else.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kvcache_operator.local.procfs import PROC, own_processes

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


class SharedFile(BaseModel):
    """A file in /dev/shm, beyond its name, which may be used again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    inode: int


def shared_files(pids: Iterable[int]) -> set[SharedFile]:
    """This user's files in /dev/shm that these processes have open or mapped."""
    used = {inode for pid in pids for inode in (*_mapped(pid), *_opened(pid))}
    return {file for file in _own_files() if file.inode in used}


def remove_unused(files: Iterable[SharedFile]) -> list[str]:
    """Removes those of `files` that still exist and that nobody uses any more; returns their paths."""
    candidates = set(files) & _own_files()
    if candidates:
        candidates -= shared_files(process.id.pid for process in own_processes())
    for file in candidates:
        Path(file.path).unlink(missing_ok=True)
    return sorted(file.path for file in candidates)


def _own_files() -> set[SharedFile]:
    files = set()
    for entry in SHARED_MEMORY.glob("*"):
        try:
            status = entry.lstat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            files.add(SharedFile(path=str(entry), inode=status.st_ino))
    return files


def _device() -> int:
    return SHARED_MEMORY.stat().st_dev


def _mapped(pid: int) -> list[int]:
    """Inodes in /dev/shm that a process has mapped.

    By number, since names mislead: glibc makes a semaphore under another name and links it to its own.
    """
    device = f"{os.major(_device()):02x}:{os.minor(_device()):02x}"
    try:
        lines = (PROC / str(pid) / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return []
    columns = (line.split(maxsplit=5) for line in lines)
    return [int(column[4]) for column in columns if column[3] == device]


def _opened(pid: int) -> list[int]:
    """Inodes in /dev/shm that a process has open."""
    inodes = []
    with suppress(OSError):
        for entry in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                status = entry.stat()
                inodes += [status.st_ino] if status.st_dev == _device() else []
    return inodes
