# SPDX-License-Identifier: Apache-2.0
"""The hash of bytes that come piece by piece is that of all of them at once."""

from __future__ import annotations

import random

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcache import _native


@given(st.lists(st.integers(0, 3000), max_size=12), st.integers())
def test_pieces_hash_like_the_whole(sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    hasher, whole = _native.Xxh3_128(), b""
    for size in sizes:
        piece = rng.randbytes(size)
        hasher.update(memoryview(piece))
        whole += piece
        assert hasher.digest() == xxhash.xxh3_128_digest(whole)
    assert hasher.digest() == xxhash.xxh3_128_digest(whole) == _native.xxh3_128(whole)
