# SPDX-License-Identifier: Apache-2.0
"""The disk tier against plain direct I/O of the same files, in turn in one run: what checksums, names, the
index and Python cost.

References are a loop of our own over the same io_uring, which does nothing else (`loop`), and `fio` where it
is installed: as many new files, of the same size, with as many transfers at a time, past the page cache. A
write ends when it is on the device for all: each of the tier's objects is flushed by itself, as are those
of `loop` and `fio-dsync`; `fio` flushes its files at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcache import _native
from kvcache.config.tiers import DiskTierConfig
from kvcache.memory.formats import KVShape
from kvcache.memory.region import HostRegion
from kvcache.storage.tier import ClearScope, PutOutcome, StoredObject, TierContext, WantedObject
from kvcache.storage.tiers.disk import DiskTier, open_disk
from kvcache.storage.tiers.disk.engine import uring_unavailable
from kvcache.storage.tiers.disk.names import file_bytes
from kvcache.storage.tiers.disk.tier import READERS, WINDOW_OBJECTS, WRITERS
from kvcache.storage.tiers.disk.transfers import DEPTH
from kvcache.tokens.keys import CacheEngineKey

SIZES = (1 << 20, 4 << 20, 32 << 20)
"""Bytes of payload: chunks of 256 tokens of a small model, of an 8B model on eight GPUs, and on one."""
LOOPS = 4
"""Times that fio reads its files in one run: the first time it has its memory's pages made meanwhile."""
_FIO_TIMEOUT_S = 300
_NAMESPACE = bytes(16)

Timed = Callable[[], float]


@dataclass(frozen=True)
class DiskResult:
    """Bytes a second of payload and header, the median over rounds."""

    what: str
    """`write` or `read`."""
    object_bytes: int
    """Of a file."""
    objects: int
    depth: int
    """Transfers at a time."""
    engine: str
    direct: bool
    reference: str
    reference_rate: float
    rate: float
    ratio: float
    """Median of the rounds' ratios."""
    low: float
    high: float
    """The least and the greatest ratio of a round."""


