# SPDX-License-Identifier: Apache-2.0
"""The token database: which chunks a sequence of tokens is made of, and the key of each."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcache.tokens.hashing import DIGEST_BYTES, Insert, PrefixChain, digest128
from kvcache.tokens.keys import CacheEngineKey

_DIGEST = struct.Struct(f"{DIGEST_BYTES}s")


class Chunk(NamedTuple):
    """Tokens `[start, end)` of a sequence and the key of their KV."""

    start: int
    end: int
    key: CacheEngineKey


def chain_secret(hash_seed: str) -> bytes:
    """The key of the chained hash, from the configuration's `hash_seed`."""
    return digest128(b"chain secret", hash_seed.encode())


def chain_root(adapter: str = "", salt: str = "", tags: Iterable[tuple[str, str]] = ()) -> bytes:
    """Where a request's chain starts. Two requests share a prefix only if adapter, salt and tags (names and
    values, in the order of the names) are equal."""
    named = (part.encode() for tag in tags for part in tag)
    return digest128(b"chain root", adapter.encode(), salt.encode(), *named)


@dataclass(frozen=True)
class ChunkedTokenDatabase:
    """Cuts token sequences into chunks of `chunk_size` and names them for one rank.

    `namespace` has 16 bytes (`Namespace.digest`).
    """

    chunk_size: int
    namespace: bytes
    rank: int
    hash_seed: str = ""

    def chain(self, adapter: str = "", salt: str = "", inserts: Sequence[Insert] = ()) -> PrefixChain:
        """An empty chain for a request."""
        return PrefixChain(self.chunk_size, chain_secret(self.hash_seed), chain_root(adapter, salt), inserts)

    def hash_tokens(self, tokens: Sequence[int], *, with_tail: bool = False) -> bytes:
        """Digests of the chunks of `tokens` without adapter, salt or inserts; the partial last one on
        request."""
        chain = self.chain()
        chain.extend(tokens)
        tail = chain.tail_digest() if with_tail else None
        return bytes(chain.digests) + (tail or b"")

    def chunks(self, digests: bytes, num_tokens: int) -> Iterator[Chunk]:
        """The chunks that `digests` (16 bytes each) name in a window of `num_tokens` tokens.

        Positions count from the window's start. The last chunk may be partial; digests beyond the tokens are
        an error, tokens beyond the digests are no part of any chunk.

        Raises:
            ValueError: digests of a broken length or more of them than the tokens have chunks.
        """
        make = tuple.__new__  # as in `keys`
        for chunk in zip(*self.spans(digests, num_tokens), self.keys(digests), strict=True):
            yield make(Chunk, chunk)

    def spans(self, digests: bytes, num_tokens: int) -> tuple[list[int], list[int]]:
        """Where these chunks start, and where they end.

        Raises:
            ValueError: as `chunks`.
        """
        count, rest = divmod(len(digests), DIGEST_BYTES)
        if rest or (count and (count - 1) * self.chunk_size >= num_tokens):
            raise ValueError(
                f"{len(digests)} bytes of digests for {num_tokens} tokens; {self.chunk_size} of them "
                f"have {DIGEST_BYTES}"
            )
        bounds = list(range(0, (count + 1) * self.chunk_size, self.chunk_size))
        starts, ends = bounds[:-1], bounds[1:]
        if count:
            ends[-1] = min(ends[-1], num_tokens)
        return starts, ends

    def key(self, digest: bytes) -> CacheEngineKey:
        return CacheEngineKey(digest, self.namespace, self.rank)

    def keys(self, digests: bytes) -> list[CacheEngineKey]:
        """The keys of whole digests, in order."""
        # As `key`, without its arguments' way through Python: a long prompt's lookup has hundreds of them.
        make, namespace, rank = tuple.__new__, self.namespace, self.rank
        return [
            make(CacheEngineKey, (digest, namespace, rank, 0)) for (digest,) in _DIGEST.iter_unpack(digests)
        ]
