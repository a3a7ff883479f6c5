# SPDX-License-Identifier: Apache-2.0
"""First in, first out."""

from __future__ import annotations

from kvcache.storage.policies.base import K
from kvcache.storage.policies.lru import LRUPolicy


class FIFOPolicy(LRUPolicy[K]):
    """What came first leaves first, however often it is asked for."""

    def touch(self, key: K) -> None:
        """Changes nothing."""
