# SPDX-License-Identifier: Apache-2.0
"""KV events: tells vLLM's subscribers (routers, mostly) what this cache holds, made from what the tiers of
the ranks report and nothing else.

A chunk is announced as the blocks of vLLM that it is made of, under vLLM's own block hashes, so that a
subscriber finds them equal to those of the GPU: `BlockStored` once every rank has the chunk, `BlockRemoved`
once the first one has not. What is announced is retracted before it is forgotten.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils

from kvcache.storage.changes import Changes
from kvcache.tokens.hashing import DIGEST_BYTES

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_CHUNKS = 1 << 16
"""Chunks that are remembered, 2 KiB each with 256 tokens of 16 blocks. Of more than these the oldest are
announced as removed: subscribers then know less than there is."""
MEDIUM_STORAGE = "STORAGE"

_untagged = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys)
"""vLLM tags the extra keys of its hashes from 0.31 on, but not those of its events."""


@dataclass
class _Blocks:
    """What an event says of a chunk."""

    hashes: list[Any]
    parent: Any
    tokens: array[int]
    lora_id: int | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None


@dataclass
class _Chunk:
    blocks: _Blocks | None = None
    """None as long as no request was seen that has the chunk."""
    ranks: dict[str, set[int]] = field(default_factory=dict)
    """Tier to the ranks that have it there."""
    announced: set[str] = field(default_factory=set)
    """Media."""


def medium_of(tier: str) -> str:
    """vLLM's label of where a tier keeps KV."""
    return MEDIUM_CPU if tier == "cpu" else MEDIUM_STORAGE


class KVEvents:
    """Of the scheduler's thread.

    Args:
        chunk_size: tokens.
        hash_block_size: tokens that one of vLLM's block hashes stands for.
        ranks: workers.
        spec_kind: vLLM's name of the kind of KV, such as `full_attention`.
        limit: chunks to remember.
    """

    def __init__(
        self,
        chunk_size: int,
        hash_block_size: int,
        ranks: int,
        spec_kind: str | None,
        limit: int = MAX_CHUNKS,
    ) -> None:
        self._chunk_size = chunk_size
        self._block_size = hash_block_size
        self._ranks = ranks
        self._kind = spec_kind
        self._limit = limit
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        self._events: list[Any] = []

    def describe(self, request: Request, first_token: int, num_tokens: int, digests: bytes) -> None:
        """Names chunks that are looked up or stored: the tokens `[first_token, num_tokens)` of a request.

        Args:
            digests: 16 bytes for each of them; the last one may be partial.
        """
        for index in range(len(digests) // DIGEST_BYTES):
            digest = bytes(digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES])
            chunk = self._remember(digest)
            if chunk.blocks is not None:
                continue
            start = first_token + index * self._chunk_size
            chunk.blocks = self._blocks_of(request, start, min(start + self._chunk_size, num_tokens))
            for tier in chunk.ranks:
                self._announce(chunk, medium_of(tier))

    def observe(self, reports: Iterable[tuple[int, Changes]]) -> None:
        """Takes in what the ranks report: rank and its changes, a rank's reports in their order."""
        for rank, (changes, lost) in reports:
            if lost:
                self.forget()
            for tier, digest, stored in changes:
                chunk = self._remember(digest)
                if stored:
                    chunk.ranks.setdefault(tier, set()).add(rank)
                    self._announce(chunk, medium_of(tier))
                else:
                    chunk.ranks.get(tier, set()).discard(rank)
                    self._retract(chunk, medium_of(tier))
                    if not any(chunk.ranks.values()):
                        self._chunks.move_to_end(digest, last=False)

    def forget(self) -> None:
        """Retracts all that was announced."""
        while self._chunks:
            self._drop_oldest()

    def take(self) -> Sequence[Any]:
        """The events since the last call: `BlockStored` and `BlockRemoved` of vLLM."""
        taken, self._events = self._events, []
        return taken

    def _remember(self, digest: bytes) -> _Chunk:
        chunk = self._chunks.get(digest)
        if chunk is None:
            while len(self._chunks) >= self._limit:
                self._drop_oldest()
            chunk = self._chunks[digest] = _Chunk()
        else:
            self._chunks.move_to_end(digest)
        return chunk

    def _drop_oldest(self) -> None:
        _, chunk = self._chunks.popitem(last=False)
        chunk.ranks.clear()
        for medium in sorted(chunk.announced):
            self._retract(chunk, medium)

    def _on_all_ranks(self, chunk: _Chunk, medium: str) -> bool:
        return any(
            len(ranks) == self._ranks for tier, ranks in chunk.ranks.items() if medium_of(tier) == medium
        )

    def _announce(self, chunk: _Chunk, medium: str) -> None:
        blocks = chunk.blocks
        if blocks is None or medium in chunk.announced or not self._on_all_ranks(chunk, medium):
            return
        chunk.announced.add(medium)
        self._add(
            BlockStored,
            block_hashes=list(blocks.hashes),
            parent_block_hash=blocks.parent,
            token_ids=list(blocks.tokens),
            block_size=self._block_size,
            lora_id=blocks.lora_id,
            medium=medium,
            lora_name=blocks.lora_name,
            extra_keys=blocks.extra_keys,
            group_idx=0,
            kv_cache_spec_kind=self._kind,
        )

    def _retract(self, chunk: _Chunk, medium: str) -> None:
        if chunk.blocks is None or medium not in chunk.announced or self._on_all_ranks(chunk, medium):
            return
        chunk.announced.remove(medium)
        self._add(BlockRemoved, block_hashes=list(chunk.blocks.hashes), medium=medium, group_idx=0)

    def _add(self, kind: Any, **fields: Any) -> None:
        """Leaves out what an older vLLM's event has no field for."""
        known = kind.__struct_fields__
        self._events.append(kind(**{name: value for name, value in fields.items() if name in known}))

    def _blocks_of(self, request: Request, start: int, end: int) -> _Blocks | None:
        """None where vLLM has no hashes of the tokens `[start, end)`."""
        size = self._block_size
        first, last = start // size, end // size
        hashes = request.block_hashes[first:last]
        if start % size or end % size or len(hashes) < last - first or first == last:
            return None
        lora = request.lora_request
        return _Blocks(
            hashes=[kv_cache_utils.maybe_convert_block_hash(block_hash) for block_hash in hashes],
            parent=kv_cache_utils.maybe_convert_block_hash(request.block_hashes[first - 1])
            if first
            else None,
            tokens=array("i", request.all_token_ids[start:end]),
            lora_id=None if lora is None else lora.lora_int_id,
            lora_name=None if lora is None else lora.lora_name,
            extra_keys=_extra_keys(request, first, last, size),
        )


def _extra_keys(
    request: Request, first: int, last: int, block_size: int
) -> list[tuple[Any, ...] | None] | None:
    """What the hash of each block `[first, last)` depends on besides its tokens, as vLLM's events say it."""
    keys, item = [], 0
    for block in range(first, last):
        start = block * block_size
        key, item = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + block_size, item)
        keys.append(key)
    untagged: list[tuple[Any, ...] | None] | None = _untagged(keys)
    return untagged


def hash_block_size(kv_cache_config: Any, vllm_config: Any) -> int:
    """Tokens that one of vLLM's block hashes stands for."""
    return int(kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])
