# SPDX-License-Identifier: Apache-2.0
"""The interface of an eviction policy. It orders keys; it owns no memory and knows no leases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from kvcache.tokens.keys import CacheEngineKey


class EvictionPolicy(ABC):
    """Called under the tier's lock."""

    @abstractmethod
    def admit(self, key: CacheEngineKey) -> None:
        """A chunk became visible under `key`."""

    @abstractmethod
    def touch(self, key: CacheEngineKey) -> None:
        """The chunk was asked for."""

    @abstractmethod
    def remove(self, key: CacheEngineKey) -> None:
        """The chunk is gone: evicted or flushed."""

    @abstractmethod
    def victims(self) -> Iterator[CacheEngineKey]:
        """All keys, the one to leave first at the front. The policy is not changed while it is iterated."""
