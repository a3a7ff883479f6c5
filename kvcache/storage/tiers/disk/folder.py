# SPDX-License-Identifier: Apache-2.0
"""One opened folder of objects: its files, and what may be done to them.

The file system itself says who writes what: an object being written is a `.part` file that its writer holds
locked (flock) until it has its final name, so that two processes never write the same object, and the part
of a process that died is known by its free lock. What changes names goes through a section of the ledger.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvcache.storage.object_format import ObjectFormatError
from kvcache.storage.tier import ALIGNMENT
from kvcache.storage.tiers.disk.ledger import FILE as LEDGER_FILE
from kvcache.storage.tiers.disk.ledger import Ledger, Totals
from kvcache.storage.tiers.disk.names import LAYOUT, PART_SUFFIX, ObjectName, parse_name, sum_of_files
from kvcache.storage.tiers.disk.watch import Changes, Watch

PROBE_FILE = "probe"

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_PROBE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass
class Scan:
    """What lies in a folder."""

    objects: list[bytes] = field(default_factory=list)
    """Their names, the 84 bytes of each."""
    parts: list[ObjectName] = field(default_factory=list)
    """Being written, or left by a writer that died."""
    unknown: list[str] = field(default_factory=list)
    """Names of what is none of ours: left alone and not counted."""


@dataclass
class Claim:
    """The right to write one object."""

    folder: Folder
    name: ObjectName
    fd: int
    """Of its part, locked; for writing, past the page cache if the folder is direct."""

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Section:
    """Alone with a folder: what may change its names. Valid as long as the section lasts."""

    def __init__(self, folder: Folder, totals: Totals) -> None:
        self.folder = folder
        self.totals = totals

    @property
    def directory_id(self) -> bytes:
        """16 random bytes of the folder: processes may name it by different paths."""
        return self.folder.directory_id

    def recount(self) -> Scan:
        """Lists the folder, removes the parts of the dead and puts the sums right. Raises OSError."""
        scan = self.folder.scan()
        alive = []
        for part in scan.parts:
            if not self.folder.is_dead(part):
                alive.append(part)
            else:
                self._unlink(part.part)
        scan.parts = alive
        self.totals.num_bytes = sum_of_files(scan.objects) + sum(part.file_bytes for part in alive)
        self.totals.objects = len(scan.objects)
        self.totals.sound = True
        return scan

    def claim(self, name: ObjectName, *, direct: bool) -> Claim | None:
        """None if the object is there or another process is writing it.

        Raises:
            OSError: the part cannot be made.
        """
        at = self.folder.fd
        if self.folder.modified(name) is not None:
            return None
        flags = _CREATE | (os.O_DIRECT if direct else 0)
        try:
            fd = os.open(name.part, flags, 0o600, dir_fd=at)
        except FileExistsError:
            if not self.folder.is_dead(name) or not self.remove_part(name):
                return None
            fd = os.open(name.part, flags, 0o600, dir_fd=at)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.totals.num_bytes += name.file_bytes
        return Claim(self.folder, name, fd)

    def publish(self, claim: Claim) -> bool:
        """Gives a written object its name; False if somebody has cleared it meanwhile."""
        at = self.folder.fd
        try:
            os.rename(claim.name.part, claim.name.file, src_dir_fd=at, dst_dir_fd=at)
        except FileNotFoundError:
            return False
        self.totals.objects += 1
        return True

    def remove(self, name: ObjectName) -> bool:
        """False if it was gone already: who removes it counts it."""
        if not self._unlink(name.file):
            return False
        self.totals.num_bytes = max(0, self.totals.num_bytes - name.file_bytes)
        self.totals.objects = max(0, self.totals.objects - 1)
        return True

    def remove_part(self, name: ObjectName) -> bool:
        if not self._unlink(name.part):
            return False
        self.totals.num_bytes = max(0, self.totals.num_bytes - name.file_bytes)
        return True

    def _unlink(self, file: str) -> bool:
        try:
            os.unlink(file, dir_fd=self.folder.fd)
        except FileNotFoundError:
            return False
        return True


class Folder:
    """The folder `LAYOUT` in a directory. Closed when the last who uses it lets go of it: its descriptor
    never means another folder.

    Args:
        directory: where it lies; the folder is made if it is not there.

    Raises:
        OSError: the directory is not there, or the folder cannot be made or opened.
    """

    def __init__(self, directory: str) -> None:
        self.fd = -1
        self.ledger: Ledger | None = None
        self.watch: Watch | None = None
        self._opening = threading.Lock()
        base = os.open(directory, _FOLDER)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(LAYOUT, 0o700, dir_fd=base)
                os.fsync(base)
            self.fd = os.open(LAYOUT, _FOLDER | os.O_NOFOLLOW, dir_fd=base)
        finally:
            os.close(base)
        self._path = Path(directory, LAYOUT)
        status = os.fstat(self.fd)
        self.identity = (status.st_dev, status.st_ino)
        with contextlib.suppress(OSError):
            self.watch = Watch(self.fd)

    def __del__(self) -> None:
        if self.watch is not None:
            self.watch.close()
        if self.ledger is not None:
            self.ledger.close()
        if self.fd >= 0:
            os.close(self.fd)

    def is_there(self) -> bool:
        """Whether the path still leads here."""
        try:
            there = self._path.stat()
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == self.identity

    def direct_io(self) -> bool:
        """Whether its files can be read and written past the page cache. Asks the ledger's file."""
        try:
            os.close(os.open(LEDGER_FILE, _READ | os.O_DIRECT, dir_fd=self.fd))
        except OSError:
            return False
        return True

    @property
    def directory_id(self) -> bytes:
        return self.ledger.directory_id if self.ledger is not None else bytes(16)

    @contextmanager
    def section(self) -> Iterator[Section]:
        """Alone with the folder, among threads and processes.

        Raises:
            OSError: as `Ledger` says.
        """
        with self._opening:
            if self.ledger is None:
                self.ledger = Ledger(self.fd)
        with self.ledger.section() as totals:
            section = Section(self, totals)
            if not totals.sound:
                section.recount()
            yield section

    def scan(self) -> Scan:
        """Lists the folder."""
        found = Scan()
        # A descriptor of its own: two who list share no position.
        fd = os.open(".", _FOLDER, dir_fd=self.fd)
        try:
            with os.scandir(fd) as entries:
                files = [(entry.name, entry.is_file(follow_symlinks=False)) for entry in entries]
        finally:
            os.close(fd)
        for text, is_file in files:
            raw = parse_name(text) if is_file else None
            if raw is not None:
                found.objects.append(raw)
            elif is_file and (part := parse_name(text, PART_SUFFIX)) is not None:
                found.parts.append(ObjectName(part))
            elif text not in (LEDGER_FILE, PROBE_FILE):
                found.unknown.append(text)
        return found

    def open_object(self, name: ObjectName, *, direct: bool) -> int:
        """A descriptor to read it.

        Raises:
            OSError: the file system says so.
            ObjectFormatError: it is no file: a pipe, say, which would be waited for.
        """
        if not stat.S_ISREG(os.stat(name.file, dir_fd=self.fd, follow_symlinks=False).st_mode):
            raise ObjectFormatError("ObjectForeign", "it is no file")
        return os.open(name.file, _READ | (os.O_DIRECT if direct else 0), dir_fd=self.fd)

    def modified(self, name: ObjectName) -> float | None:
        """When it was last written or touched, in seconds of the epoch; None if it is gone."""
        try:
            return os.stat(name.file, dir_fd=self.fd, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            return None

    def sync(self) -> None:
        """Makes names durable. Raises OSError."""
        os.fsync(self.fd)

    def probe(self, num_bytes: int) -> None:
        """Raises OSError unless a file of so many bytes can be written here. Writes and flushes a page."""
        with self.section():
            status = os.fstatvfs(self.fd)
            if status.f_bavail * status.f_frsize < num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fd = os.open(PROBE_FILE, _PROBE, 0o600, dir_fd=self.fd)
            try:
                os.pwrite(fd, bytes(ALIGNMENT), 0)
                os.fsync(fd)
            finally:
                os.close(fd)
                os.unlink(PROBE_FILE, dir_fd=self.fd)

    def changes(self) -> Changes | None:
        """What others have changed, where `watch` can tell."""
        return self.watch.changes() if self.watch is not None else None

    def is_dead(self, part: ObjectName) -> bool:
        """Whether nobody writes the part. Asked within a section."""
        try:
            fd = os.open(part.part, _READ | os.O_NONBLOCK, dir_fd=self.fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno == errno.ELOOP:  # a symbolic link, which nobody of ours made
                return False
            raise
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True
