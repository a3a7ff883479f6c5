# SPDX-License-Identifier: Apache-2.0
"""Keys in the order in which they leave, some of which may not: what the policies' lists are made of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic

from kvcache.storage.policies.base import K

_LOOKS = 2
"""At keys that were set aside, each time a victim is wanted."""


class Order(Generic[K]):
    """A list of keys. Every call takes constant time, averaged over many.

    A key that may not leave when its turn comes is set aside, so that it is not met again with every victim:
    pinned objects would be, and the starts of chains whose ends came later. It leaves as soon as its turn has
    come and nothing is behind it any more (`became_leaf`). Leases and pins end untold, so that some of those
    set aside are looked at again each time, in turn.

    Args:
        newest_first: what was added last leaves first.
    """

    def __init__(self, newest_first: bool = False) -> None:
        self._newest_first = newest_first
        self._waiting: OrderedDict[K, None] = OrderedDict()
        self._aside: OrderedDict[K, None] = OrderedDict()
        self._due: OrderedDict[K, None] = OrderedDict()
        """Were set aside and have become leaves."""

    def add(self, key: K) -> None:
        """Puts a key at the new end, from wherever in the list it is."""
        self._aside.pop(key, None)
        self._due.pop(key, None)
        self._waiting[key] = None
        self._waiting.move_to_end(key)

    def remove(self, key: K) -> None:
        """Raises KeyError for a key that is not in the list."""
        for keys in (self._waiting, self._aside, self._due):
            if key in keys:
                del keys[key]
                return
        raise KeyError(key)

    def became_leaf(self, key: K) -> None:
        if key in self._aside:
            del self._aside[key]
            self._due[key] = None

    def first(self, evictable: Callable[[K], bool]) -> K | None:
        """The key that leaves next, which stays in the list. None if no key may leave that was not set aside;
        of those, `last_resort` knows."""
        while self._due:
            key = next(iter(self._due))
            if evictable(key):
                return key
            self._set_aside(key, self._due)
        key_aside = self._look_aside(evictable, _LOOKS)
        if key_aside is not None:
            return key_aside
        while self._waiting:
            key = next(reversed(self._waiting)) if self._newest_first else next(iter(self._waiting))
            if evictable(key):
                return key
            self._set_aside(key, self._waiting)
        return None

    def last_resort(self, evictable: Callable[[K], bool]) -> K | None:
        """Looks at all keys that were set aside. Takes long, and only when all else is empty."""
        return self._look_aside(evictable, len(self._aside))

    def __contains__(self, key: object) -> bool:
        return key in self._waiting or key in self._aside or key in self._due

    def __len__(self) -> int:
        return len(self._waiting) + len(self._aside) + len(self._due)

    def _set_aside(self, key: K, keys: OrderedDict[K, None]) -> None:
        del keys[key]
        self._aside[key] = None

    def _look_aside(self, evictable: Callable[[K], bool], looks: int) -> K | None:
        for _ in range(min(looks, len(self._aside))):
            key = next(iter(self._aside))
            if evictable(key):
                return key
            self._aside.move_to_end(key)
        return None


def first_of(orders: Iterable[Order[K]], evictable: Callable[[K], bool]) -> K | None:
    """The key that leaves next of the first list that has one."""
    orders = list(orders)
    for order in orders:
        key = order.first(evictable)
        if key is not None:
            return key
    return next((key for order in orders if (key := order.last_resort(evictable)) is not None), None)
