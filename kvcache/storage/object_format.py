# SPDX-License-Identifier: Apache-2.0
"""The object: one chunk as it lies on disk and in remote stores, describing itself.

An object is a header of 4,096 bytes and the payload after it; whoever pads the payload pads with zeros. All
integers are little-endian. `xxh3` is XXH3-128 in its canonical form.

| offset | bytes | field |
|---|---|---|
| 0 | 8 | magic, `93 4B 56 4F 42 4A 0D 0A` |
| 8 | 2, 2, 4 | format version (1), flags (bit 0: sealed), bytes of the header (4,096) |
| 16 | 36, 4 | key (`CacheEngineKey.to_bytes`), tokens |
| 56 | 16, 16 | tenant, chunk hash of the parent |
| 88 | 8 | bytes of payload |
| 96 | 4, 4, 4, 4 | layers, planes (2, or 1: MLA, joined rows), elements of a row, 0 |
| 112 | 24, 16 | dtype as torch names it, memory format, both ASCII with zeros behind |
| 152 | 16, 12, 4 | sealed: id of the key, nonce, 0 (else zeros) |
| 184 | 16 | sealed: tag of AES-GCM; bytes 0 to 183 are its associated data |
| 200 | 16 | xxh3 of the payload as stored: of the ciphertext where it is sealed |
| 216 | 3,864 | zeros |
| 4,080 | 16 | xxh3 of the bytes 0 to 4,079 |

Coded rows (`compression`, `csrc/include/row_codec.h`) are elements of uint8, as many as a row has bytes.

To write: `encode_object`. To read: `open_object` on header and payload, which is the only way to trust a
payload; or its parts one by one.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from typing_extensions import Buffer

from kvcache import _native
from kvcache.memory.formats import KVShape, MemoryFormat
from kvcache.storage.sealing import Seal, Sealer, SealError, key_name
from kvcache.storage.tier import StoredObject
from kvcache.tokens.keys import CacheEngineKey

MAGIC = b"\x93KVOBJ\r\n"
OBJECT_VERSION = 1
HEADER_BYTES = 4096
MAX_PAYLOAD_BYTES = 1 << 40

_SEALED = 1
_FIXED = struct.Struct("<8sHHI36sI16s16sQIIII24s16s16s12s4x")
_TAIL = struct.Struct("<16s16s")
_CHECKSUM_AT = HEADER_BYTES - 16
_NO_SEAL = Seal(bytes(16), bytes(12))


class ObjectFormatError(ValueError):
    """What was read is no object that may be served.

    `reason`, to count by: `ObjectTruncated`, `ObjectForeign` (no object at all), `ObjectVersion` (another
    build's), `ObjectCorrupt` (a checksum or a size is wrong), `ObjectMismatch` (whole, but of another key or
    shape), `ObjectSealed` (no key for it), `ObjectUnsealed` (plain, and only sealed ones are trusted).
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """What a header says, its checksum and sizes checked."""

    key: CacheEngineKey
    num_tokens: int
    tenant: bytes
    parent: bytes
    payload_bytes: int
    num_layers: int
    kv_planes: int
    hidden: int
    dtype: str
    layout: str
    """Name of the `MemoryFormat`."""
    checksum: bytes
    """16 bytes, of the payload as stored."""
    seal: Seal | None
    tag: bytes
    associated: bytes
    """The header's bytes that the seal vouches for too."""


class EncodedObject(NamedTuple):
    """An object as it is stored."""

    header: bytes
    payload: Buffer
    """The chunk's own memory, or the ciphertext."""


