# SPDX-License-Identifier: Apache-2.0
"""What lies in host memory: an index of chunks that knows their chains. It decides nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from kvcache.memory.objects import MemoryObj
from kvcache.storage.plan import HOST
from kvcache.storage.tier import NO_PARENT
from kvcache.tokens.keys import CacheEngineKey


@dataclass(slots=True, eq=False)
class Entry:
    """One chunk."""

    obj: MemoryObj
    tenant: bytes
    parent: bytes
    """Chunk hash of the one before it in its chain."""
    source: int = HOST
    """The tier below that it is read from; `HOST` for one that was computed."""
    visible: bool = True
    """Once it is written, or still. Its memory goes with its last lease if not."""
    leaving: bool = False
    """It goes as soon as it is written to a tier below, unless somebody asks for it before."""
    below: int = 0
    """Bits of the tiers below that have taken it."""
    claims: set[str] | None = None
    """Owners who lease it as soon as it is visible."""


class Residents:
    """Visible chunks by key. Not thread-safe.

    Args:
        became_leaf: called with a chunk that has lost the last one behind it.
    """

    def __init__(self, became_leaf: Callable[[CacheEngineKey], None]) -> None:
        self._became_leaf = became_leaf
        self.entries: dict[CacheEngineKey, Entry] = {}
        self._children: Counter[CacheEngineKey] = Counter()
        """Key of a parent, there or not, to its children that are there and not leaving, or expected."""

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[CacheEngineKey]:
        return iter(self.entries)

    def expect(self, key: CacheEngineKey, parent: bytes) -> None:
        """The chunk will be added: the one before it is no end of a chain any more."""
        if parent != NO_PARENT:
            self._children[_parent_key(key, parent)] += 1

    def expect_no_more(self, key: CacheEngineKey, parent: bytes) -> None:
        """The chunk is not added after all, or is gone."""
        if parent != NO_PARENT:
            before = _parent_key(key, parent)
            self._children[before] -= 1
            if not self._children[before]:
                del self._children[before]
                entry = self.entries.get(before)
                if entry is not None and not entry.leaving:
                    self._became_leaf(before)

    def add(self, key: CacheEngineKey, entry: Entry) -> None:
        """A chunk that was expected is there."""
        self.entries[key] = entry

    def pop(self, key: CacheEngineKey) -> Entry:
        entry = self.entries.pop(key)
        if not entry.leaving:
            self.expect_no_more(key, entry.parent)
        return entry

    def leave(self, key: CacheEngineKey) -> Entry:
        """The chunk is on its way out; the one before it may follow."""
        entry = self.entries[key]
        entry.leaving = True
        self.expect_no_more(key, entry.parent)
        return entry

    def stay(self, key: CacheEngineKey) -> None:
        """It is not on its way out any more."""
        entry = self.entries[key]
        entry.leaving = False
        self.expect(key, entry.parent)

    def is_leaf(self, key: CacheEngineKey) -> bool:
        """Nothing that continues it is there or expected: a chain is given up from its end, so that what is
        there can be hit."""
        return key not in self._children

    def with_all_behind(self, keys: Collection[CacheEngineKey]) -> set[CacheEngineKey]:
        """The keys and those of all chunks here that continue them."""
        behind: dict[CacheEngineKey, list[CacheEngineKey]] = defaultdict(list)
        for key, entry in self.entries.items():
            behind[_parent_key(key, entry.parent)].append(key)
        found = set(keys)
        rest = list(found)
        while rest:
            new = [key for key in behind.get(rest.pop(), ()) if key not in found]
            found.update(new)
            rest.extend(new)
        return found

    def newest_chains(self) -> list[CacheEngineKey]:
        """All keys, those of the chains that grew last first, each chain from its start on."""
        found: dict[CacheEngineKey, None] = {}
        for key in reversed(self.entries):
            chain: list[CacheEngineKey] = []
            while key in self.entries and key not in found:
                chain.append(key)
                key = _parent_key(key, self.entries[key].parent)
            found.update(dict.fromkeys(reversed(chain)))
        return list(found)

    def clear(self) -> None:
        self.entries.clear()
        self._children.clear()


def _parent_key(key: CacheEngineKey, parent: bytes) -> CacheEngineKey:
    return CacheEngineKey(parent, key.namespace, key.rank, key.kv_group)