def disk_results(
    directory: Path, *, total_bytes: int = 1 << 30, rounds: int = 5, sizes: Sequence[int] = SIZES
) -> Iterator[DiskResult]:
    """Results for each size of object.

    Args:
        directory: where to work; a folder of its own is made and removed there.
        total_bytes: what one measurement writes or reads.
        rounds: measurements of each kind.
        sizes: bytes of payload.

    Raises:
        ValueError: the directory has too little room.
        RuntimeError: an object was not stored or not read.
    """
    free = shutil.disk_usage(directory).free
    if free < 3 * total_bytes:
        raise ValueError(f"{directory} has {free} bytes free, and {3 * total_bytes} are needed; name another")
    for size in sizes:
        place = Path(tempfile.mkdtemp(prefix="kvcache-bench-", dir=directory.resolve()))
        try:
            yield from _compare(place, size, max(1, total_bytes // size), rounds)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _compare(place: Path, size: int, objects: int, rounds: int) -> Iterator[DiskResult]:
    bench = _TierBench(place / "tier", size, objects)
    try:
        depths = {
            "write": min(objects, WRITERS * min(DEPTH, WINDOW_OBJECTS)),
            "read": min(objects, READERS * DEPTH),
        }
        references = _references(place / "plain", file_bytes(size), objects, depths, direct=bench.tier.direct)
        measures: dict[str, tuple[Timed, dict[str, Timed]]] = {
            "write": (
                bench.write,
                {name: ways["write"] for name, ways in references.items() if "write" in ways},
            ),
            "read": (bench.read, {name: ways["read"] for name, ways in references.items() if "read" in ways}),
        }
        times = _rounds(measures, rounds, bench.clear)
        for what, (_, others) in measures.items():
            for reference in others:
                ours, plain = times[what, ""], times[what, reference]
                ratios = [b / a for a, b in zip(ours, plain, strict=True)]
                moved = objects * file_bytes(size)
                yield DiskResult(
                    what,
                    file_bytes(size),
                    objects,
                    depths[what],
                    bench.tier.engine,
                    bench.tier.direct,
                    reference,
                    moved / statistics.median(plain),
                    moved / statistics.median(ours),
                    statistics.median(ratios),
                    min(ratios),
                    max(ratios),
                )
    finally:
        bench.close()


def _rounds(
    measures: dict[str, tuple[Timed, dict[str, Timed]]], rounds: int, clear: Callable[[], None]
) -> dict[tuple[str, str], list[float]]:
    """Seconds by what and reference, "" for the tier: in turn, the one or the other first. The first round
    warms up and does not count."""
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for what, (ours, others) in measures.items():
            runs = [("", ours), *others.items()]
            for name, run in runs if number % 2 else reversed(runs):
                seconds = run()
                if number:
                    times.setdefault((what, name), []).append(seconds)
        clear()
    return times


class _TierBench:
    """The tier, and as much host memory as its objects need."""

    def __init__(self, place: Path, size: int, objects: int) -> None:
        shape = KVShape(1, 1, 1024, torch.uint8, size // 1024)
        self._objects = objects
        self._size = size
        self._region = HostRegion(objects * size, pin="Disabled")
        self._region.prepare(size)
        self._memory = memoryview(self._region.native)
        for start in range(0, self._memory.nbytes, size):
            self._memory[start : start + size] = os.urandom(size)
        config = DiskTierConfig(
            directories=[str(place)], capacity=max(1 << 30, 2 * objects * file_bytes(size))
        )
        self.tier: DiskTier = open_disk(config, TierContext(shape=shape, namespace=_NAMESPACE, rank=0))
        self._round = 0

    def _pieces(self) -> Iterator[tuple[CacheEngineKey, memoryview]]:
        for index in range(self._objects):
            digest = (self._round << 32 | index).to_bytes(16, "little")
            start = index * self._size
            yield CacheEngineKey(digest, _NAMESPACE, 0), self._memory[start : start + self._size]

    def write(self) -> float:
        objects = [StoredObject(key, self._size // 1024, piece.toreadonly()) for key, piece in self._pieces()]
        started = time.perf_counter()
        outcomes = self.tier.put(objects).result()
        seconds = time.perf_counter() - started
        if outcomes != [PutOutcome.STORED] * self._objects:
            raise RuntimeError(f"not all objects were stored: {self.tier.health()}")
        return seconds

    def read(self) -> float:
        wanted = [WantedObject(key, piece) for key, piece in self._pieces()]
        started = time.perf_counter()
        answers = self.tier.get(wanted).result()
        seconds = time.perf_counter() - started
        if not all(answers):
            raise RuntimeError(f"not all objects were read: {self.tier.failures}, {self.tier.health()}")
        return seconds

    def clear(self) -> None:
        self.tier.clear(ClearScope()).result()
        self._round += 1

    def close(self) -> None:
        self.tier.close()
        del self._memory
        self._region.close()


def _references(
    place: Path, size: int, objects: int, depths: dict[str, int], *, direct: bool
) -> dict[str, dict[str, Timed]]:
    """What to compare with, by name and by what it does."""
    found: dict[str, dict[str, Timed]] = {}
    if not uring_unavailable():
        loop = _Loop(place / "loop", size, objects, depths, direct=direct)
        found["loop"] = {"write": loop.write, "read": loop.read}
    if shutil.which("fio"):
        fio = _Fio(place / "fio", size, objects, depths, direct=direct)
        found["fio"] = {
            "write": lambda: fio.run("write"),
            "read": lambda: fio.run("read", f"--loops={LOOPS}"),
        }
        found["fio-dsync"] = {"write": lambda: fio.run("write", "--sync=dsync")}
    if not found:
        raise ValueError("there is neither fio nor io_uring to compare with; install fio")
    return found


class _Fio:
    """One job, a file for each transfer."""

    def __init__(self, place: Path, size: int, objects: int, depths: dict[str, int], *, direct: bool) -> None:
        place.mkdir(parents=True)
        self._place = place
        self._depths = depths
        self._bytes = objects * size
        self._common = [
            *("fio", "--name=reference", f"--directory={place}", "--output-format=json", "--thread"),
            *(
                "--ioengine=libaio" if uring_unavailable() else "--ioengine=io_uring",
                f"--direct={int(direct)}",
            ),
            *(f"--bs={size}", f"--filesize={size}", f"--nrfiles={objects}", f"--openfiles={objects}"),
            *(f"--size={objects * size}", "--file_service_type=sequential", "--fallocate=none"),
            *("--allow_file_create=1", "--invalidate=0", "--end_fsync=1"),
        ]

    def run(self, what: str, *more: str) -> float:
        """Seconds of the job's transfers."""
        if what == "write":
            for file in self._place.iterdir():
                file.unlink()
            more = (*more, "--create_on_open=1")
        command = [*self._common, f"--rw={what}", f"--iodepth={self._depths[what]}", *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FIO_TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"fio: {(done.stderr or done.stdout).strip()[-300:]}")
        report: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        job = report["jobs"][0]
        # The flush at the end counts, as it does for the tier; starting the program does not.
        return self._bytes / float(job[what]["bw_bytes"])


class _Loop:
    """Direct I/O and nothing else."""

    def __init__(self, place: Path, size: int, objects: int, depths: dict[str, int], *, direct: bool) -> None:
        place.mkdir(parents=True)
        self._place = place
        self._size = size
        self._objects = objects
        self._depths = depths
        self._flags = os.O_DIRECT if direct else 0
        self._region = HostRegion(max(depths.values()) * size, pin="Disabled")
        self._memory = memoryview(self._region.native)
        self._memory[:] = bytes(self._memory.nbytes)

    def write(self) -> float:
        for file in self._place.iterdir():
            file.unlink()
        return self._run("write", os.O_WRONLY | os.O_CREAT)

    def read(self) -> float:
        return self._run("read", os.O_RDONLY)

    def _run(self, what: str, flags: int) -> float:
        depth = self._depths[what]
        ring = _native.Uring(depth)
        started = time.perf_counter()
        fds = [
            os.open(self._place / f"{index}", flags | self._flags, 0o600) for index in range(self._objects)
        ]
        free = list(range(depth))
        for fd in fds:
            if not free:
                free.append(self._ended(ring))
            slot = free.pop()
            piece = self._memory[slot * self._size : (slot + 1) * self._size]
            ring.submit(slot, fd, 0, [piece], what == "write", what == "write")
        while ring.under_way:
            self._ended(ring)
        for fd in fds:
            os.close(fd)
        seconds = time.perf_counter() - started
        ring.close()
        return seconds

    def _ended(self, ring: _native.Uring) -> int:
        slot, result = ring.wait()
        if result != self._size:
            raise RuntimeError(f"direct I/O ended with {result}, not with {self._size} bytes")
        return slot
