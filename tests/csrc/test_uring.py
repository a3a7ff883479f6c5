# SPDX-License-Identifier: Apache-2.0
"""io_uring in the native module, and the engine of threads that stands in for it: the same answers."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcache import _native
from kvcache.storage.tiers.disk.engine import FileEngine, ThreadEngine, UringEngine, uring_unavailable

needs_uring = pytest.mark.skipif(bool(uring_unavailable()), reason="there is no io_uring here")


@pytest.fixture(params=[pytest.param("uring", marks=needs_uring), "threads"])
def engine(request: pytest.FixtureRequest) -> Iterator[FileEngine]:
    if request.param == "uring":
        ring = UringEngine(8)
        yield ring
        ring.close()
    else:
        with ThreadPoolExecutor(3) as pool:
            threads = ThreadEngine(pool)
            yield threads
            threads.close()


def pieces_of(content: bytes, rng: random.Random) -> list[bytes]:
    """Cut at random, some of them empty."""
    cuts = sorted(rng.choices(range(len(content) + 1), k=rng.randint(0, 6)))
    return [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]


def test_many_files_at_a_time_in_pieces(tmp_path: Path, engine: FileEngine) -> None:
    rng = random.Random()
    contents = [rng.randbytes(rng.randint(1, 300_000)) for _ in range(8)]
    fds = [os.open(tmp_path / str(n), os.O_RDWR | os.O_CREAT) for n in range(8)]
    for n, content in enumerate(contents):
        engine.submit(n, fds[n], 0, pieces_of(content, rng), write=True)
    assert engine.under_way == 8
    written = dict(engine.wait() for _ in range(8))
    assert written == {n: len(content) for n, content in enumerate(contents)}
    assert [Path(tmp_path / str(n)).read_bytes() for n in range(8)] == contents
    targets = [[bytearray(len(piece)) for piece in pieces_of(content, rng)] for content in contents]
    for n in rng.sample(range(8), 8):
        engine.submit(100 + n, fds[n], 0, targets[n], write=False)
    read = dict(engine.wait() for _ in range(8))
    assert read == {100 + n: len(content) for n, content in enumerate(contents)}
    assert [b"".join(target) for target in targets] == contents
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("length", [0, 1, 511, 512, 4096, 5000])
def test_read_past_the_end_says_what_there_was(tmp_path: Path, engine: FileEngine, length: int) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 20)
    os.truncate(tmp_path / "file", length)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    engine.submit(1, fd, 0, [bytearray(700), bytearray(9000)], write=False)
    assert engine.wait() == (1, length)
    os.close(fd)


def test_failures_are_numbers(tmp_path: Path, engine: FileEngine) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    read_only = os.open(tmp_path / "file", os.O_RDONLY)
    engine.submit(1, read_only, 0, [b"x"], write=True)
    assert engine.wait() == (1, -errno.EBADF)
    folder = os.open(tmp_path, os.O_RDONLY)
    engine.submit(2, folder, 0, [bytearray(1)], write=False)
    assert engine.wait() == (2, -errno.EISDIR)
    if Path("/dev/full").exists():
        full = os.open("/dev/full", os.O_WRONLY)
        engine.submit(3, full, 0, [b"x" * 100], write=True)
        assert engine.wait() == (3, -errno.ENOSPC)
        os.close(full)
    os.close(read_only)
    os.close(folder)


def test_nothing_to_wait_for_is_named(engine: FileEngine) -> None:
    with pytest.raises(RuntimeError, match="nothing is under way"):
        engine.wait()


@needs_uring
def test_what_a_ring_refuses(tmp_path: Path) -> None:
    for depth in (0, 1025):
        with pytest.raises(ValueError, match=f"depth is {depth}; 1 to 1024 are accepted"):
            _native.Uring(depth)
    ring = _native.Uring(2)
    read, write = os.pipe()
    target = bytearray(4)
    with pytest.raises(ValueError, match="0 pieces"):
        ring.submit(1, read, 0, [], False)
    with pytest.raises(BufferError):
        ring.submit(1, read, 0, [b"fixed"], False)
    with pytest.raises(ValueError, match="contiguous ones"):
        ring.submit(1, read, 0, [memoryview(bytearray(8))[::2]], False)
    ring.submit(1, read, 0, [target], False)
    with pytest.raises(ValueError, match="tag 1 is under way already"):
        ring.submit(1, read, 0, [bytearray(4)], False)
    ring.submit(2, read, 0, [bytearray(4)], False)
    with pytest.raises(ValueError, match="2 transfers are under way; wait for one"):
        ring.submit(3, read, 0, [bytearray(4)], False)
    with pytest.raises(BufferError):  # the kernel writes there: nobody may move it
        target.extend(b"more")
    os.write(write, b"abcdefgh")
    done = dict(ring.wait() for _ in range(2))
    assert done == {1: 4, 2: 4}
    target.extend(b"more")
    ring.close()
    ring.close()
    with pytest.raises(RuntimeError, match="it is closed"):
        ring.submit(1, read, 0, [bytearray(1)], False)
    os.close(read)
    os.close(write)


@needs_uring
def test_closing_waits_for_what_is_under_way(tmp_path: Path) -> None:
    content = random.randbytes(8 << 20)
    for _ in range(5):
        ring = _native.Uring(4)
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        ring.submit(1, fd, 0, [content], True, True)
        ring.close()
        os.close(fd)
        assert (tmp_path / "file").read_bytes() == content
