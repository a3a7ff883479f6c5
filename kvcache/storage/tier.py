# SPDX-License-Identifier: Apache-2.0
"""The interface of a tier below host memory: a place that keeps whole objects by their key.

Calls are batched and asynchronous: each returns a future at once and never raises for what the place itself
does (it is down, full, slow or holds garbage); the future's answer says so for each object. A tier never
answers with a byte that it cannot vouch for: the checksum of an object is compared before `get` says `True`.
The storage manager (`kvcache.storage.manager`) decides what goes where; a tier only does it.

A third party's tier is a factory `(options, context) -> Tier` under an entry point of the group
`kvcache.tiers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from kvcache.memory.formats import KVShape
from kvcache.stats import TierStats
from kvcache.storage.changes import ChangeLog
from kvcache.tokens.keys import CacheEngineKey

ENTRY_POINT_GROUP = "kvcache.tiers"
ALIGNMENT = 4096
"""Of payloads in host memory and of their place in an object, as direct I/O wants it."""
NO_TENANT = bytes(16)
"""Of objects of requests without a `cache_salt`."""
NO_PARENT = bytes(16)
"""Of the first chunk of a chain."""


class StoredObject(NamedTuple):
    """One chunk on its way into a tier."""

    key: CacheEngineKey
    num_tokens: int
    payload: memoryview
    """Bytes of the chunk in host memory, read-only for the tier and unchanged until the future is done. It
    starts at a multiple of `ALIGNMENT`, and the memory goes on, readable, to the next multiple."""
    tenant: bytes = NO_TENANT
    """16 bytes: digest of the `cache_salt`."""
    parent: bytes = NO_PARENT
    """16 bytes: chunk hash of the chunk before this one in its chain."""


class WantedObject(NamedTuple):
    """One chunk to read."""

    key: CacheEngineKey
    target: memoryview
    """Writable, of exactly the payload's length as `head` said. It starts at a multiple of `ALIGNMENT`; the
    memory up to the next multiple after its end may be overwritten too. Undefined where the answer is
    `False`."""


class PutOutcome(Enum):
    STORED = auto()
    """Complete and durable as far as the tier is: after a crash it is there whole or not at all."""
    PRESENT = auto()
    """Was there already, or somebody else is writing it."""
    DECLINED = auto()
    """Not let in: by the admission policy, the tenant's quota, or for lack of room."""
    FAILED = auto()


class Health(NamedTuple):
    """Whether a tier serves now."""

    state: str
    """`Ready`, or the reason why not in CamelCase: `RemoteUnreachable`, `DiskReadOnly`, `DiskFull`."""
    detail: str = ""
    """One sentence: what was seen and what to do."""
    readable: bool = False
    """Not `Ready`, and yet what is there can be read: a disk that is full or read-only."""
    writable: bool = False
    """Not `Ready`, and yet it takes objects: one of several disks is lost."""

    @property
    def ready(self) -> bool:
        return self.state == "Ready"


@dataclass(frozen=True)
class ClearScope:
    """What to remove: objects for which all that is given holds. Everything, if nothing is given."""

    namespace: bytes | None = None
    tenant: bytes | None = None
    keys: Collection[CacheEngineKey] | None = None
    pinned_too: bool = False

    def covers(self, key: CacheEngineKey, tenant: bytes) -> bool:
        """Whether an object is in the scope, pinned or not."""
        return (
            (self.namespace is None or key.namespace == self.namespace)
            and (self.tenant is None or tenant == self.tenant)
            and (self.keys is None or key in self.keys)
        )


class Cleared(NamedTuple):
    """What was removed, and what was not."""

    objects: int
    num_bytes: int
    kept: int
    """Pinned, or being read: out of reach already, and gone when their readers end."""
    complete: bool = True
    """False: the tier could not be reached, or not all of it."""
    detail: str = ""


@dataclass(frozen=True)
class TierContext:
    """What a tier may know of the rank that it serves."""

    shape: KVShape
    """Of a chunk. Every object has `num_tokens * shape.token_bytes` bytes of payload."""
    namespace: bytes
    rank: int
    pinned: Callable[[CacheEngineKey], bool] = field(default=lambda key: False)
    """Objects that must not be evicted. Thread-safe."""
    quota: Callable[[bytes], int | None] = field(default=lambda tenant: None)
    """Bytes that a tenant's objects of this rank may take, None without a limit: for its own room a tenant
    that is over it gives up its own objects first, else its objects are declined. Thread-safe, and the
    answer may change."""
    encryption_key_file: str | None = None
    changes: ChangeLog | None = None
    """Where a tier with an index notes which objects of the rank it has from now on, and which no more."""


class Tier(ABC):
    """Thread-safe. `name` is its name in the configuration, in statistics and in flushes.

    Futures are completed by a thread that holds no lock of the tier: whoever waits may call the tier again.
    """

    name: str

    @abstractmethod
    def head(self, keys: Sequence[CacheEngineKey]) -> Future[list[int | None]]:
        """Bytes of payload of each object, None where it is not there or cannot be reached.

        A tier with an index of its own answers at once: its future is done when it is returned.
        """

    @abstractmethod
    def get(self, wanted: Sequence[WantedObject]) -> Future[list[bool]]:
        """Reads objects into host memory; True where the target holds the whole object, verified."""

    @abstractmethod
    def put(self, objects: Sequence[StoredObject]) -> Future[list[PutOutcome]]:
        """Writes objects, evicting others if need be."""

    @abstractmethod
    def remove(self, keys: Sequence[CacheEngineKey]) -> Future[int]:
        """Removes objects; the number of those that were there."""

    @abstractmethod
    def clear(self, scope: ClearScope) -> Future[Cleared]:
        """Removes all objects in the scope, also those that other processes wrote."""

    @abstractmethod
    def health(self) -> Health:
        """Without I/O."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Without I/O."""

    @abstractmethod
    def close(self) -> None:
        """Ends threads and connections. Futures that are not done are done afterwards, in whatever way."""


TierFactory = Callable[[dict[str, object], TierContext], Tier]
