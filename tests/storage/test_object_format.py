# SPDX-License-Identifier: Apache-2.0
"""The object: what is written is what is read, and nothing else is ever taken for it."""

from __future__ import annotations

import random
import struct

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.memory.formats import KVShape
from kvcache.storage.object_format import (
    HEADER_BYTES,
    MAGIC,
    ObjectFormatError,
    check_fits,
    decode_header,
    encode_object,
    open_object,
    verify_payload,
)
from kvcache.storage.tier import StoredObject
from kvcache.tokens.keys import CacheEngineKey

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2]
SHAPE = KVShape(num_layers=2, kv_planes=2, hidden=24, dtype=torch.bfloat16, chunk_tokens=8)

shapes = st.builds(
    KVShape,
    num_layers=st.integers(1, 5),
    kv_planes=st.sampled_from((1, 2)),
    hidden=st.integers(1, 33),
    dtype=st.sampled_from(DTYPES),
    chunk_tokens=st.integers(1, 40),
)
digests = st.binary(min_size=16, max_size=16)
keys = st.builds(CacheEngineKey, digests, digests, st.integers(0, 65535), st.integers(0, 65535))


@st.composite
def written(draw: st.DrawFn) -> tuple[StoredObject, KVShape]:
    shape = draw(shapes)
    tokens = draw(st.integers(1, shape.chunk_tokens))
    payload = random.Random(draw(st.integers())).randbytes(tokens * shape.token_bytes)
    return StoredObject(draw(keys), tokens, memoryview(payload), draw(digests), draw(digests)), shape


def make(tokens: int = 5) -> StoredObject:
    rng = random.Random()
    key = CacheEngineKey(rng.randbytes(16), rng.randbytes(16), 3, 1)
    return StoredObject(key, tokens, memoryview(rng.randbytes(tokens * SHAPE.token_bytes)), rng.randbytes(16))


def reason(error: pytest.ExceptionInfo[ObjectFormatError]) -> str:
    return error.value.reason


def sealed_again(header: bytearray) -> bytes:
    """With a checksum that fits: as if another program had written it so."""
    header[4080:] = xxhash.xxh3_128_digest(bytes(header[:4080]))
    return bytes(header)


@given(written())
def test_what_is_written_is_read(case: tuple[StoredObject, KVShape]) -> None:
    obj, shape = case
    encoded = encode_object(obj, shape)
    assert len(encoded.header) == HEADER_BYTES
    stored = bytearray(encoded.payload)
    header = open_object(encoded.header, memoryview(stored), obj.key, shape)
    assert stored == obj.payload
    assert (header.key, header.num_tokens, header.tenant, header.parent) == (
        obj.key,
        obj.num_tokens,
        obj.tenant,
        obj.parent,
    )
    assert header.payload_bytes == obj.payload.nbytes
    assert (header.layout, header.dtype) == (shape.fmt.name, str(shape.dtype).removeprefix("torch."))
    assert (header.num_layers, header.kv_planes, header.hidden) == (
        shape.num_layers,
        shape.kv_planes,
        shape.hidden,
    )


def test_layout_is_the_documented_one() -> None:
    """Read by a decoder of its own, at the offsets of the module's table."""
    obj = make()
    raw = encode_object(obj, SHAPE).header
    assert raw[:8] == bytes.fromhex("934b564f424a0d0a")
    assert struct.unpack_from("<HHI", raw, 8) == (1, 0, 4096)
    assert raw[16:52] == obj.key.to_bytes()
    assert struct.unpack_from("<I", raw, 52) == (obj.num_tokens,)
    assert (raw[56:72], raw[72:88]) == (obj.tenant, obj.parent)
    assert struct.unpack_from("<QIIII", raw, 88) == (obj.payload.nbytes, 2, 2, 24, 0)
    assert raw[112:136].rstrip(b"\0") == b"bfloat16"
    assert raw[136:152].rstrip(b"\0") == b"KV_LT2D"
    assert raw[152:200] == bytes(48)
    assert raw[200:216] == xxhash.xxh3_128_digest(obj.payload)
    assert not raw[216:4080].strip(b"\0")
    assert raw[4080:] == xxhash.xxh3_128_digest(raw[:4080])


@settings(max_examples=300)
@given(st.data())
def test_no_flipped_bit_is_served(data: st.DataObject) -> None:
    obj = make()
    encoded = encode_object(obj, SHAPE)
    whole = bytearray(encoded.header + bytes(encoded.payload))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ObjectFormatError) as error:
        open_object(whole[:HEADER_BYTES], memoryview(whole)[HEADER_BYTES:], obj.key, SHAPE)
    assert reason(error) in ("ObjectForeign", "ObjectVersion", "ObjectCorrupt")


