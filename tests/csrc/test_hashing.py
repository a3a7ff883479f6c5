# SPDX-License-Identifier: Apache-2.0
"""The chained hash against an implementation in plain Python, which itself is held against the xxhash
package.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import _native
from tests.csrc.xxh3 import xxh3_128

ROOT, KEY = bytes(range(16)), bytes(range(100, 116))


def reference(tokens: np.ndarray, chunk_size: int, parent: bytes, key: bytes) -> list[bytes]:
    """One digest a chunk, a partial last one included. Chunks of at least 5 tokens."""
    secret = b"".join(xxhash.xxh3_128_digest(key, seed=n) for n in range(12))
    digests = []
    for start in range(0, len(tokens), chunk_size):
        body = tokens[start : start + chunk_size].astype("<i4").tobytes()
        parent = xxh3_128(parent + xxh3_128(body, secret), secret)
        digests.append(parent)
    return digests


def random_tokens(count: int) -> np.ndarray:
    return np.frombuffer(os.urandom(4 * count), dtype=np.int32)


@pytest.mark.parametrize(
    "length", [17, 31, 32, 33, 128, 129, 160, 240, 241, 1023, 1024, 1025, 1040, 4096, 5000]
)
def test_the_reference_is_xxh3(length: int) -> None:
    data = os.urandom(length)
    assert xxh3_128(data) == xxhash.xxh3_128_digest(data)
    assert _native.xxh3_128(data) == xxhash.xxh3_128_digest(data)


@pytest.mark.parametrize(
    ("chunk_size", "count"),
    [
        *[(5, 35), (16, 80), (16, 87), (32, 160), (33, 99), (48, 200), (60, 130), (61, 122)],
        *[(256, 1024), (256, 1000), (1024, 3000)],
    ],
)
def test_digests_equal_the_reference(chunk_size: int, count: int) -> None:
    tokens = random_tokens(count)
    expected = reference(tokens, chunk_size, ROOT, KEY)
    full = _native.chunk_hashes(tokens, chunk_size, ROOT, KEY)
    assert full == b"".join(expected[: count // chunk_size])
    assert _native.chunk_hashes(tokens, chunk_size, ROOT, KEY, tail=True) == b"".join(expected)


def test_a_known_digest_holds_on_every_machine() -> None:
    tokens = np.arange(512, dtype=np.int32)
    digests = _native.chunk_hashes(tokens, 256, bytes(16), bytes(16))
    assert digests.hex() == "d2319b3027354c9669bfb604450e8ba7b3b16e38609cd2fea25387a9d17bc999"
    digests = _native.chunk_hashes(tokens[:32], 16, bytes(16), bytes(16))
    assert digests.hex() == "6d4f4611269eb89723af78c3942dc5fbcc6dfbe815a60bf3cc6d8d73aa23e770"


@given(st.integers(1, 40), st.integers(0, 200), st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_incremental_equals_whole(chunk_size: int, first: int, second: int) -> None:
    split = first // chunk_size * chunk_size
    tokens = random_tokens(split + second)
    head = _native.chunk_hashes(tokens[:split], chunk_size, ROOT, KEY)
    rest = _native.chunk_hashes(tokens[split:], chunk_size, head[-16:] or ROOT, KEY, tail=True)
    assert head + rest == _native.chunk_hashes(tokens, chunk_size, ROOT, KEY, tail=True)


def test_every_input_changes_the_digest() -> None:
    tokens = random_tokens(64)
    base = _native.chunk_hashes(tokens, 32, ROOT, KEY)
    changed = tokens.copy()
    changed[0] ^= 1
    assert all(
        _native.chunk_hashes(changed, 32, ROOT, KEY)[at : at + 16] != base[at : at + 16] for at in (0, 16)
    )
    assert _native.chunk_hashes(tokens, 32, KEY, KEY) != base
    assert _native.chunk_hashes(tokens, 32, ROOT, ROOT) != base
    partial = _native.chunk_hashes(tokens[:31], 32, ROOT, KEY, tail=True)
    assert len(partial) == 16
    assert partial != base[:16]


def test_no_tokens_give_no_digest() -> None:
    assert _native.chunk_hashes(np.empty(0, np.int32), 16, ROOT, KEY, tail=True) == b""


def test_bytes_that_do_not_lie_together_are_refused() -> None:
    """Their first bytes would be hashed in the place of all."""
    apart = np.arange(100, dtype=np.uint8)[::2].data
    for use in (_native.xxh3_128, _native.Xxh3_128().update):
        with pytest.raises(BufferError, match="not C-contiguous"):
            use(apart)
    whole = np.arange(24).reshape(2, 3, 4)
    assert _native.xxh3_128(whole.data) == xxhash.xxh3_128_digest(whole.tobytes())


@pytest.mark.parametrize(
    ("tokens", "chunk_size", "parent", "text"),
    [
        (np.arange(4), 2, ROOT, "tokens is an array of int64 with 1 dimensions"),
        (np.zeros((2, 2), np.int32), 2, ROOT, "with 2 dimensions"),
        (np.arange(8, dtype=np.int32)[::2], 2, ROOT, "contiguous"),
        ([1, 2], 2, ROOT, "tokens is a list"),
        (np.arange(4, dtype=np.int32), 0, ROOT, "chunk_size is 0"),
        (np.arange(4, dtype=np.int32), 2, b"short", "parent has 5 bytes; it must have 16"),
    ],
)
def test_bad_input_is_named(tokens: np.ndarray, chunk_size: int, parent: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _native.chunk_hashes(tokens, chunk_size, parent, KEY)
