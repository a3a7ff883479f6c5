# SPDX-License-Identifier: Apache-2.0
"""A model whose arithmetic shows every wrong byte.

The KV of a token is a function of all tokens up to it, of the layer and of the rank (with MLA, of the
pipeline stage alone), and so is the token that follows. A page that holds anything else, by a copy that went
wrong or because the step that wrote it read a wrong page, cannot be taken for right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Lanes = npt.NDArray[np.uint64]

LANES = 4
"""Of 8 bytes: a token's KV in one layer of a pipeline's first stage, the half of them its key."""
VOCABULARY = 64
_MASK = (1 << 64) - 1


class Model:
    """Prefixes by their hashes.

    Args:
        parts: what each rank holds of every token's KV: the number of the part, its layers and lanes. Ranks
            with the same part hold the same bytes.
        block_size: tokens of a page.
        whole_pages: a page's bytes are not in the order of its tokens, as on vLLM's CPU backend.
    """

    def __init__(self, parts: Sequence[tuple[int, int, int]], block_size: int, *, whole_pages: bool) -> None:
        self._block_size = block_size
        self._whole_pages = whole_pages
        self._masks: list[Lanes] = [
            np.random.default_rng(part).integers(0, 1 << 63, (layers, lanes), np.uint64)
            for part, layers, lanes in parts
        ]
        self._parents: dict[int, tuple[int, int]] = {}
        """Hash of a prefix to the hash of all but its last token, and that token."""
        self._roots: dict[int, str] = {}

    def root(self, salt: str) -> int:
        """The hash of nothing, in the name of a tenant."""
        value = _mix(len(salt) + 1, sum(salt.encode()) + 1)
        self._roots[value] = salt
        return value

    def hashes(self, parent: int, tokens: Iterable[int]) -> list[int]:
        """Of the prefixes that end with each of the tokens."""
        out = []
        for token in tokens:
            child = _mix(parent, token)
            self._parents[child] = (parent, token)
            out.append(child)
            parent = child
        return out

    @staticmethod
    def next_token(prefix: int) -> int:
        return (prefix >> 33) % VOCABULARY + 3

    def kv(self, prefixes: Sequence[int], rank: int, layer: int) -> Lanes:
        """uint64 [tokens, lanes]: what the pages of these prefixes' last tokens hold."""
        kv: Lanes = np.asarray(prefixes, np.uint64)[:, None] ^ self._masks[rank][layer]
        return kv

    def prefix_of(self, kv: Lanes, rank: int) -> list[int] | None:
        """The prefixes whose KV `[layers, tokens, lanes]` this is, or None if it is nobody's."""
        plain = kv ^ self._masks[rank][:, None, :]
        if (plain != plain[:1, :, :1]).any():
            return None
        found = [int(value) for value in plain[0, :, 0]]
        chained = all(self._parents.get(b, (None,))[0] == a for a, b in itertools.pairwise(found))
        return found if chained and found[0] in self._parents else None

    def tokens(self, prefix: int) -> tuple[str, list[int]]:
        """The tenant's salt and the tokens of a prefix."""
        tokens = []
        while prefix not in self._roots:
            prefix, token = self._parents[prefix]
            tokens.append(token)
        return self._roots[prefix], tokens[::-1]

    def as_pages(self, kv: Lanes) -> Lanes:
        """[blocks * block size, lanes] from the order of tokens to that of bytes."""
        return self._turn(kv, kv.shape[-1], self._block_size) if self._whole_pages else kv

    def as_tokens(self, pages: Lanes) -> Lanes:
        return self._turn(pages, self._block_size, pages.shape[-1]) if self._whole_pages else pages

    @staticmethod
    def _turn(kv: Lanes, inner: int, outer: int) -> Lanes:
        return kv.reshape(-1, outer, inner).swapaxes(1, 2).reshape(kv.shape)


def _mix(prefix: int, token: int) -> int:
    value = ((prefix ^ token) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _MASK
    return (value ^ (value >> 29)) * 0xBF58476D1CE4E5B9 & _MASK
