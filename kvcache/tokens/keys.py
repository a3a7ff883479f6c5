# SPDX-License-Identifier: Apache-2.0
"""What names a stored chunk: its prefix, the namespace it may be used in, the rank and the KV cache group."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from kvcache.tokens.hashing import DIGEST_BYTES, digest128

FORMAT_VERSION = 1
"""Changes when the bytes of a stored chunk change their meaning."""

_TAIL = struct.Struct("<HH")


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """All that must be equal for the KV of equal tokens to be interchangeable between two processes."""

    model: str
    """Name of the model, or its folder's name."""
    revision: str
    weights: str
    """Fingerprint of the weights where they lie in a folder, else empty: a revision then tells them apart."""
    architecture: str
    """Digest of the model's configuration: sizes, rope, quantisation, everything that the model reads."""
    dtype: str
    kv_dtype: str
    kv_scales: str
    """How the KV's scales come about when the KV is quantised."""
    num_layers: int
    """Layers of this rank's stage."""
    num_kv_heads: int
    """KV heads of this rank."""
    head_size: int
    chunk_size: int
    tensor_parallel: int
    pipeline_parallel: int
    page_order: str = ""
    """What the order of a chunk's bytes depends on where it is not that of tokens, each its key and then its
    value."""
    format_version: int = FORMAT_VERSION

    def with_joined_rows(self) -> Namespace:
        """The same of chunks that keep a head's key and value side by side."""
        return replace(self, page_order=f"{self.page_order}/joined rows 1")

    def digest(self) -> bytes:
        """16 bytes, the same in every process."""
        return digest128(b"namespace", json.dumps(asdict(self), sort_keys=True, ensure_ascii=True).encode())


class CacheEngineKey(NamedTuple):
    """The key of one stored chunk of one rank."""

    chunk_hash: bytes
    """16 bytes: digest of the prefix up to and including the chunk, with adapter, salt and multi-modal items.
    """
    namespace: bytes
    """16 bytes."""
    rank: int
    kv_group: int = 0

    def to_bytes(self) -> bytes:
        """36 bytes: chunk hash, namespace, rank and group as little-endian uint16."""
        return self.chunk_hash + self.namespace + _TAIL.pack(self.rank, self.kv_group)

    @classmethod
    def from_bytes(cls, data: bytes) -> CacheEngineKey:
        """Raises ValueError unless `data` has 36 bytes."""
        if len(data) != 2 * DIGEST_BYTES + _TAIL.size:
            raise ValueError(f"a key has {2 * DIGEST_BYTES + _TAIL.size} bytes, got {len(data)}")
        rank, group = _TAIL.unpack_from(data, 2 * DIGEST_BYTES)
        return cls(data[:DIGEST_BYTES], data[DIGEST_BYTES : 2 * DIGEST_BYTES], rank, group)
