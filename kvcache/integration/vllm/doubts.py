# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's blocks may hold something else than the KV of their tokens: nothing that was computed upon
them is stored.

vLLM takes a load for done when it schedules it, and lets others find its blocks at once. If the load fails,
one of the requests that have the blocks is to compute them again; should that one go before it did, vLLM
itself lets the others go on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class BlockUse(NamedTuple):
    """What a request does in a step with its blocks."""

    table: list[int]
    computed: int
    scheduled: int


@dataclass
class _Load:
    """Its outcome is open."""

    blocks: list[int]
    """That it fills, in the order of their tokens."""
    tokens: int
    upon: set[int] = field(default_factory=set)
    """Of requests that computed upon them and are gone."""


class Doubts:
    """Follows blocks from the scheduling of a load until they are known to be right.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._loads: dict[str, _Load] = {}
        """By lookup: with several batches in flight a request can have two loads of which nothing is heard
        yet."""
        self._unfilled: set[int] = set()
        """A load of them failed, or they were computed upon such, and nobody has written them since."""

    @property
    def unfilled(self) -> bool:
        """Whether any block is known to hold something else."""
        return bool(self._unfilled)

    @property
    def open_loads(self) -> int:
        return len(self._loads)

    def allow_storing(self, table: Iterable[int]) -> bool:
        """Whether what is computed upon these blocks is right as far as known. If a load fails on one rank,
        all of them compute upon what that rank has."""
        if not self._loads and not self._unfilled:
            return True
        blocks = set(table)
        return blocks.isdisjoint(self._unfilled) and all(
            blocks.isdisjoint(load.blocks) for load in self._loads.values()
        )

    def load_planned(self, lookup_id: str, blocks: list[int], tokens: int) -> None:
        """vLLM relies on a load of `tokens` tokens from the start of the first block on."""
        self._loads[lookup_id] = _Load(blocks, tokens)

    def load_ended(self, lookup_id: str, missing: int, tables: Iterable[Sequence[int]]) -> None:
        """The last `missing` tokens did not come; `tables` are the blocks of all requests now."""
        load = self._loads.pop(lookup_id, None)
        if load is None or not missing:
            return
        self._unfilled.update(load.blocks[max(0, load.tokens - missing) // self._block_size :], load.upon)
        for table in tables:
            first = next((at for at, block in enumerate(table) if block in self._unfilled), None)
            if first is not None:
                self._unfilled.update(table[first:])

    def others_load_ended(
        self, lookup_id: str, invalid: Collection[int], tables: Iterable[Sequence[int]]
    ) -> None:
        """As `load_ended`, of a load that another connector did: `invalid` blocks were not filled."""
        load = self._loads.get(lookup_id)
        if load is not None:
            filled = next((at for at, block in enumerate(load.blocks) if block in invalid), len(load.blocks))
            self.load_ended(lookup_id, max(0, load.tokens - filled * self._block_size), tables)

    def blocks_left(self, table: Sequence[int]) -> None:
        """A request is gone, but others may find its blocks in vLLM's prefix cache."""
        for load in self._loads.values():
            if not set(load.blocks).isdisjoint(table):
                load.upon.update(table)

    def step_planned(self, uses: Sequence[BlockUse]) -> None:
        """Follows who reads and who writes unfilled blocks in a step."""
        if not self._unfilled:
            return
        readers = []
        for use in uses:
            first, last = (
                -(-tokens // self._block_size) for tokens in (use.computed, use.computed + use.scheduled)
            )
            reads, writes = use.table[:first], use.table[first:last]
            if self._unfilled.isdisjoint(reads):
                self._unfilled.difference_update(writes)
            else:
                readers.append((reads, writes))
        for reads, writes in readers:
            # In each layer all of a step's KV is written before any of it is read.
            if not self._unfilled.isdisjoint(reads):
                self._unfilled.update(writes)
