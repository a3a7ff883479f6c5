# SPDX-License-Identifier: Apache-2.0
"""How soon the disk tier knows what lies in its directory: opened on many objects, and asked for all."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcache.config.tiers import DiskTierConfig
from kvcache.memory.formats import KVShape
from kvcache.memory.region import HostRegion
from kvcache.storage.tier import PutOutcome, StoredObject, TierContext
from kvcache.storage.tiers.disk import open_disk
from kvcache.storage.tiers.disk.names import file_bytes
from kvcache.tokens.keys import CacheEngineKey

_TOKENS, _TOKEN_BYTES = 4, 1024
_NAMESPACE = bytes(16)
_AT_ONCE = 1024
_ASKED = 256


@dataclass(frozen=True)
class IndexResult:
    """Of one opening. Seconds."""

    objects: int
    open_s: float
    """Until the tier is there."""
    usable_s: float
    """Until it has said of 256 of them, from all over, that they are there."""
    all_s: float
    """Until it has said so of each."""


def index_results(directory: Path, *, objects: int = 50_000, rounds: int = 5) -> Iterator[IndexResult]:
    """Writes so many objects of 4 KiB, and opens their directory again and again.

    Raises:
        RuntimeError: an object was not stored or not found.
    """
    place = Path(tempfile.mkdtemp(prefix="kvcache-bench-", dir=directory.resolve()))
    size = _TOKENS * _TOKEN_BYTES
    config = DiskTierConfig(
        directories=[str(place / "tier")], capacity=max(1 << 30, 2 * objects * file_bytes(size))
    )
    shape = KVShape(1, 1, _TOKEN_BYTES, torch.uint8, _TOKENS)
    context = TierContext(shape=shape, namespace=_NAMESPACE, rank=0)
    keys = [CacheEngineKey(index.to_bytes(16, "little"), _NAMESPACE, 0) for index in range(objects)]
    region = HostRegion(1 << 20, pin="Disabled")
    region.prepare(size)
    payload = memoryview(region.native)[:size].toreadonly()
    try:
        tier = open_disk(config, context)
        for start in range(0, objects, _AT_ONCE):
            some = [StoredObject(key, _TOKENS, payload) for key in keys[start : start + _AT_ONCE]]
            outcomes = tier.put(some).result()
            if any(outcome is not PutOutcome.STORED for outcome in outcomes):
                raise RuntimeError(f"not all objects were stored: {tier.health()}")
        tier.close()
        for _ in range(rounds):
            started = time.perf_counter()
            tier = open_disk(config, context)
            opened = time.perf_counter()
            found = tier.head(random.sample(keys, min(objects, _ASKED))).result()
            usable = time.perf_counter()
            found += tier.head(keys).result()
            ended = time.perf_counter()
            tier.close()
            if None in found:
                raise RuntimeError(f"{found.count(None)} of {objects} objects were not found")
            yield IndexResult(objects, opened - started, usable - started, ended - started)
    finally:
        del payload
        region.close()
        shutil.rmtree(place, ignore_errors=True)
