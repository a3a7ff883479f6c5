# SPDX-License-Identifier: Apache-2.0
"""Chained 128-bit digests of token prefixes, one a chunk, extended as tokens come.

`H(i) = X(H(i-1) || X(tokens of chunk i as little-endian int32))`, where X is XXH3-128 keyed by a secret,
computed natively. The chain starts at a root that stands for everything about a request, apart from its
tokens, that changes the KV: the adapter and the tenant's salt. Multi-modal items enter the chain at the chunk
in which their placeholder begins or goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcache import _native

DIGEST_BYTES = 16


def digest128(*parts: bytes) -> bytes:
    """BLAKE2b-128 over length-prefixed parts, so that no two different lists of parts read alike."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


@dataclass(frozen=True)
class Insert:
    """Something at token positions `[start, end)` that the token ids there do not tell apart, such as an
    image."""

    start: int
    end: int
    digest: bytes


@dataclass
class PrefixChain:
    """The digests of one request's chunks.

    `extend` hashes new tokens only; `digests` holds 16 bytes for each full chunk so far.
    """

    chunk_size: int
    secret: bytes
    root: bytes
    inserts: Sequence[Insert] = ()
    digests: bytearray = field(default_factory=bytearray)
    _rest: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def num_tokens(self) -> int:
        """Tokens seen so far, full chunks and rest."""
        return self.num_chunks * self.chunk_size + len(self._rest)

    @property
    def num_chunks(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    def extend(self, tokens: Sequence[int], start: int = 0, stop: int | None = None) -> None:
        """Appends token ids, those at `[start, stop)` of `tokens` (each a non-negative int32). A list is read
        in place, many times faster than any other sequence.
        """
        stop = len(tokens) if stop is None else stop
        if start >= stop:
            return
        if isinstance(tokens, list):
            new = _native.token_ids(tokens, start, stop)
        else:
            new = np.asarray(tokens[start:stop], dtype=np.int32)
        joined = np.concatenate((self._rest, new)) if len(self._rest) else new
        full = len(joined) // self.chunk_size
        done = 0
        while done < full:
            run = self._run_without_insert(self.num_chunks, full - done)
            span = joined[done * self.chunk_size : (done + run) * self.chunk_size]
            self.digests += _native.chunk_hashes(
                span, self.chunk_size, self._parent(self.num_chunks), self.secret
            )
            done += run
        self._rest = joined[full * self.chunk_size :].copy()

    def tail_digest(self) -> bytes | None:
        """The digest of the last, partial chunk; None where the tokens end on a chunk's edge."""
        if not len(self._rest):
            return None
        parent = self._parent(self.num_chunks)
        return bytes(_native.chunk_hashes(self._rest, len(self._rest), parent, self.secret))

    def _run_without_insert(self, chunk: int, limit: int) -> int:
        """Chunks from `chunk` on that one native call may hash: only the first may meet an insert."""
        run = 1
        while run < limit and not self._inserts_of(chunk + run):
            run = run + 1 if self.inserts else limit
        return run

    def _inserts_of(self, chunk: int) -> list[Insert]:
        start, end = chunk * self.chunk_size, (chunk + 1) * self.chunk_size
        return [insert for insert in self.inserts if insert.start < end and insert.end > start]

    def _parent(self, chunk: int) -> bytes:
        before = bytes(self.digests[(chunk - 1) * DIGEST_BYTES :]) if chunk else self.root
        met = self._inserts_of(chunk)
        if not met:
            return before
        start = chunk * self.chunk_size
        places = (b"%d:%d:" % (insert.start - start, insert.end - start) + insert.digest for insert in met)
        return digest128(b"inserts", before, *places)
