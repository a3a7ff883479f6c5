# SPDX-License-Identifier: Apache-2.0
"""The storage manager: the tiers of one rank and the order between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcache.stats import TierStats
from kvcache.storage.tiers.cpu import CpuTier, Flushed
from kvcache.tokens.keys import CacheEngineKey


class StorageManager:
    """All tiers of one rank, the fastest first. Thread-safe.

    The CPU tier is where copies to and from the GPU start and end, so it is always there.
    """

    def __init__(self, cpu: CpuTier) -> None:
        self.cpu = cpu

    def lookup(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many of the keys, from the first on without a gap, are there."""
        return self.cpu.lookup(keys)

    def lookup_and_lease(self, keys: Sequence[CacheEngineKey], owner: str) -> int:
        """As `lookup`, and what is found stays until the owner's lease ends."""
        return self.cpu.lookup_and_lease(keys, owner)

    def release(self, owner: str) -> int:
        """Ends the owner's lease; the number of chunks it held."""
        return self.cpu.release(owner)

    def release_where(self, ended: Callable[[str], bool]) -> int:
        """Ends the leases of all owners that `ended` says so of; their number."""
        return self.cpu.release_where(ended)

    def flush(self, tiers: Sequence[str]) -> dict[str, Flushed]:
        """Empties those of the named tiers that are there; what happened, by name."""
        return {tier.name: tier.flush() for tier in (self.cpu,) if tier.name in tiers}

    def stats(self) -> list[TierStats]:
        return [self.cpu.stats()]

    def close(self) -> None:
        self.cpu.close()
