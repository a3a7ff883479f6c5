# SPDX-License-Identifier: Apache-2.0
"""Who waits for which chunks that are being written to host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvcache.storage.residents import Entry
from kvcache.tokens.keys import CacheEngineKey


class Claims:
    """Not thread-safe. A chunk's claims stand in its entry too, so that both ends find each other.

    Args:
        writing: the chunks that are being written.
    """

    def __init__(self, writing: Mapping[CacheEngineKey, Entry]) -> None:
        self._writing = writing
        self._by_owner: dict[str, set[CacheEngineKey]] = {}

    def __len__(self) -> int:
        return sum(len(keys) for keys in self._by_owner.values())

    def add(self, owner: str, key: CacheEngineKey) -> None:
        """The owner waits for a chunk that is being written."""
        entry = self._writing[key]
        entry.claims = (entry.claims or set()) | {owner}
        self._by_owner.setdefault(owner, set()).add(key)

    def has(self, owner: str, key: CacheEngineKey) -> bool:
        return key in self._by_owner.get(owner, ())

    def drop(self, owner: str) -> None:
        """The owner waits for nothing any more."""
        for key in self._by_owner.pop(owner, ()):
            entry = self._writing.get(key)
            if entry is not None and entry.claims is not None:
                entry.claims.discard(owner)

    def drop_where(self, ended: Callable[[str], bool]) -> None:
        """As `drop`, of all owners that `ended` says so of."""
        for owner in [owner for owner in self._by_owner if ended(owner)]:
            self.drop(owner)

    def end(self, key: CacheEngineKey, entry: Entry) -> set[str]:
        """Nobody has to wait for the chunk any more; those who did."""
        owners, entry.claims = entry.claims or set(), None
        for owner in owners:
            self._by_owner[owner].discard(key)
        return owners
