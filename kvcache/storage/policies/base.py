# SPDX-License-Identifier: Apache-2.0
"""The interfaces of the policies: what leaves first, and what is let in. They own no memory.

What a tier tells them, under its lock:

- A request finds an object: `admission.seen`, then `eviction.touch`. Of a chain the end first and the start
  last, so that the start counts as used last and leaves last.
- A request computes an object and offers it: `admission.seen`, then `eviction.candidate` if the tier is full,
  then `admission.admits`, then `eviction.evict` of the candidate, and `eviction.admit` when the object is
  visible.
- An object goes in another way: `eviction.remove`.
- An object loses the last one behind it: `eviction.became_leaf`.

So each use of an object is told once, whether the object is there or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """Which key leaves first. Called under the tier's lock. Every call takes constant time, averaged over
    many.

    Args:
        capacity: objects that the tier has room for, about: what a policy's own lists are measured by. What a
            policy remembers of objects that are gone is bounded by a multiple of it.
    """

    @abstractmethod
    def __init__(self, capacity: int) -> None: ...

    @abstractmethod
    def admit(self, key: K) -> None:
        """An object became visible under `key`, which was not there."""

    @abstractmethod
    def touch(self, key: K) -> None:
        """The object was asked for."""

    def touch_all(self, keys: Iterable[K]) -> None:
        """As `touch` of each key, in their order."""
        for key in keys:
            self.touch(key)

    @abstractmethod
    def remove(self, key: K) -> None:
        """The object is gone, but not to make room. Nothing is remembered of it."""

    @abstractmethod
    def candidate(self, evictable: Callable[[K], bool]) -> K | None:
        """The key to leave next; None if none may. It stays until `evict`.

        Args:
            evictable: False for an object that is being read, is pinned, or has others behind it.
        """

    @abstractmethod
    def evict(self, key: K) -> None:
        """The candidate is gone, to make room."""

    def victim(self, evictable: Callable[[K], bool]) -> K | None:
        """Takes out the key that leaves now; None if none may. As `candidate` and `evict`."""
        key = self.candidate(evictable)
        if key is not None:
            self.evict(key)
        return key

    @abstractmethod
    def became_leaf(self, key: K) -> None:
        """Nothing is behind the object any more, which may have been passed over for that reason. A tier that
        does not say so has its victims in a less exact order. Keys that are not there are ignored."""

    @abstractmethod
    def __len__(self) -> int:
        """Keys that are there."""


class AdmissionPolicy(ABC, Generic[K]):
    """Which key is let in at all. Called under the tier's lock, in constant time as above.

    Args:
        capacity: as for the eviction policy.
    """

    @abstractmethod
    def __init__(self, capacity: int) -> None: ...

    @abstractmethod
    def seen(self, key: K) -> None:
        """A request used the object: found it, or computed it. Once a request, and before `admits`."""

    def seen_all(self, keys: Iterable[K]) -> None:
        """As `seen` of each key, in their order."""
        for key in keys:
            self.seen(key)

    @abstractmethod
    def admits(self, key: K, victim: K | None) -> bool:
        """Whether to let the key in.

        Args:
            victim: what would have to leave for it; None while there is room.
        """
