# SPDX-License-Identifier: Apache-2.0
"""Loads that vLLM relies on from the step on that is being planned, and what it must hear of those that do
not come."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True)
class Promise:
    """One request's load."""

    lookup_id: str
    own_tokens: int
    """That vLLM has itself."""
    waiting_blocks: list[int]
    """Of an asynchronous load; empty for others."""


class Lost(NamedTuple):
    """A load that was not planned."""

    req_id: str
    lookup_id: str
    blocks: list[int]
    """Whose KV vLLM takes for loaded."""
    waits: bool
    """The request waits outside of the batch for the load's end."""


class Promises:
    """Of one step.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._made: dict[str, Promise] = {}

    def __len__(self) -> int:
        return len(self._made)

    def add(self, req_id: str, promise: Promise) -> None:
        self._made[req_id] = promise

    def clear(self) -> None:
        self._made.clear()

    def lookup_ids(self) -> list[str]:
        return [promise.lookup_id for promise in self._made.values()]

    def take_lost(self, output: SchedulerOutput, planned: Collection[str]) -> list[Lost]:
        """Ends the step: the promises to all requests but those `planned`."""
        made, self._made = self._made, {}
        if made.keys() <= set(planned):
            return []
        cached = output.scheduled_cached_reqs
        tables = {new.req_id: new.block_ids[0] for new in output.scheduled_new_reqs}
        tables |= {
            req_id: ids[0] for req_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True) if ids
        }
        lost = []
        for req_id, promise in made.items():
            if req_id not in planned:
                table = promise.waiting_blocks or tables.get(req_id, [])
                blocks = list(table[promise.own_tokens // self._block_size :])
                lost.append(Lost(req_id, promise.lookup_id, blocks, bool(promise.waiting_blocks)))
        return lost