def encode_object(
    obj: StoredObject, shape: KVShape, sealer: Sealer | None = None, ciphertext: memoryview | None = None
) -> EncodedObject:
    """The header, and the payload as it is to be stored.

    Args:
        obj: its payload has `num_tokens * shape.token_bytes` bytes.
        shape: of a chunk.
        sealer: seals the payload.
        ciphertext: writable, of the payload's length: where the sealed payload goes; new memory without it.

    Raises:
        ValueError: the payload's length does not fit its tokens.
    """
    length = obj.payload.nbytes
    if not 1 <= obj.num_tokens <= shape.chunk_tokens or length != obj.num_tokens * shape.token_bytes:
        raise ValueError(
            f"a payload of {length} bytes for {obj.num_tokens} tokens; a token has {shape.token_bytes} bytes "
            f"and a chunk at most {shape.chunk_tokens} tokens"
        )
    seal = sealer.begin() if sealer is not None else _NO_SEAL
    fixed = _FIXED.pack(
        MAGIC,
        OBJECT_VERSION,
        _SEALED if sealer is not None else 0,
        HEADER_BYTES,
        obj.key.to_bytes(),
        obj.num_tokens,
        obj.tenant,
        obj.parent,
        length,
        shape.num_layers,
        shape.kv_planes,
        shape.hidden,
        0,
        _dtype_name(shape.dtype).encode(),
        shape.fmt.name.encode(),
        seal.key_id,
        seal.nonce,
    )
    payload: memoryview = obj.payload
    tag = bytes(16)
    if sealer is not None:
        payload = ciphertext if ciphertext is not None else memoryview(bytearray(length))
        tag = sealer.seal(seal, fixed, obj.payload, payload)
    body = fixed + _TAIL.pack(tag, _native.xxh3_128(payload))
    body += bytes(_CHECKSUM_AT - len(body))
    return EncodedObject(body + _native.xxh3_128(body), payload)


def decode_header(data: Buffer) -> ObjectHeader:
    """Reads the first 4,096 bytes of an object.

    Raises:
        ObjectFormatError: they are no header of this version, or a field cannot be.
    """
    raw = bytes(memoryview(data)[:HEADER_BYTES])
    if len(raw) < HEADER_BYTES:
        raise ObjectFormatError(
            "ObjectTruncated", f"{len(raw)} bytes; a header has {HEADER_BYTES}: it was cut off"
        )
    magic, version, flags, size, key, tokens, tenant, parent, length, *rest = _FIXED.unpack_from(raw)
    layers, planes, hidden, reserved, dtype_text, layout_text, key_id, nonce = rest
    if magic != MAGIC:
        raise ObjectFormatError(
            "ObjectForeign",
            f"it begins with {magic.hex()}, an object with {MAGIC.hex()}: it is none",
        )
    if version != OBJECT_VERSION:
        raise ObjectFormatError(
            "ObjectVersion",
            f"format version {version}; this build reads {OBJECT_VERSION}: another build wrote it",
        )
    if not hmac.compare_digest(_native.xxh3_128(raw[:_CHECKSUM_AT]), raw[_CHECKSUM_AT:]):
        raise ObjectFormatError("ObjectCorrupt", "the checksum of the header is wrong: it is damaged")
    tag, checksum = _TAIL.unpack_from(raw, _FIXED.size)
    dtype, layout = _text("dtype", dtype_text), _text("memory format", layout_text)
    sound = (
        size == HEADER_BYTES
        and flags in (0, _SEALED)
        and reserved == 0
        and layers > 0
        and hidden > 0
        and tokens > 0
        and layout == _LAYOUTS.get(planes)
        and dtype in _ITEM_BYTES
        and length == tokens * layers * planes * hidden * _ITEM_BYTES[dtype]
        and length <= MAX_PAYLOAD_BYTES
    )
    if not sound:
        raise ObjectFormatError(
            "ObjectCorrupt",
            f"the header says {length} bytes for {tokens} tokens of {layers} layers x {planes} planes x "
            f"{hidden} elements of {dtype or 'no dtype'} as {layout or 'no format'}, {size} bytes of header, "
            f"flags {flags}: that cannot be",
        )
    return ObjectHeader(
        key=CacheEngineKey.from_bytes(key),
        num_tokens=tokens,
        tenant=tenant,
        parent=parent,
        payload_bytes=length,
        num_layers=layers,
        kv_planes=planes,
        hidden=hidden,
        dtype=dtype,
        layout=layout,
        checksum=checksum,
        seal=Seal(key_id, nonce) if flags & _SEALED else None,
        tag=tag,
        associated=raw[: _FIXED.size],
    )


