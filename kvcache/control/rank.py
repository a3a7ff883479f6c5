# SPDX-License-Identifier: Apache-2.0
"""What the admin sidecar may ask of a rank's engine beyond its statistics."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import groupby

from kvcache.control.wire import (
    FlushResult,
    FlushScope,
    Located,
    Part,
    Pinned,
    PinnedChunks,
    Pins,
    Prefix,
    Unpinned,
)
from kvcache.engine import LMCacheEngine
from kvcache.storage.futures import done, gathered, mapped
from kvcache.storage.tenants import tenant_of
from kvcache.storage.tier import Cleared, ClearScope
from kvcache.tokens.keys import CacheEngineKey

_KEPT = "{} objects stay: pinned, or read or written now and out of reach until that ends"


class RankControl:
    """Thread-safe."""

    def __init__(self, engine: LMCacheEngine) -> None:
        self._engine = engine

    def flush(self, tiers: Sequence[str], scope: FlushScope) -> Future[list[FlushResult]]:
        """One result for each of the tiers that are there; of all tiers if none is named."""
        keys = None if scope.prefix is None else set(self._keys(scope.prefix))
        own = self._engine.database.namespace
        if scope.own and scope.namespace not in (None, own):
            return done([])
        clearing = self._engine.storage.clear(
            ClearScope(
                namespace=own if scope.own else scope.namespace,
                tenant=None if scope.salt is None else tenant_of(scope.salt),
                keys=keys,
                pinned_too=scope.force,
            ),
            tiers or None,
        )
        failed = gathered(list(clearing.values()), lambda error: Cleared(0, 0, 0, False, str(error)))
        return mapped(failed, lambda all_cleared: list(map(_result, clearing, all_cleared)))

    def pin(self, owner: str, prefix: Prefix, check: bool) -> Pinned:
        """Raises PinRefusedError.

        Args:
            check: pins nothing, and raises all the same.
        """
        keys = self._keys(prefix)
        self._engine.storage.pin(owner, keys, check=check)
        return Pinned(chunks=len(keys), stored=self._engine.storage.lookup(keys))

    def unpin(self, owner: str) -> Unpinned:
        return Unpinned(self._engine.storage.unpin(owner))

    def pins(self) -> Pins:
        return Pins(
            [PinnedChunks(owner=pin.owner, chunks=pin.chunks) for pin in self._engine.storage.pinned()]
        )

    def locate(self, prefix: Prefix) -> Future[Located]:
        """Which part of a prompt is stored, and where."""
        size = self._engine.database.chunk_size

        def parts(tiers: list[str]) -> Located:
            return Located([Part(tier=tier, tokens=len(list(run)) * size) for tier, run in groupby(tiers)])

        return mapped(self._engine.storage.locate(self._keys(prefix)), parts)

    def _keys(self, prefix: Prefix) -> list[CacheEngineKey]:
        database = self._engine.database
        chain = database.chain(salt=prefix.salt)
        chain.extend(prefix.tokens)
        return database.keys(bytes(chain.digests))


def _result(tier: str, cleared: Cleared) -> FlushResult:
    reasons = [cleared.detail] if cleared.detail else []
    if cleared.kept:
        reasons.append(_KEPT.format(cleared.kept))
    return FlushResult(
        tier=tier,
        complete=cleared.complete and not cleared.kept,
        removed_objects=cleared.objects,
        removed_bytes=cleared.num_bytes,
        kept_objects=cleared.kept,
        reached=cleared.complete,
        reason="; ".join(reasons),
    )
