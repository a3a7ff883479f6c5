# SPDX-License-Identifier: Apache-2.0
"""Objects to and from files: as many at a time as the device likes, each one checked while others are under
way.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvcache import _native
from kvcache.memory.formats import KVShape
from kvcache.storage.object_format import HEADER_BYTES, ObjectFormatError, encode_object, open_object
from kvcache.storage.sealing import Sealer
from kvcache.storage.tier import ALIGNMENT, StoredObject, WantedObject
from kvcache.storage.tiers.disk.engine import FileEngine
from kvcache.storage.tiers.disk.folder import Claim

DEPTH = 8
"""Transfers at a time of one thread."""
SEGMENT_BYTES = 4 << 20
"""Of a payload, read at a time: what has come is checked while the rest is under way."""
STAGING_BYTES = 128 << 20
"""Memory of one thread's aligned copies at most, where copies are needed; one object is always possible."""


class Source(NamedTuple):
    """An object to read."""

    wanted: WantedObject
    fd: int
    """Closed by the reader."""


class Staging:
    """Aligned memory of one transfer: the header, the payload's end that fills no page, and the whole payload
    where it cannot stay where it is.
    """

    def __init__(self) -> None:
        small = memoryview(mmap.mmap(-1, HEADER_BYTES + ALIGNMENT))
        self.header = small[:HEADER_BYTES]
        self.tail = small[HEADER_BYTES:]
        self._whole = memoryview(b"")

    def whole(self, num_bytes: int) -> memoryview:
        """Memory of whole pages for so many bytes."""
        padded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if self._whole.nbytes < padded:
            self._whole = memoryview(mmap.mmap(-1, padded))
        return self._whole[:padded]


class _Read:
    """One object that is being read in segments; its checksum is made as they come, in their order."""

    def __init__(self, source: Source, staging: Staging) -> None:
        self.source = source
        self.staging = staging
        self._target = source.wanted.target
        self._size = self._target.nbytes
        self._whole = self._size - self._size % ALIGNMENT
        self._staged = None if _aligned(self._target) else staging.whole(self._size)
        self._starts = range(0, self._size, SEGMENT_BYTES)
        self._got: list[int | None] = [None] * len(self._starts)
        self._expected = [sum(map(len, self._pieces(index))) for index in range(len(self._starts))]
        self._hash = _native.Xxh3_128()
        self._hashed = 0
        """Segments."""

    def segments(self) -> Iterator[tuple[int, int, list[memoryview]]]:
        """Number, offset in the file and memory of each."""
        for index, start in enumerate(self._starts):
            yield index, HEADER_BYTES + start if index else 0, self._pieces(index)

    def arrived(self, index: int, num_bytes: int) -> bool:
        """A segment has come; whether it was the last that was missing."""
        self._got[index] = num_bytes
        while self._hashed < len(self._got) and self._got[self._hashed] == self._expected[self._hashed]:
            start = self._starts[self._hashed]
            end = min(start + SEGMENT_BYTES, self._size)
            if self._staged is None and end > self._whole:
                self._target[self._whole :] = self.staging.tail[: self._size - self._whole]
            memory = self._target if self._staged is None else self._staged
            self._hash.update(memory[start:end])
            self._hashed += 1
        return None not in self._got

    def finish(self, shape: KVShape, sealer: Sealer | None) -> None:
        """Checks the whole object. Raises OSError or ObjectFormatError."""
        total = 0
        for got, expected in zip(self._got, self._expected, strict=True):
            if got is None or got < 0:
                number = errno.EIO if got is None else -got
                raise OSError(number, os.strerror(number))
            total += got
            if got < expected:
                break
        if self._staged is not None:
            self._target[:] = self._staged[: self._size]
        header = self.staging.header[: min(total, HEADER_BYTES)]
        payload = self._target[: max(0, total - HEADER_BYTES)]
        open_object(header, payload, self.source.wanted.key, shape, sealer, self._hash.digest())

    def _pieces(self, index: int) -> list[memoryview]:
        start = self._starts[index]
        end = min(start + SEGMENT_BYTES, self._size)
        pieces = [] if index else [self.staging.header]
        if self._staged is not None:
            return [*pieces, self._staged[start : start + SEGMENT_BYTES]]
        if start < self._whole:
            pieces.append(self._target[start : min(end, self._whole)])
        return pieces if end <= self._whole else [*pieces, self.staging.tail]