def check_fits(header: ObjectHeader, key: CacheEngineKey, shape: KVShape) -> None:
    """Whether the object is the chunk that was asked for.

    Raises:
        ObjectFormatError: it is another chunk's, or its KV has another shape.
    """
    if header.key != key:
        raise ObjectFormatError(
            "ObjectMismatch",
            f"it is the object of {header.key.to_bytes().hex()}, not of {key.to_bytes().hex()}",
        )
    found = (header.num_layers, header.kv_planes, header.hidden, header.dtype)
    wanted = (shape.num_layers, shape.kv_planes, shape.hidden, _dtype_name(shape.dtype))
    if found != wanted or header.num_tokens > shape.chunk_tokens:
        raise ObjectFormatError(
            "ObjectMismatch",
            f"{header.num_tokens} tokens of layers, planes, elements, dtype {found}; at most "
            f"{shape.chunk_tokens} of {wanted} are accepted",
        )


def verify_payload(header: ObjectHeader, payload: Buffer, checksum: bytes | None = None) -> None:
    """Compares a payload, as it is stored, with the length and the checksum of its header.

    Args:
        checksum: of the payload, from whoever has made it already.

    Raises:
        ObjectFormatError: one of them differs.
    """
    length = memoryview(payload).nbytes
    if length != header.payload_bytes:
        raise ObjectFormatError(
            "ObjectTruncated",
            f"{length} bytes of payload; the header says {header.payload_bytes}: cut off",
        )
    found = _native.xxh3_128(payload) if checksum is None else checksum
    if not hmac.compare_digest(found, header.checksum):
        raise ObjectFormatError("ObjectCorrupt", "the checksum of the payload is wrong: it is damaged")


def unseal_payload(header: ObjectHeader, payload: memoryview, sealer: Sealer | None) -> None:
    """Makes plain text of a verified payload, in place.

    Raises:
        ObjectFormatError: it is sealed and the key is not at hand, or it is plain although there is a sealer:
            nobody vouches for it. The payload's memory is undefined then.
    """
    if header.seal is None:
        if sealer is not None:
            raise ObjectFormatError(
                "ObjectUnsealed", "it is not sealed, and only sealed ones are trusted here"
            )
        return
    if sealer is None:
        raise ObjectFormatError(
            "ObjectSealed",
            f"it is sealed by key {key_name(header.seal.key_id)}; its file is encryption_key_file",
        )
    try:
        sealer.unseal(header.seal, header.tag, header.associated, payload)
    except SealError as error:
        raise ObjectFormatError(
            "ObjectSealed" if error.key_missing else "ObjectCorrupt", str(error)
        ) from error


def open_object(
    header: Buffer,
    payload: memoryview,
    key: CacheEngineKey,
    shape: KVShape,
    sealer: Sealer | None = None,
    checksum: bytes | None = None,
) -> ObjectHeader:
    """Checks all there is to check about an object that was read, and makes its payload plain in place.

    Args:
        header: the object's first 4,096 bytes.
        payload: writable, as it was stored.
        key: of the chunk that was asked for.
        shape: of a chunk.
        sealer: of this process, if its objects are sealed.
        checksum: of the payload, from whoever has made it already.

    Raises:
        ObjectFormatError: the payload must not be used; its memory is undefined.
    """
    found = decode_header(header)
    check_fits(found, key, shape)
    verify_payload(found, payload, checksum)
    unseal_payload(found, payload, sealer)
    return found


_LAYOUTS = {2: MemoryFormat.KV_LT2D.name, 1: MemoryFormat.KV_LTD.name}
"""By planes."""


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_ITEM_BYTES = {
    _dtype_name(value): value.itemsize for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def _text(name: str, raw: bytes) -> str:
    """The ASCII text of a field that is filled with zeros; empty if it is none."""
    text, _, rest = raw.partition(b"\0")
    return text.decode() if text.isascii() and not rest.strip(b"\0") else ""
