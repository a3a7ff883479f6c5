# SPDX-License-Identifier: Apache-2.0
"""The windows of a sequence that are looked up, loaded or stored: whole chunks, their digests and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache.integration.vllm.identity import request_inserts
from kvcache.integration.vllm.metadata import LoadSpec, ReqMeta, SaveSpec
from kvcache.integration.vllm.trackers import RequestTracker
from kvcache.storage.tier import NO_PARENT
from kvcache.tokens.hashing import DIGEST_BYTES, PrefixChain

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True)
class Windows:
    """Args:
    chunk_size, block_size: tokens.
    partial_chunks: a prompt's last, partial chunk counts too, in whole blocks.
    """

    chunk_size: int
    block_size: int
    partial_chunks: bool

    def floor(self, tokens: int) -> int:
        """Whole chunks."""
        return tokens // self.chunk_size * self.chunk_size

    def storable(self, tokens: int) -> int:
        """How many of a sequence's tokens are looked up or stored: whole chunks, or else whole blocks, since
        a page's bytes need not be in the order of its tokens."""
        unit = self.block_size if self.partial_chunks else self.chunk_size
        return max(0, tokens) // unit * unit

    def prefix_digests(self, tracker: RequestTracker, chain: PrefixChain, tokens: int) -> bytes:
        """16 bytes for each chunk of the sequence's first `tokens` tokens, a partial last one included."""
        extend(chain, tracker.request, tokens)
        digests = bytes(chain.digests[: tokens // self.chunk_size * DIGEST_BYTES])
        if tokens % self.chunk_size and tokens == chain.num_tokens:
            digests += chain.tail_digest() or b""
        return digests

    def to_load(self, tracker: RequestTracker, chain: PrefixChain, load: LoadSpec) -> ReqMeta:
        """From the chunk of the first token that vLLM has not on, up to the end of the last one's chunk, cut
        to what the sequence has."""
        last = -(-load.lmcache_cached_tokens // self.chunk_size) * self.chunk_size
        end = min(last, chain.num_tokens)
        return self._window(tracker, chain, self.floor(load.vllm_cached_tokens), end, load, None)

    def to_save(
        self, tracker: RequestTracker, chain: PrefixChain, start: int, end: int, save_id: int
    ) -> ReqMeta:
        """The tokens `[start, end)`, `start` being a whole number of chunks."""
        spec = SaveSpec(start, can_save=True, save_id=save_id)
        return self._window(tracker, chain, start, end, None, spec)

    def _window(
        self,
        tracker: RequestTracker,
        chain: PrefixChain,
        start: int,
        end: int,
        load: LoadSpec | None,
        save: SaveSpec | None,
    ) -> ReqMeta:
        first = start // self.chunk_size * DIGEST_BYTES
        digests = bytes(chain.digests[first : end // self.chunk_size * DIGEST_BYTES])
        if end % self.chunk_size:
            digests += chain.tail_digest() or b""
        blocks = tracker.block_ids[start // self.block_size : -(-end // self.block_size)]
        parent = bytes(chain.digests[first - DIGEST_BYTES : first]) if first else NO_PARENT
        return ReqMeta(tracker.req_id, start, end, digests, blocks, load, save, tracker.tenant, parent)


def extend(chain: PrefixChain, request: Request, num_tokens: int) -> None:
    """Hashes the request's tokens up to `num_tokens`, those that are new to the chain.

    A session's later inputs bring items of their own, which lie behind all tokens that were hashed.
    """
    if len(request.mm_features or ()) != len(chain.inserts):
        chain.inserts = request_inserts(request)
    if chain.num_tokens < num_tokens:
        # The list that `all_token_ids` is a view of: only a list is read without a copy.
        chain.extend(request._all_token_ids, chain.num_tokens, num_tokens)
