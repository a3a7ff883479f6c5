# SPDX-License-Identifier: Apache-2.0
"""The interfaces of the policies: what leaves first, and what is let in. They own no memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """Which key leaves first. Called under the tier's lock.

    Args:
        capacity: objects that the tier has room for, about: what a policy's own lists are measured by.
    """

    @abstractmethod
    def __init__(self, capacity: int) -> None: ...

    @abstractmethod
    def admit(self, key: K) -> None:
        """An object became visible under `key`, which was not there."""

    @abstractmethod
    def touch(self, key: K) -> None:
        """The object was asked for."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """The object is gone, in whatever way but by `victim`."""

    @abstractmethod
    def victim(self, evictable: Callable[[K], bool]) -> K | None:
        """Takes out the key that leaves now; None if none may.

        Args:
            evictable: False for an object that is being read, is pinned, or has others behind it.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Keys that are there."""


class AdmissionPolicy(ABC, Generic[K]):
    """Which key is let in at all. Called under the tier's lock.

    Args:
        capacity: as for the eviction policy.
    """

    @abstractmethod
    def __init__(self, capacity: int) -> None: ...

    @abstractmethod
    def seen(self, key: K) -> None:
        """Somebody asked for the object, or had it to store, whether it is there or not."""

    @abstractmethod
    def admits(self, key: K, victim: K | None) -> bool:
        """Whether to let the key in.

        Args:
            victim: what would have to leave for it; None while there is room.
        """
