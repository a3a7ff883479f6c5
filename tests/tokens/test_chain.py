# SPDX-License-Identifier: Apache-2.0
"""The chain against a plain definition of it, one chunk at a time."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import _native
from kvcache.tokens.database import ChunkedTokenDatabase, chain_root, chain_secret
from kvcache.tokens.hashing import Insert, PrefixChain, digest128
from kvcache.tokens.keys import CacheEngineKey, Namespace

CHUNK = 16
tokens_strategy = st.lists(st.integers(0, 2**31 - 1), max_size=5 * CHUNK + 3)


def make_chain(
    inserts: list[Insert] | None = None, salt: str = "", adapter: str = "", seed: str = ""
) -> PrefixChain:
    return PrefixChain(CHUNK, chain_secret(seed), chain_root(adapter, salt), inserts or [])


def plain_chain(tokens: list[int], inserts: list[Insert]) -> list[bytes]:
    """One chunk at a time, as the docstring of the module defines it."""
    digests: list[bytes] = []
    parent, secret = chain_root(), chain_secret("")
    for start in range(0, len(tokens) // CHUNK * CHUNK, CHUNK):
        met = [i for i in inserts if i.start < start + CHUNK and i.end > start]
        if met:
            parent = digest128(
                b"inserts", parent, *(b"%d:%d:%s" % (i.start - start, i.end - start, i.digest) for i in met)
            )
        chunk = np.array(tokens[start : start + CHUNK], dtype=np.int32)
        parent = bytes(_native.chunk_hashes(chunk, CHUNK, parent, secret))
        digests.append(parent)
    return digests


@given(tokens_strategy, st.data())
def test_piecewise_is_whole_is_plain(tokens: list[int], data: st.DataObject) -> None:
    spans = data.draw(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), max_size=3))
    inserts = [Insert(start, start + length, b"image %d" % n) for n, (start, length) in enumerate(spans)]
    whole = make_chain(inserts)
    whole.extend(tokens)
    pieces = make_chain(inserts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        pieces.extend(tokens[start:end])
    assert bytes(whole.digests) == bytes(pieces.digests) == b"".join(plain_chain(tokens, inserts))
    assert whole.num_tokens == len(tokens)
    assert whole.tail_digest() == pieces.tail_digest()
    assert (whole.tail_digest() is None) == (len(tokens) % CHUNK == 0)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.data())
def test_a_list_is_read_in_place(tokens: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(tokens)))
    stop = data.draw(st.integers(start, len(tokens)))
    read = _native.token_ids(tokens, start, stop)
    assert (read.dtype, read.tolist()) == (np.dtype(np.int32), tokens[start:stop])
    of_list, of_array = make_chain(), make_chain()
    of_list.extend(tokens, start, stop)
    of_array.extend(np.array(tokens, dtype=np.int32), start, stop)  # type: ignore[arg-type]
    assert of_list.digests == of_array.digests
    assert of_list.tail_digest() == of_array.tail_digest()


@pytest.mark.parametrize("wrong", [-1, 2**31, 2**80, -(2**80), 1.0, "7", None])
def test_what_is_no_token_id_is_named(wrong: object) -> None:
    tokens: Any = [1, True, wrong, 2**31 - 1]
    assert _native.token_ids(tokens, 0, 2).tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"tokens\[2\] is no token id; give integers from 0 to 2147483647"):
        _native.token_ids(tokens, 0, 4)
    with pytest.raises(ValueError, match=r"tokens \[1, 5\) were asked of a list of 4"):
        _native.token_ids(tokens, 1, 5)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=CHUNK, max_size=5 * CHUNK), st.data())
def test_a_changed_token_changes_its_chunk_and_all_behind(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) // CHUNK * CHUNK - 1))
    other = list(tokens)
    other[at] = (other[at] + data.draw(st.integers(1, 2**31 - 1))) % 2**31
    a, b = make_chain(), make_chain()
    a.extend(tokens)
    b.extend(other)
    for chunk in range(a.num_chunks):
        same = a.digests[chunk * 16 : chunk * 16 + 16] == b.digests[chunk * 16 : chunk * 16 + 16]
        assert same == (chunk < at // CHUNK)


def test_what_is_not_in_the_tokens_tells_chains_apart() -> None:
    tokens = list(range(3 * CHUNK))
    chains = [
        make_chain(),
        make_chain(salt="a"),
        make_chain(salt="b"),
        make_chain(adapter="a"),
        make_chain(seed="a"),
        make_chain([Insert(3, 9, b"cat")]),
        make_chain([Insert(3, 9, b"dog")]),
        make_chain([Insert(4, 9, b"cat")]),
        make_chain([Insert(3, 10, b"cat")]),
        make_chain([Insert(3, 6, b"cat"), Insert(6, 9, b"cat")]),
    ]
    for chain in chains:
        chain.extend(tokens)
    for chunk in range(3):
        assert len({bytes(chain.digests[chunk * 16 : chunk * 16 + 16]) for chain in chains}) == len(chains)


def test_an_insert_leaves_the_chunks_before_it_alone() -> None:
    plain, with_image = make_chain(), make_chain([Insert(2 * CHUNK, 2 * CHUNK + 5, b"cat")])
    plain.extend(range(4 * CHUNK))
    with_image.extend(range(4 * CHUNK))
    assert plain.digests[:32] == with_image.digests[:32]
    assert plain.digests[32:48] != with_image.digests[32:48]
    assert plain.digests[48:] != with_image.digests[48:]


def test_digest128_has_no_ambiguous_parts() -> None:
    assert (
        len({digest128(b"ab", b"c"), digest128(b"a", b"bc"), digest128(b"abc"), digest128(b"abc", b"")}) == 4
    )


NAMESPACE: dict[str, Any] = {
    "model": "m",
    "revision": "r",
    "weights": "w",
    "architecture": "a",
    "dtype": "torch.bfloat16",
    "kv_dtype": "auto",
    "kv_scales": "NONE",
    "num_layers": 2,
    "num_kv_heads": 4,
    "head_size": 64,
    "chunk_size": 256,
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "format_version": 1,
}


@pytest.mark.parametrize("field", NAMESPACE)
def test_each_field_of_the_namespace_counts(field: str) -> None:
    before = NAMESPACE[field]
    other = before + 1 if isinstance(before, int) else f"{before}x"
    assert Namespace(**NAMESPACE).digest() != Namespace(**{**NAMESPACE, field: other}).digest()


def test_keys_are_the_same_in_every_process() -> None:
    program = (
        "from kvcache.tokens.database import ChunkedTokenDatabase\n"
        "print(ChunkedTokenDatabase(16, bytes(16), 0, 'seed').hash_tokens(range(100), with_tail=True).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "random")
    }
    assert outputs == {
        ChunkedTokenDatabase(16, bytes(16), 0, "seed").hash_tokens(range(100), with_tail=True).hex()
    }


def test_chunks_of_a_window() -> None:
    database = ChunkedTokenDatabase(CHUNK, b"n" * 16, rank=3)
    digests = b"a" * 16 + b"b" * 16
    assert [(c.start, c.end) for c in database.chunks(digests, 40)] == [(0, 16), (16, 32)]
    assert [(c.start, c.end) for c in database.chunks(digests, 20)] == [(0, 16), (16, 20)]
    assert [c.key for c in database.chunks(digests, 40)] == database.keys(digests)
    for wrong in (digests[:-1], digests + b"c" * 16):
        with pytest.raises(ValueError, match="bytes of digests for 32 tokens"):
            list(database.chunks(wrong, 32))


def test_a_key_reads_back() -> None:
    key = CacheEngineKey(b"h" * 16, b"n" * 16, rank=513, kv_group=2)
    assert len(key.to_bytes()) == 36
    assert CacheEngineKey.from_bytes(key.to_bytes()) == key
    with pytest.raises(ValueError, match="36 bytes, got 35"):
        CacheEngineKey.from_bytes(key.to_bytes()[:-1])
