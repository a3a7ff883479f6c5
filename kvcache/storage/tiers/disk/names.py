# SPDX-License-Identifier: Apache-2.0
"""Names of the files of objects: all that an index needs to know, so that it is made from names alone.

A name is the lower-case hex of 84 bytes: key (36), chunk hash of the parent (16), tenant (16), tokens and
bytes of payload (4 and 8, little-endian), 4 zeros; then `.kv`, or `.part` while the object is being
written. They lie side by side in the folder `LAYOUT` of each directory; another layout, older or newer, has
a folder of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.storage.object_format import HEADER_BYTES, MAX_PAYLOAD_BYTES
from kvcache.storage.tier import ALIGNMENT, StoredObject
from kvcache.tokens.keys import CacheEngineKey

LAYOUT = "kvcache-objects-v1"
LAYOUT_PREFIX = "kvcache-objects-v"
SUFFIX = ".kv"
PART_SUFFIX = ".part"
KEY_BYTES = 36

_PARENT = slice(36, 52)
_TENANT = slice(52, 68)
_NAMESPACE_RANK_GROUP = slice(16, 36)
_SIZES = struct.Struct("<IQI")
_SIZES_AT = 68
_RAW_BYTES = _SIZES_AT + _SIZES.size
_HEX_CHARS = 2 * _RAW_BYTES
_TABLE = np.dtype([("before", f"V{_SIZES_AT + 4}"), ("size", "<i8"), ("after", "V4")])
"""Names side by side."""


@dataclass(frozen=True, slots=True)
class ObjectName:
    """What a name says. `raw`: its 84 bytes, which were checked."""

    raw: bytes

    @classmethod
    def of(cls, obj: StoredObject) -> ObjectName:
        """Raises ValueError unless parent and tenant have 16 bytes."""
        if (len(obj.parent), len(obj.tenant)) != (16, 16):
            raise ValueError(
                f"parent and tenant have {len(obj.parent)} and {len(obj.tenant)} bytes; 16 each are needed"
            )
        sizes = _SIZES.pack(obj.num_tokens, obj.payload.nbytes, 0)
        return cls(obj.key.to_bytes() + obj.parent + obj.tenant + sizes)

    @property
    def key(self) -> CacheEngineKey:
        return CacheEngineKey.from_bytes(self.key_bytes)

    @property
    def key_bytes(self) -> bytes:
        """36 bytes, as `CacheEngineKey.to_bytes` gives them."""
        return self.raw[:KEY_BYTES]

    @property
    def parent(self) -> bytes:
        return self.raw[_PARENT]

    @property
    def parent_key_bytes(self) -> bytes:
        """Key of the chunk before it, there or not."""
        return self.raw[_PARENT] + self.raw[_NAMESPACE_RANK_GROUP]

    @property
    def tenant(self) -> bytes:
        return self.raw[_TENANT]

    @property
    def num_tokens(self) -> int:
        return int(_SIZES.unpack_from(self.raw, _SIZES_AT)[0])

    @property
    def payload_bytes(self) -> int:
        return int(_SIZES.unpack_from(self.raw, _SIZES_AT)[1])

    @property
    def file_bytes(self) -> int:
        return file_bytes(self.payload_bytes)

    @property
    def file(self) -> str:
        return self.raw.hex() + SUFFIX

    @property
    def part(self) -> str:
        return self.raw.hex() + PART_SUFFIX


def file_bytes(payload_bytes: int) -> int:
    """Bytes of an object's file: header and payload, filled up to a multiple of `ALIGNMENT`."""
    return HEADER_BYTES + -(-payload_bytes // ALIGNMENT) * ALIGNMENT


def parse_name(text: str, suffix: str = SUFFIX) -> bytes | None:
    """The 84 bytes that a name says; None for a file that is none of ours."""
    if len(text) != _HEX_CHARS + len(suffix) or not text.endswith(suffix) or text != text.lower():
        return None
    try:
        raw = bytes.fromhex(text[:_HEX_CHARS])
    except ValueError:
        return None
    if len(raw) != _RAW_BYTES:  # white space is no hex digit, and `fromhex` passes over it
        return None
    tokens, size, zero = _SIZES.unpack_from(raw, _SIZES_AT)
    return raw if tokens and 0 < size <= MAX_PAYLOAD_BYTES and not zero else None


def sum_of_files(raws: Sequence[bytes]) -> int:
    """Bytes of the files of objects, by their names."""
    sizes = np.frombuffer(b"".join(raws), _TABLE)["size"]
    return int((HEADER_BYTES + -(-sizes // ALIGNMENT) * ALIGNMENT).sum())
