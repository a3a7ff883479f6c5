# SPDX-License-Identifier: Apache-2.0
"""The tier in an S3 bucket: one object a chunk, `PREFIX/NAMESPACE/CHUNKHASH-RANK-GROUP`.

The client is `obstore`, whose requests run in native threads without the interpreter's lock. Objects are
whole ones (`kvcache.storage.object_format`), put on condition that there is none (`If-None-Match: *`; a store
that does not know it gets them unconditionally, since a put is whole or not at all anyway). Permissions:
`s3:GetObject`, `s3:PutObject`, `s3:DeleteObject` on the objects and `s3:ListBucket` on the bucket, without
which a missing object looks forbidden.

Objects stay until somebody removes them: give the bucket a lifecycle rule that lets those under the prefix
expire, and one that ends unfinished multipart uploads. `ttl_s` has no meaning here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import S3Store
from typing_extensions import Buffer

from kvcache.config.tiers import RemoteTierConfig, S3Config
from kvcache.storage.object_format import HEADER_BYTES
from kvcache.storage.tier import PutOutcome, TierContext
from kvcache.storage.tiers.remote import RemoteTier
from kvcache.storage.tiers.remote_client import (
    DENIED,
    FAILED,
    UNREACHABLE,
    DeadlineError,
    Listed,
    Load,
    Read,
    RefusedError,
    RemoteClient,
    RemoteError,
    Write,
)
from kvcache.storage.tiers.s3_credentials import credentials_file

if TYPE_CHECKING:
    from obstore.store import ClientConfig
    from obstore.store import S3Config as StoreConfig

logger = logging.getLogger("vllm.kvcache")

PIECE_BYTES = 1 << 20
"""Of an answer, copied at a time."""
RANGE_BYTES = 8 << 20
"""An object is read in several ranges at once where each has at least so much and connections are free: one
connection to AWS carries some 100 MB/s."""
MULTIPART_FROM_BYTES = 64 << 20
"""Larger objects are sent in parts at once: by one connection they would miss a deadline of a second."""
PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4
QUESTIONS_AT_ONCE = 32
PAGE = 500

T = TypeVar("T")


class S3Client(RemoteClient):
    """A bucket.

    Args:
        config: of the bucket.
        time_s: for one request.
        connections: that the ranges of objects may use.

    Raises:
        ValueError: `ca_file` cannot be read, or the client refuses a setting.
    """

    when_full = "give the store more room, or let objects expire by a lifecycle rule"

    def __init__(self, config: S3Config, time_s: float, connections: int = 4) -> None:
        self._place = config.endpoint or "AWS"
        self.where = f"s3 bucket {config.bucket} at {self._place}"
        self._prefix = config.prefix.strip("/")
        self._time_s = time_s
        self._config = config
        self._conditional = True
        self._refused = False
        self._store = make_store(config, time_s)
        self._ranges = ThreadPoolExecutor(connections, "remote-range")

    def place_of(self, name: str) -> str:
        return self._place

    def places(self) -> Sequence[str]:
        return (self._place,)

    def ping(self, place: str, due: float) -> None:
        async def ask() -> None:
            # Unlike HEAD, the answer tells a missing bucket from a missing object.
            try:
                await obstore.get_range_async(self._store, self._path(".ping"), start=0, length=1)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise RemoteError(FAILED, f"{self.where}: there is no such bucket; make it") from None

        self._run(ask, due)

    def sizes(self, place: str, names: Sequence[str], due: float) -> list[int | None]:
        async def size(path: str) -> int:
            return (await obstore.head_async(self._store, path))["size"]

        return self._each(size, names, due)

    def read(
        self, place: str, source: Iterator[Read], due: float, load: Load
    ) -> Generator[tuple[Read, bool], None, None]:
        for read in source:
            with self._errors(due):
                try:
                    ranges = min(load.connections_each, read.num_bytes // RANGE_BYTES)
                    found = self._read_ranges(read, ranges) if ranges > 1 else self._read_whole(read, due)
                except FileNotFoundError:
                    found = False
            yield read, found

    def write(
        self, place: str, source: Iterator[Write], time_s: float
    ) -> Generator[tuple[Write, PutOutcome], None, None]:
        for write in source:
            try:
                with self._errors(time.monotonic() + time_s):
                    outcome = self._write(write)
            except RefusedError as error:
                # Full, say: S3 has no word for it. What is there can be read.
                outcome = PutOutcome.FAILED
                if not self._refused:
                    self._refused = True
                    logger.warning("KV cache: %s; %s", error.detail, self.when_full)
            yield write, outcome

    def remove(self, place: str, names: Sequence[str], due: float) -> int:
        sizes = self.sizes(place, names, due)  # S3 does not say what was there
        there = [self._path(name) for name, size in zip(names, sizes, strict=True) if size is not None]
        if there:
            self._run(lambda: obstore.delete_async(self._store, there), due)
        return len(there)

    def pages(self, place: str, namespace: str | None, step_s: float) -> Iterator[list[Listed]]:
        stream = iter(obstore.list(self._store, prefix=self._path(namespace or ""), chunk_size=PAGE))
        start = len(self._path(""))
        while True:
            with self._errors(time.monotonic() + step_s):
                page = next(stream, None)
            if page is None:
                return
            yield [Listed(entry["path"][start:], entry["size"]) for entry in page]

    def headers(self, place: str, names: Sequence[str], due: float) -> list[bytes | None]:
        async def header(path: str) -> bytes:
            return bytes(await obstore.get_range_async(self._store, path, start=0, length=HEADER_BYTES))

        return self._each(header, names, due)

    def set_time(self, time_s: float) -> None:
        self._store = make_store(self._config, time_s)
        self._time_s = time_s

    def close(self) -> None:
        """Requests end by their own time."""
        self._ranges.shutdown(wait=False, cancel_futures=True)

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _read_whole(self, read: Read, due: float) -> bool:
        answer = obstore.get(self._store, self._path(read.name))
        if answer.meta["size"] != read.num_bytes:
            return False
        position = 0
        for piece in answer.stream(min_chunk_size=PIECE_BYTES):
            if time.monotonic() > due:
                raise DeadlineError(f"{self.where} did not give an object in time")
            position = read.fill(position, piece)
        return position == read.num_bytes

    def _read_ranges(self, read: Read, count: int) -> bool:
        length = -(-read.num_bytes // count)

        def fetch(start: int) -> bool:
            end = min(start + length, read.num_bytes)
            answer = obstore.get(self._store, self._path(read.name), options={"range": (start, end)})
            if answer.meta["size"] != read.num_bytes:
                return False
            position = start
            for piece in answer.stream(min_chunk_size=PIECE_BYTES):
                position = read.fill(position, piece)
            return position == end

        # In threads: the client's asynchronous calls hand out large answers a hundred times as slowly.
        return all(self._ranges.map(fetch, range(0, read.num_bytes, length)))

    def _write(self, write: Write) -> PutOutcome:
        path = self._path(write.name)
        pieces: list[Buffer] = [write.header, write.payload]
        if write.num_bytes >= MULTIPART_FROM_BYTES:
            obstore.put(
                self._store,
                path,
                pieces,
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_AT_ONCE,
            )
            return PutOutcome.STORED
        if self._conditional:
            try:
                obstore.put(self._store, path, pieces, mode="create", use_multipart=False)
                return PutOutcome.STORED
            except AlreadyExistsError:
                return PutOutcome.PRESENT
            except (NotSupportedError, BaseError) as error:
                if not _unconditional(error):
                    raise
                self._conditional = False
                logger.warning("KV cache: %s knows no conditional put; objects are put without", self.where)
        obstore.put(self._store, path, pieces, use_multipart=False)
        return PutOutcome.STORED

    def _each(self, ask: Callable[[str], Awaitable[T]], names: Sequence[str], due: float) -> list[T | None]:
        """One answer for each name, None where there is no object."""

        async def one(gate: asyncio.Semaphore, name: str) -> T | None:
            async with gate:
                try:
                    return await ask(self._path(name))
                except FileNotFoundError:
                    return None

        async def every() -> list[T | None]:
            gate = asyncio.Semaphore(QUESTIONS_AT_ONCE)
            return await asyncio.gather(*(one(gate, name) for name in names))

        return self._run(every, due)

    def _run(self, work: Callable[[], Awaitable[T]], due: float) -> T:
        async def timed() -> T:
            async with asyncio.timeout(due - time.monotonic()):
                return await work()

        with self._errors(due):
            return asyncio.run(timed())

    @contextmanager
    def _errors(self, due: float) -> Iterator[None]:
        """Makes `RemoteError` of what the client raises."""
        started = time.monotonic()
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as error:
            text = f"{self.where} does not let us in: {_short(error)}; look at the credentials and the policy"
            raise RemoteError(DENIED, text) from error
        except (BaseError, TimeoutError) as error:
            now = time.monotonic()
            if isinstance(error, TimeoutError) or now >= min(due, started + 0.95 * self._time_s):
                raise DeadlineError(f"{self.where} did not answer in time; look at its load") from error
            text = str(error)
            if " 401 " in text or " 403 " in text:
                raise RemoteError(DENIED, f"{self.where} does not let us in: {_short(error)}") from error
            if "status code" in text:
                raise RefusedError(f"{self.where}: {_short(error)}") from error
            raise RemoteError(UNREACHABLE, f"{self.where}: {_short(error)}; is it running there?") from error
        except (ValueError, RuntimeError) as error:  # too long an answer, the file of credentials, closed
            raise RemoteError(FAILED, f"{self.where}: {_short(error)}") from error


def open_s3(config: RemoteTierConfig, context: TierContext) -> RemoteTier:
    """The tier of a configuration that has `s3`. Waits for the store's first answer, one deadline at most;
    where none comes the tier is there all the same, and asks again.

    Raises:
        ValueError: the configuration has no `s3`, its `ca_file` cannot be read, or the file of encryption
            keys is no good.
    """
    if config.s3 is None:
        raise ValueError("open_s3: the configuration has no s3; open what it has")
    deadline_s = config.deadline_ms / 1000
    return RemoteTier(
        "remote",
        S3Client(config.s3, deadline_s, config.connections),
        context,
        deadline_s=deadline_s,
        connections=config.connections,
        write_queue_bytes=config.write_queue,
    )


def make_store(config: S3Config, time_s: float) -> S3Store:
    """The client's store for a bucket; `time_s`: for each request. Raises ValueError: a setting is wrong."""
    limit = timedelta(seconds=time_s)
    client: ClientConfig = {"timeout": limit, "connect_timeout": limit}
    if config.ca_file is not None:
        try:
            client["root_certificate"] = Path(config.ca_file).read_bytes()
        except OSError as error:
            raise ValueError(
                f"s3.ca_file: {config.ca_file} cannot be read ({error.strerror}); mount it"
            ) from None
    virtual = config.addressing == "Virtual" or (config.addressing == "Auto" and config.endpoint is None)
    settings: StoreConfig = {"virtual_hosted_style_request": virtual, "unsigned_payload": True}
    if config.endpoint is not None:
        parts = urlsplit(config.endpoint)
        client["allow_http"] = parts.scheme == "http"
        # The client wants the bucket in it where the host names the bucket.
        settings["endpoint"] = (
            f"{parts.scheme}://{config.bucket}.{parts.netloc}" if virtual else config.endpoint
        )
    if config.region is not None:
        settings["region"] = config.region
    credentials = credentials_file()
    more: dict[str, Any] = {} if credentials is None else {"credential_provider": credentials}
    try:
        return S3Store(
            config.bucket,
            config=settings,
            client_options=client,
            # Once more within the deadline: a connection from the pool may have been closed meanwhile.
            retry_config={"max_retries": 1, "retry_timeout": limit, "backoff": {"init_backoff": _BACKOFF}},
            **more,
        )
    except BaseError as error:
        raise ValueError(f"s3: {_short(error)}") from error


_BACKOFF = timedelta(milliseconds=20)


def _unconditional(error: Exception) -> bool:
    """Whether a store says that it knows no `If-None-Match`."""
    return isinstance(error, NotSupportedError) or " 501 " in str(error) or "NotImplemented" in str(error)


def _short(error: Exception) -> str:
    """The first lines of an error, which goes on with the client's own state."""
    return " ".join(str(error).partition("Debug source")[0].split())[:300]
