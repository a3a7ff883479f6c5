# SPDX-License-Identifier: Apache-2.0
"""The tier in Valkey or Redis: one string a chunk, under `kvcache:NAMESPACE/CHUNKHASH-RANK-GROUP`.

Values are whole objects (`kvcache.storage.object_format`), written by `SET ... NX`: what is there is not
written again, and nobody sees half a value. What leaves when memory is short is the server's decision: set
`maxmemory`, and `maxmemory-policy allkeys-lru` or `allkeys-lfu` (`noeviction`, its default, makes it refuse
new objects). `ttl_s` lets each object expire so long after it was written.

Commands used, for an ACL: `+get +set +strlen +getrange +unlink +scan +ping +select +client|setname`, and
`+cluster|slots` in a cluster, on the keys `~kvcache:*`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

from valkey.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    ValkeyError,
)
from valkey.exceptions import ConnectionError as ValkeyConnectionError
from valkey.exceptions import TimeoutError as ValkeyTimeoutError

from kvcache.config.tiers import RemoteTierConfig, ValkeyConfig
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
    RemoteClient,
    RemoteError,
    Write,
)
from kvcache.storage.tiers.valkey_routes import Routes, make_routes
from kvcache.storage.tiers.valkey_wire import ELSEWHERE, Reply, Wire, packed

PREFIX = b"kvcache:"
MAX_VALUE_BYTES = 512 << 20
"""`proto-max-bulk-len` of a server that was not told otherwise."""
WINDOW_BYTES = 256 << 10
"""Under way on a connection, unless one or two objects are more: what 10 Gbit/s carry in 0.2 ms. More would
put later objects before earlier ones of the other connections."""
WINDOW_OBJECTS = 64
BATCH = 512
"""Short commands in a row."""


class ValkeyClient(RemoteClient):
    """A server, the master of some sentinels, or a cluster.

    Args:
        config: of the connection.
        connect_s: for a connection to be made.
        ttl_s: of an object, from its writing on; None: until the server evicts it.
    """

    when_full = "set maxmemory-policy to allkeys-lru or allkeys-lfu, or maxmemory to more"

    def __init__(self, config: ValkeyConfig, connect_s: float, ttl_s: int | None = None) -> None:
        self.where = f"valkey {', '.join(config.endpoints)}"
        self._connect_s = connect_s
        self._routes: Routes = make_routes(config, connect_s)
        words = (b"NX",) if ttl_s is None else (b"NX", b"EX", b"%d" % ttl_s)
        self._after_value = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
        self._set_words = 3 + len(words)

    def place_of(self, name: str) -> str:
        return self._routes.place_of(_key(name))

    def places(self) -> Sequence[str]:
        return self._routes.places()

    def ping(self, place: str, due: float) -> None:
        with self._errors(place):
            self._routes.refresh(due)
        if place in self._routes.places():
            with self._wire(place, due) as wire:
                wire.checked(wire.ask([(b"PING",)])[0])

    def sizes(self, place: str, names: Sequence[str], due: float) -> list[int | None]:
        replies = self._ask(place, [(b"STRLEN", _key(name)) for name in names], due)
        return [reply if isinstance(reply, int) and reply > 0 else None for reply in replies]

    def read(
        self, place: str, source: Iterator[Read], due: float, load: Load
    ) -> Generator[tuple[Read, bool], None, None]:
        waiting: deque[Read] = deque()
        with self._wire(place, due) as wire:
            while True:
                requests = []
                while _room(waiting, load) and (read := next(source, None)) is not None:
                    requests.append(packed(b"GET", _key(read.name)))
                    waiting.append(read)
                if requests:
                    wire.send(b"".join(requests))
                if not waiting:
                    break
                found = wire.checked(wire.reply_into(waiting[0])) is True
                yield waiting.popleft(), found

    def write(
        self, place: str, source: Iterator[Write], time_s: float
    ) -> Generator[tuple[Write, PutOutcome], None, None]:
        write = next(source, None)
        if write is None:
            return
        waiting: deque[Write] = deque()
        with self._wire(place, time.monotonic() + time_s) as wire:
            while write is not None or waiting:
                if write is not None and write.num_bytes > MAX_VALUE_BYTES:
                    yield write, PutOutcome.DECLINED
                    write = next(source, None)
                elif write is not None and _room(waiting, _ALL):
                    wire.due = time.monotonic() + time_s
                    wire.send(self._before_value(write) + write.header, write.payload, self._after_value)
                    waiting.append(write)
                    write = next(source, None)
                else:
                    outcome = _outcome(wire)
                    yield waiting.popleft(), outcome

    def remove(self, place: str, names: Sequence[str], due: float) -> int:
        replies = self._ask(place, [(b"UNLINK", _key(name)) for name in names], due)
        return sum(reply for reply in replies if isinstance(reply, int))

    def pages(self, place: str, namespace: str | None, step_s: float) -> Iterator[list[Listed]]:
        pattern = PREFIX + (b"" if namespace is None else namespace.encode() + b"/") + b"*"
        cursor = b"0"
        while True:
            command = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % BATCH)
            reply = self._ask(place, [command], time.monotonic() + step_s)[0]
            if not isinstance(reply, list) or len(reply) != 2:
                raise RemoteError(FAILED, f"{self.where}: SCAN was answered with {reply!r:.80}")
            cursor, keys = reply
            names = [key.removeprefix(PREFIX).decode("ascii", "replace") for key in keys]
            sizes = self.sizes(place, names, time.monotonic() + step_s)
            yield [Listed(name, size) for name, size in zip(names, sizes, strict=True) if size is not None]
            if cursor == b"0":
                return

    def headers(self, place: str, names: Sequence[str], due: float) -> list[bytes | None]:
        commands = [(b"GETRANGE", _key(name), b"0", b"%d" % (HEADER_BYTES - 1)) for name in names]
        replies = self._ask(place, commands, due)
        return [reply if isinstance(reply, bytes) and reply else None for reply in replies]

    def close(self) -> None:
        self._routes.close()

    def _before_value(self, write: Write) -> bytes:
        key = _key(write.name)
        head = (self._set_words, len(key), key, write.num_bytes)
        return b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % head

    def _ask(self, place: str, commands: Sequence[Sequence[bytes]], due: float) -> list[Reply]:
        """Answers to short commands, None where a key has no string or is elsewhere."""
        replies: list[Reply] = []
        with self._wire(place, due) as wire:
            for start in range(0, len(commands), BATCH):
                replies += wire.ask(commands[start : start + BATCH])
            return [None if _wrong_type(reply) else wire.checked(reply) for reply in replies]

    @contextmanager
    def _wire(self, place: str, due: float) -> Iterator[Wire]:
        """A connection to a place, given back when all that was asked was answered, else ended."""
        with self._errors(place):
            pool = self._routes.pool(place, due)
            connection = pool.get_connection("")
        done = False
        try:
            wire = Wire(connection, due)
            with self._errors(place, transfer=True):
                yield wire
            done = True
        finally:
            if not done:
                connection.disconnect()
            pool.release(connection)
        if wire.moved:
            with self._errors(place):
                self._routes.refresh(time.monotonic() + self._connect_s)

    @contextmanager
    def _errors(self, place: str, *, transfer: bool = False) -> Iterator[None]:
        """Makes `RemoteError` of what the client raises."""
        try:
            yield
        except (ValkeyTimeoutError, TimeoutError) as error:
            self._routes.lost(place)
            if transfer:
                raise DeadlineError(f"{self.where} did not answer in time; look at its load") from error
            text = f"{self.where} takes no connection in time; look at the address, its load and the network"
            raise RemoteError(UNREACHABLE, text, missed=True) from error
        except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
            text = f"{self.where} does not let us in: {error}; look at username, password_file and the ACL"
            raise RemoteError(DENIED, text) from error
        except (BusyLoadingError, ReadOnlyError) as error:
            self._routes.lost(place)
            raise RemoteError(FAILED, f"{self.where} cannot serve now: {error}") from error
        except (ValkeyConnectionError, OSError) as error:
            self._routes.lost(place)
            raise RemoteError(UNREACHABLE, f"{self.where}: {error}; is it running there?") from error
        except ValkeyError as error:
            raise RemoteError(FAILED, f"{self.where}: {error}") from error


def open_valkey(config: RemoteTierConfig, context: TierContext) -> RemoteTier:
    """The tier of a configuration that has `valkey`. Waits for the server's first answer, one deadline at
    most; where none comes the tier is there all the same, and asks again.

    Raises:
        ValueError: the configuration has no `valkey`, or the file of encryption keys is no good.
    """
    if config.valkey is None:
        raise ValueError("open_valkey: the configuration has no valkey; open what it has")
    deadline_s = config.deadline_ms / 1000
    client = ValkeyClient(config.valkey, deadline_s, config.ttl_s)
    return RemoteTier(
        "remote",
        client,
        context,
        deadline_s=deadline_s,
        connections=config.connections,
        write_queue_bytes=config.write_queue,
    )


_ALL = Load(WINDOW_OBJECTS, 1)


def _room(waiting: Sequence[Read | Write], load: Load) -> bool:
    """Whether one more may be under way on a connection."""
    if len(waiting) < min(2, load.objects_each):
        return True
    bytes_under_way = sum(item.num_bytes for item in waiting)
    return len(waiting) < min(WINDOW_OBJECTS, load.objects_each) and bytes_under_way < WINDOW_BYTES


def _key(name: str) -> bytes:
    return PREFIX + name.encode()


def _outcome(wire: Wire) -> PutOutcome:
    """Of the next SET."""
    reply = wire.reply()
    if isinstance(reply, OutOfMemoryError):
        return PutOutcome.DECLINED
    if wire.checked(reply) is not None:
        return PutOutcome.STORED
    return PutOutcome.FAILED if isinstance(reply, ELSEWHERE) else PutOutcome.PRESENT


def _wrong_type(reply: Reply) -> bool:
    return isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE")
