# SPDX-License-Identifier: Apache-2.0
"""Leases: who may read which stored chunks, and until when.

A lease names its owner, covers entries, and ends exactly once: by its owner (`end`), or when its time is up
(`expire`), which only happens to owners that were never heard of again. While an entry is leased it is
neither evicted nor is its memory reused. A lease holds the entry itself, not its key, so that a reader never
meets other bytes than those that its lookup found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
E = TypeVar("E")


@dataclass
class _Lease(Generic[K, E]):
    deadline: float
    entries: dict[K, E] = field(default_factory=dict)


class LeaseBook(Generic[K, E]):
    """Leases by owner. Not thread-safe: the tier that owns it holds its lock.

    Args:
        on_end: called with each entry whose last lease has ended.
        timeout_s: life of a lease from its last `take`.
        clock: seconds, monotonic.
    """

    def __init__(self, on_end: Callable[[K, E], None], timeout_s: float, clock: Callable[[], float]) -> None:
        self._on_end = on_end
        self._timeout_s = timeout_s
        self._clock = clock
        self._leases: dict[str, _Lease[K, E]] = {}
        self._holders: dict[int, int] = {}

    def take(self, owner: str, entries: Iterable[tuple[K, E]]) -> None:
        """Adds entries to the owner's lease and renews it. An entry that it holds already counts once."""
        lease = self._leases.setdefault(owner, _Lease(0.0))
        lease.deadline = max(lease.deadline, self._clock() + self._timeout_s)
        for key, entry in entries:
            held = lease.entries.get(key)
            if held is entry:
                continue
            if held is not None:
                self._drop([(key, held)])
            lease.entries[key] = entry
            self._holders[id(entry)] = self._holders.get(id(entry), 0) + 1

    def get(self, owner: str, key: K) -> E | None:
        """The entry that the owner's lease holds under `key`."""
        lease = self._leases.get(owner)
        return None if lease is None else lease.entries.get(key)

    def prefix(self, owner: str, keys: Iterable[K]) -> list[E]:
        """The entries under these keys, up to the first that the owner's lease does not hold."""
        lease = self._leases.get(owner)
        found: list[E] = []
        if lease is not None:
            for entry in map(lease.entries.get, keys):
                if entry is None:
                    break
                found.append(entry)
        return found

    def hand_over(self, owner: str, to: str) -> None:
        """The owner's lease, if any, is that of `to`, which had none, from now on. It has no deadline then:
        `to` is at work, and ends it.
        """
        lease = self._leases.pop(owner) if owner in self._leases else _Lease(0.0)
        lease.deadline = math.inf
        self._leases[to] = lease

    def held(self, entry: E) -> bool:
        return id(entry) in self._holders

    def end(self, owner: str) -> int:
        """Ends the owner's lease; the number of entries it held. An owner without one holds none."""
        lease = self._leases.pop(owner, None)
        if lease is None:
            return 0
        self._drop(lease.entries.items())
        return len(lease.entries)

    def end_where(self, ended: Callable[[str], bool]) -> int:
        """Ends the leases of all owners that `ended` says so of; their number."""
        owners = [owner for owner in self._leases if ended(owner)]
        for owner in owners:
            self.end(owner)
        return len(owners)

    def expire(self) -> list[str]:
        """Ends leases whose time is up; their owners."""
        now = self._clock()
        owners = [owner for owner, lease in self._leases.items() if lease.deadline <= now]
        for owner in owners:
            self.end(owner)
        return owners

    def __len__(self) -> int:
        """Entries under a lease now."""
        return len(self._holders)

    def _drop(self, entries: Iterable[tuple[K, E]]) -> None:
        holders = self._holders
        for key, entry in entries:
            left = holders[id(entry)] - 1
            if left:
                holders[id(entry)] = left
            else:
                del holders[id(entry)]
                self._on_end(key, entry)
