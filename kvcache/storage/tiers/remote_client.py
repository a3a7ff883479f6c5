# SPDX-License-Identifier: Apache-2.0
"""What a remote tier needs of a client of some store, and the names that objects have in all of them.

A client is synchronous and called by several threads at a time. It knows nothing of keys, checksums or
breakers: it moves named objects, each one a header of `HEADER_BYTES` and a payload, and says what went wrong.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import Buffer

from kvcache.storage.object_format import HEADER_BYTES
from kvcache.storage.tier import PutOutcome
from kvcache.tokens.keys import CacheEngineKey

UNREACHABLE = "RemoteUnreachable"
SLOW = "RemoteSlow"
DENIED = "RemoteDenied"
FAILED = "RemoteFailed"
CORRUPT = "RemoteCorrupt"
CONNECTING = "RemoteConnecting"


class RemoteError(Exception):
    """The store did not do what it was asked.

    Args:
        reason: one of the above.
        detail: one sentence: which store, what was seen, what to do.
        missed: it took all the time that it was given and nothing came.
    """

    def __init__(self, reason: str, detail: str, *, missed: bool = False) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.missed = missed


class DeadlineError(RemoteError):
    """The deadline passed during a transfer. Whether the store is to blame depends on what came before it."""

    def __init__(self, detail: str) -> None:
        super().__init__(SLOW, detail, missed=True)


class RefusedError(RemoteError):
    """The store answered that it does not do it: it serves, and may do something else."""

    def __init__(self, detail: str) -> None:
        super().__init__(FAILED, detail)


class Expired(Exception):  # noqa: N818 -- no error: nobody waits any more
    """The target of a read was given back to its owner."""


class Read:
    """An object to read, and the memory that it goes to until nobody waits for it any more."""

    def __init__(self, index: int, name: str, target: memoryview) -> None:
        self.index = index
        self.name = name
        self.header = memoryview(bytearray(HEADER_BYTES))
        self.target = target
        self._lock = threading.Lock()
        self._open = True

    @property
    def num_bytes(self) -> int:
        """Of the whole object."""
        return HEADER_BYTES + self.target.nbytes

    def __enter__(self) -> None:
        """The target may be written inside; hold it briefly, or for a receive that ends by the deadline.

        Raises:
            Expired: it belongs to somebody else by now.
        """
        self._lock.acquire()
        if not self._open:
            self._lock.release()
            raise Expired

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def close(self) -> None:
        """Returns when the target is not written any more."""
        with self._lock:
            self._open = False

    def fill(self, position: int, data: Buffer) -> int:
        """Copies a piece of the object that begins at byte `position` of it; the position behind it.

        Raises:
            Expired: as for `with`.
            ValueError: the object is longer than it should be.
        """
        piece = memoryview(data).cast("B")
        end = position + piece.nbytes
        if end > self.num_bytes:
            raise ValueError(f"{self.name}: {end} bytes came where {self.num_bytes} are")
        in_header = piece[: max(0, HEADER_BYTES - position)]
        with self:
            self.header[position : position + in_header.nbytes] = in_header
            start = max(0, position - HEADER_BYTES)
            self.target[start : start + piece.nbytes - in_header.nbytes] = piece[in_header.nbytes :]
        return end


@dataclass(frozen=True, slots=True)
class Write:
    """An object to write."""

    index: int
    name: str
    header: bytes
    payload: memoryview

    @property
    def num_bytes(self) -> int:
        return len(self.header) + self.payload.nbytes


class Load(NamedTuple):
    """How a batch is spread over the connections."""

    objects_each: int
    """Objects that come to one connection, rounded up."""
    connections_each: int
    """Connections that one object may use, where there are fewer objects than connections."""


class Listed(NamedTuple):
    """An object that is there."""

    name: str
    num_bytes: int


class RemoteClient(ABC):
    """One store. Methods raise `RemoteError`, and take no longer than until `due` (of `time.monotonic`) by
    more than what the operating system needs to give up; what they yield or return is true.

    A store may have several places that fail one by one (nodes of a cluster).
    """

    where: str
    """For texts: `valkey 10.0.0.7:6379`."""
    when_full: str
    """For texts: what helps where the store has no room."""

    @abstractmethod
    def place_of(self, name: str) -> str:
        """Where an object lives, as far as is known. Without I/O."""

    @abstractmethod
    def places(self) -> Sequence[str]:
        """All of them that are known, at least one. Without I/O."""

    @abstractmethod
    def ping(self, place: str, due: float) -> None:
        """Returns when the place answered."""

    @abstractmethod
    def sizes(self, place: str, names: Sequence[str], due: float) -> list[int | None]:
        """Bytes of each whole object, None where there is none."""

    @abstractmethod
    def read(
        self, place: str, source: Iterator[Read], due: float, load: Load
    ) -> Generator[tuple[Read, bool], None, None]:
        """Takes reads from the source, which others empty too, and gives each back when it was read; False
        where no object of that size is there.
        """

    @abstractmethod
    def write(
        self, place: str, source: Iterator[Write], time_s: float
    ) -> Generator[tuple[Write, PutOutcome], None, None]:
        """Writes what is not there yet, each whole or not at all, and in `time_s` at most."""

    @abstractmethod
    def remove(self, place: str, names: Sequence[str], due: float) -> int:
        """The number of those that were there."""

    @abstractmethod
    def pages(self, place: str, namespace: str | None, step_s: float) -> Iterator[list[Listed]]:
        """All objects of a place, or of one namespace (hex); each page comes within `step_s`."""

    @abstractmethod
    def headers(self, place: str, names: Sequence[str], due: float) -> list[bytes | None]:
        """The first `HEADER_BYTES` of each object, None where there is none."""

    @abstractmethod
    def close(self) -> None:
        """Ends connections, also those in use."""

    def set_time(self, time_s: float) -> None:  # noqa: B027 -- most take each call's own
        """The longest that one request takes from now on, where the store's own client has to know."""

    def release(self) -> None:  # noqa: B027 -- most have nothing left
        """After `close`, when no thread is in a call any more."""


def name_of(key: CacheEngineKey) -> str:
    """`NAMESPACE/CHUNKHASH-RANK-GROUP`, the digests in hex."""
    return f"{key.namespace.hex()}/{key.chunk_hash.hex()}-{key.rank}-{key.kv_group}"


def key_of(name: str) -> CacheEngineKey | None:
    """The key in a name; None if it is no object's."""
    match = _NAME.fullmatch(name)
    if match is None or max(int(match[3]), int(match[4])) > 0xFFFF:
        return None
    return CacheEngineKey(bytes.fromhex(match[2]), bytes.fromhex(match[1]), int(match[3]), int(match[4]))


_NAME = re.compile(r"([0-9a-f]{32})/([0-9a-f]{32})-(0|[1-9][0-9]{0,4})-(0|[1-9][0-9]{0,4})")
