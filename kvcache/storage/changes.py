# SPDX-License-Identifier: Apache-2.0
"""What became visible in a rank's tiers, and what went, in the order in which it did: for those who announce
it to others."""

from __future__ import annotations

import threading
from typing import NamedTuple

from kvcache.tokens.keys import CacheEngineKey

MAX_CHANGES = 1 << 16
"""Kept between two questions: more than a step of vLLM can make, a few MiB."""


class Change(NamedTuple):
    """One chunk in one tier."""

    tier: str
    chunk_hash: bytes
    """16 bytes."""
    stored: bool
    """Visible from now on; else gone."""


class Changes(NamedTuple):
    """All that has changed since the last question."""

    changes: list[Change]
    lost: bool = False
    """There were more before these than are kept: what was known before them may not be true any more."""


class ChangeLog:
    """Thread-safe and bounded. Tiers write, one reader takes."""

    def __init__(self, limit: int = MAX_CHANGES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._changes: list[Change] = []
        self._lost = False

    def add(self, tier: str, key: CacheEngineKey, stored: bool) -> None:
        """A tier's chunk became visible or went."""
        with self._lock:
            if len(self._changes) >= self._limit:
                self._changes, self._lost = [], True
            self._changes.append(Change(tier, key.chunk_hash, stored))

    def take(self) -> Changes | None:
        """None where nothing has changed."""
        if not self._changes:
            return None
        with self._lock:
            taken = Changes(self._changes, self._lost)
            self._changes, self._lost = [], False
        return taken