class Transfers:
    """Reads and writes of one thread.

    Args:
        engine: how; closed with this.
        shape: of a chunk.
        sealer: of this process's objects, if they are sealed.
    """

    def __init__(self, engine: FileEngine, shape: KVShape, sealer: Sealer | None) -> None:
        self._engine = engine
        self._shape = shape
        self._sealer = sealer
        self._free = [Staging() for _ in range(DEPTH + 1)]
        self._staged_at_a_time = min(DEPTH, max(1, STAGING_BYTES // shape.chunk_bytes))

    def read(self, sources: Iterable[Source]) -> Iterator[tuple[Source, Exception | None]]:
        """Reads objects into their targets, and says of each one in the order in which they end: None for one
        that is verified, `ObjectFormatError` for one that is not what it should be, or `OSError`. Its
        descriptor is open until the next is asked for.
        """
        reads: dict[int, tuple[_Read, int]] = {}
        """By tag, with the number of the segment."""
        begun: dict[int, _Read] = {}
        segments = self._segments(sources)
        tag = 0
        try:
            while True:
                while len(reads) < DEPTH and (segment := next(segments, None)) is not None:
                    read, index, offset, pieces = segment
                    begun[id(read)] = read
                    reads[tag] = (read, index)
                    self._engine.submit(tag, read.source.fd, offset, pieces, write=False)
                    tag += 1
                if not reads:
                    return
                done = self._engine.wait()
                read, index = reads.pop(done.tag)
                if not read.arrived(index, done.num_bytes):
                    continue
                problem: Exception | None = None
                try:
                    read.finish(self._shape, self._sealer)
                except (OSError, ObjectFormatError) as error:
                    problem = error
                yield read.source, problem
                self._end(begun.pop(id(read)))
        finally:
            self._drain()
            for read in begun.values():
                self._end(read)

    def _segments(self, sources: Iterable[Source]) -> Iterator[tuple[_Read, int, int, list[memoryview]]]:
        """Of one object after the other."""
        for source in sources:
            read = _Read(source, self._free.pop())
            for index, offset, pieces in read.segments():
                yield read, index, offset, pieces

    def _end(self, read: _Read) -> None:
        self._free.append(read.staging)
        os.close(read.source.fd)

    def write(self, writes: Sequence[tuple[StoredObject, Claim]]) -> Iterator[tuple[Claim, Exception | None]]:
        """Writes objects, durably, to the parts of their claims: None for one that is complete, ValueError
        for one that is no object of this shape.
        """
        rest = iter(writes)
        under_way: dict[int, tuple[Claim, Staging]] = {}
        tag = 0
        depth = DEPTH if self._sealer is None else self._staged_at_a_time
        try:
            while True:
                while len(under_way) < depth and (write := next(rest, None)) is not None:
                    obj, claim = write
                    staging = self._free.pop()
                    try:
                        pieces = self._encode(obj, staging)
                    except ValueError as error:
                        self._free.append(staging)
                        yield claim, error
                        continue
                    under_way[tag] = (claim, staging)
                    self._engine.submit(tag, claim.fd, 0, pieces, write=True)
                    tag += 1
                if not under_way:
                    return
                done = self._engine.wait()
                claim, staging = under_way.pop(done.tag)
                self._free.append(staging)
                if done.num_bytes == claim.name.file_bytes:
                    yield claim, None
                else:
                    number = -done.num_bytes if done.num_bytes < 0 else errno.EIO
                    yield claim, OSError(number, os.strerror(number))
        finally:
            self._drain()
            self._free += [staging for _, staging in under_way.values()]

    def _drain(self) -> None:
        """Waits for what is under way when something went wrong: its memory is others' afterwards."""
        while self._engine.under_way:
            self._engine.wait()

    def close(self) -> None:
        self._engine.close()

    def _encode(self, obj: StoredObject, staging: Staging) -> list[memoryview]:
        size = obj.payload.nbytes
        staged: memoryview | None = None
        if self._sealer is not None:
            staged = staging.whole(size)
            encoded = encode_object(obj, self._shape, self._sealer, staged[:size])
        else:
            encoded = encode_object(obj, self._shape)
            if not _aligned(obj.payload):
                staged = staging.whole(size)
                staged[:size] = obj.payload
        staging.header[:] = encoded.header
        end = size % ALIGNMENT
        if staged is not None:
            staged[size:] = bytes(staged.nbytes - size)
        elif end:  # never what lies behind the payload: it may be another tenant's
            staging.tail[:end] = obj.payload[size - end :]
            staging.tail[end:] = bytes(ALIGNMENT - end)
        return _pieces(staging, obj.payload, staged)


def _pieces(staging: Staging, payload: memoryview, staged: memoryview | None) -> list[memoryview]:
    """The memory of a whole file, in order."""
    if staged is not None:
        return [staging.header, staged]
    whole = payload.nbytes - payload.nbytes % ALIGNMENT
    pieces = [staging.header, payload[:whole]] if whole else [staging.header]
    return [*pieces, staging.tail] if whole < payload.nbytes else pieces


def _aligned(view: memoryview) -> bool:
    return bool(np.frombuffer(view, np.uint8).ctypes.data % ALIGNMENT == 0)