@given(st.integers(0, HEADER_BYTES + 5 * SHAPE.token_bytes - 1))
def test_nothing_that_was_cut_off_is_served(length: int) -> None:
    obj = make()
    encoded = encode_object(obj, SHAPE)
    whole = bytearray(encoded.header + bytes(encoded.payload))[:length]
    with pytest.raises(ObjectFormatError) as error:
        open_object(whole[:HEADER_BYTES], memoryview(whole)[HEADER_BYTES:], obj.key, SHAPE)
    assert reason(error) == "ObjectTruncated"


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_garbage_is_named(garbage: bytes) -> None:
    with pytest.raises(ObjectFormatError) as error:
        decode_header(garbage)
    assert reason(error) == ("ObjectTruncated" if len(garbage) < HEADER_BYTES else "ObjectForeign")


@given(st.binary(min_size=HEADER_BYTES - 8, max_size=HEADER_BYTES - 8))
def test_garbage_behind_the_magic_is_named(garbage: bytes) -> None:
    with pytest.raises(ObjectFormatError):
        decode_header(MAGIC + garbage)


@pytest.mark.parametrize("version", [0, 2, 7, 65535])
def test_another_version_is_named_before_anything_of_it_is_believed(version: int) -> None:
    header = bytearray(encode_object(make(), SHAPE).header)
    struct.pack_into("<H", header, 8, version)
    for raw in (bytes(header), sealed_again(header)):
        with pytest.raises(ObjectFormatError, match=f"format version {version};") as error:
            decode_header(raw)
        assert reason(error) == "ObjectVersion"


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [
        (10, "<H", 2),  # a flag that nobody knows
        (12, "<I", 8192),
        (52, "<I", 0),
        (52, "<I", 6),  # tokens that do not fit the length
        (88, "<Q", 0),
        (88, "<Q", 1 << 62),
        (96, "<I", 0),
        (100, "<I", 3),
        (100, "<I", 1),  # planes that do not fit the format
        (104, "<I", 0xFFFFFFFF),
        (108, "<I", 1),
        (112, "24s", b"bfloat17"),
        (112, "24s", b"float32"),  # a length that does not fit the dtype
        (112, "24s", b"bfloat16\0x"),
        (112, "24s", b"\xff" * 24),
        (136, "16s", b"KV_LTD"),
    ],
)
def test_fields_that_cannot_be_are_refused_though_the_checksum_fits(
    offset: int, form: str, value: int | bytes
) -> None:
    header = bytearray(encode_object(make(), SHAPE).header)
    struct.pack_into(form, header, offset, value)
    with pytest.raises(ObjectFormatError, match="that cannot be") as error:
        decode_header(sealed_again(header))
    assert reason(error) == "ObjectCorrupt"


def test_another_chunk_or_shape_is_not_served() -> None:
    obj = make()
    header = decode_header(encode_object(obj, SHAPE).header)
    check_fits(header, obj.key, SHAPE)
    others = [
        (obj.key._replace(chunk_hash=bytes(16)), SHAPE),
        (obj.key._replace(namespace=bytes(16)), SHAPE),
        (obj.key._replace(rank=4), SHAPE),
        (obj.key._replace(kv_group=0), SHAPE),
        (obj.key, KVShape(2, 2, 24, torch.float16, 8)),  # as many bytes, another meaning
        (obj.key, KVShape(4, 2, 12, torch.bfloat16, 8)),
        (obj.key, KVShape(2, 2, 24, torch.bfloat16, 4)),  # chunks of fewer tokens
    ]
    for key, shape in others:
        with pytest.raises(ObjectFormatError) as error:
            check_fits(header, key, shape)
        assert reason(error) == "ObjectMismatch"


def test_payload_of_another_object_is_not_served() -> None:
    one, other = make(), make()
    header = decode_header(encode_object(one, SHAPE).header)
    verify_payload(header, one.payload)
    with pytest.raises(ObjectFormatError) as error:
        verify_payload(header, other.payload)
    assert reason(error) == "ObjectCorrupt"


@pytest.mark.parametrize("tokens", [0, 9])
def test_payload_must_fit_its_tokens(tokens: int) -> None:
    obj = make()._replace(num_tokens=tokens)
    with pytest.raises(ValueError, match="a token has 192 bytes and a chunk at most 8 tokens"):
        encode_object(obj, SHAPE)
    with pytest.raises(ValueError, match="a payload of 959 bytes for 5 tokens"):
        encode_object(make()._replace(payload=make().payload[:-1]), SHAPE)
