# SPDX-License-Identifier: Apache-2.0
"""Keys of objects that are gone, or were never let in: a bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic

from kvcache.storage.policies.base import K


class Ghosts(Generic[K]):
    """The keys that were added last.

    Args:
        limit: how many are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: OrderedDict[K, None] = OrderedDict()

    def add(self, key: K) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._limit:
            self.forget_oldest()

    def forget(self, key: K) -> bool:
        """Whether the key was there."""
        return self._keys.pop(key, self) is None

    def forget_oldest(self) -> None:
        """Raises KeyError if there is none."""
        self._keys.popitem(last=False)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)
