# SPDX-License-Identifier: Apache-2.0
"""Pins: chunks that stay although nobody reads them, until their owner lets go of them.

A pin names keys, not objects: what is not stored yet stays once it is. Pins live as long as the process.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from kvcache.tokens.keys import CacheEngineKey


class PinRefusedError(ValueError):
    """A pin would take more than it may. Nothing was pinned."""


class Pin(NamedTuple):
    owner: str
    chunks: int


class PinBook:
    """Pinned keys by owner. Thread-safe.

    Args:
        most_chunks: how many different keys may be pinned now: a tier that is full of pinned chunks would be
            of no use to anybody else.
    """

    def __init__(self, most_chunks: Callable[[], int]) -> None:
        self._most_chunks = most_chunks
        self._lock = threading.Lock()
        self._owners: dict[str, set[CacheEngineKey]] = {}
        self._count: Counter[CacheEngineKey] = Counter()

    def pin(self, owner: str, keys: Collection[CacheEngineKey], *, check: bool = False) -> None:
        """Adds keys to what the owner has pinned.

        Args:
            check: adds nothing.

        Raises:
            PinRefusedError: too many keys would be pinned.
        """
        with self._lock:
            new = set(keys) - self._owners.get(owner, set())
            pinned = len(self._count.keys() | new)
            most = self._most_chunks()
            if pinned > most:
                raise PinRefusedError(
                    f"{pinned} chunks would be pinned, at most {most} (half of host memory) may be; "
                    "unpin others first, or pin a shorter prefix"
                )
            if check:
                return
            self._owners.setdefault(owner, set()).update(new)
            self._count.update(new)

    def unpin(self, owner: str) -> int:
        """Lets go of all that the owner has pinned; how many chunks that were."""
        with self._lock:
            keys = self._owners.pop(owner, set())
            for key in keys:
                self._count[key] -= 1
                if not self._count[key]:
                    del self._count[key]
            return len(keys)

    def pinned(self, key: CacheEngineKey) -> bool:
        return key in self._count

    def __len__(self) -> int:
        """Pinned keys."""
        return len(self._count)

    def pins(self) -> list[Pin]:
        """What each owner has pinned."""
        with self._lock:
            return [Pin(owner, len(keys)) for owner, keys in sorted(self._owners.items())]
