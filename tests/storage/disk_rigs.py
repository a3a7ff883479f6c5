# SPDX-License-Identifier: Apache-2.0
"""Objects with random payloads in aligned memory, and tiers in temporary directories."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvcache.config.tiers import DiskTierConfig
from kvcache.memory.formats import KVShape
from kvcache.storage.changes import ChangeLog
from kvcache.storage.tier import NO_PARENT, NO_TENANT, PutOutcome, StoredObject, TierContext, WantedObject
from kvcache.storage.tiers.disk import DiskTier, open_disk
from kvcache.storage.tiers.disk.names import KEY_BYTES, LAYOUT, SUFFIX, file_bytes, parse_name
from kvcache.tokens.keys import CacheEngineKey

NAMESPACE = b"namespace-of-abc"
SHAPE = KVShape(num_layers=3, kv_planes=2, hidden=40, dtype=torch.bfloat16, chunk_tokens=64)
"""480 bytes a token, 30,720 a chunk: seven pages and a half."""


def aligned(num_bytes: int, shift: int = 0) -> memoryview:
    """Writable memory whose pages go on to the next multiple; `shift` bytes off a page's start."""
    return memoryview(mmap.mmap(-1, num_bytes + shift + 4096))[shift : shift + num_bytes]


def payload_of(num_bytes: int, rng: random.Random, shift: int = 0) -> memoryview:
    memory = aligned(num_bytes, shift)
    memory[:] = rng.randbytes(num_bytes)
    return memory


@dataclass
class Rig:
    """Makes objects, and remembers what their payloads were."""

    seed: int = field(default_factory=lambda: int.from_bytes(os.urandom(4), "little"))
    shape: KVShape = SHAPE
    rank: int = 0
    namespace: bytes = NAMESPACE
    payloads: dict[CacheEngineKey, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def object(
        self,
        num_tokens: int | None = None,
        parent: bytes = NO_PARENT,
        tenant: bytes = NO_TENANT,
        shift: int = 0,
        **key: Any,
    ) -> StoredObject:
        tokens = self.shape.chunk_tokens if num_tokens is None else num_tokens
        key.setdefault("namespace", self.namespace)
        key.setdefault("rank", self.rank)
        name = CacheEngineKey(self.rng.randbytes(16), **key)
        payload = payload_of(tokens * self.shape.token_bytes, self.rng, shift)
        self.payloads[name] = bytes(payload)
        return StoredObject(name, tokens, payload.toreadonly(), tenant, parent)

    def objects(self, count: int, **of: Any) -> list[StoredObject]:
        return [self.object(**of) for _ in range(count)]

    def chain(self, count: int, **of: Any) -> list[StoredObject]:
        """Objects each of which continues the one before it."""
        found: list[StoredObject] = []
        for _ in range(count):
            parent = found[-1].key.chunk_hash if found else NO_PARENT
            found.append(self.object(parent=parent, **of))
        return found

    @property
    def object_bytes(self) -> int:
        """Of a full chunk's file."""
        return file_bytes(self.shape.chunk_bytes)

    def open(
        self,
        *directories: Path,
        capacity: int = 64 << 20,
        pinned: Callable[[CacheEngineKey], bool] = lambda key: False,
        quota: Callable[[bytes], int | None] = lambda tenant: None,
        encryption_key_file: str | None = None,
        changes: ChangeLog | None = None,
        **config: Any,
    ) -> DiskTier:
        context = TierContext(
            shape=self.shape,
            namespace=self.namespace,
            rank=self.rank,
            pinned=pinned,
            quota=quota,
            encryption_key_file=encryption_key_file,
            changes=changes,
        )
        names = [str(directory) for directory in directories]
        # As a quantity: a bare number of so few bytes is taken for a forgotten unit.
        given = {"directories": names, "capacity": f"{capacity / 1024}Ki", **config}
        return open_disk(DiskTierConfig.model_validate(given), context)

    def read(self, tier: DiskTier, keys: Sequence[CacheEngineKey], shift: int = 0) -> list[bytes | None]:
        """The payloads of objects, as `head` and `get` give them."""
        sizes = tier.head(keys).result(30)
        wanted = [
            WantedObject(key, aligned(size, shift)) for key, size in zip(keys, sizes, strict=True) if size
        ]
        answers = tier.get(wanted).result(30)
        got = {want.key: bytes(want.target) for want, good in zip(wanted, answers, strict=True) if good}
        return [got.get(key) for key in keys]

    def check(self, tier: DiskTier, keys: Sequence[CacheEngineKey]) -> None:
        """All of them are there, and hold what was put."""
        assert self.read(tier, keys) == [self.payloads[key] for key in keys]


def put(tier: DiskTier, objects: Sequence[StoredObject]) -> list[PutOutcome]:
    return tier.put(objects).result(30)


def put_all(tier: DiskTier, objects: Sequence[StoredObject]) -> None:
    assert put(tier, objects) == [PutOutcome.STORED] * len(objects)


def files(*directories: Path) -> list[Path]:
    """Files of objects."""
    return [file for directory in directories for file in (directory / LAYOUT).glob("*" + SUFFIX)]


def used(*directories: Path) -> int:
    """Bytes of all files but the ledgers, as the file system says."""
    found = [file for directory in directories for file in (directory / LAYOUT).iterdir()]
    return sum(file.stat().st_size for file in found if file.name != "ledger")


def file_of(directory: Path, key: CacheEngineKey) -> Path:
    """The file of one object."""
    for file in files(directory):
        raw = parse_name(file.name)
        if raw is not None and raw[:KEY_BYTES] == key.to_bytes():
            return file
    raise FileNotFoundError(key)
