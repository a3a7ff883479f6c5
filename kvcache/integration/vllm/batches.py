# SPDX-License-Identifier: Apache-2.0
"""Which requests a step has, and their blocks. Those that rest cost a step nothing but their new blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvcache.integration.vllm.trackers import RequestTracker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Batches:
    """Of one scheduler. One thread.

    Args:
        trackers: requests by their ids.
    """

    def __init__(self, trackers: Mapping[str, RequestTracker]) -> None:
        self._trackers = trackers
        self._resting: dict[str, float] = {}
        """Running requests of which all that there is to store is asked for, until they have computed so many
        tokens: most of a large batch."""
        self._last: set[str] = set()
        """In the last step, and not ended since."""

    def others(self, req_id: str) -> int:
        """Requests of the last step that go on, besides this one."""
        return len(self._last) - (req_id in self._last)

    def step(self, output: SchedulerOutput) -> Iterator[tuple[RequestTracker, int, int]]:
        """The requests of a step that do not rest, their blocks brought up to date, with computed and
        scheduled tokens."""
        self._last = set(output.num_scheduled_tokens)
        resting = self._resting
        for new in output.scheduled_new_reqs:
            tracker = self._trackers.get(new.req_id)
            if tracker is not None:
                resting.pop(new.req_id, None)
                tracker.block_ids = list(new.block_ids[0])
                yield tracker, new.num_computed_tokens, output.num_scheduled_tokens[new.req_id]
        cached = output.scheduled_cached_reqs
        for req_id in cached.resumed_req_ids:
            resting.pop(req_id, None)
        steps = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for req_id, new_blocks, computed in steps:
            if computed < resting.get(req_id, 0):
                if new_blocks:
                    self._trackers[req_id].block_ids.extend(new_blocks[0])
                continue
            tracker = self._trackers.get(req_id)
            if tracker is None:
                continue
            if req_id in cached.resumed_req_ids:
                tracker.block_ids = list(new_blocks[0]) if new_blocks else []
            elif new_blocks:
                tracker.block_ids.extend(new_blocks[0])
            yield tracker, computed, output.num_scheduled_tokens[req_id]

    def rest(self, req_id: str, until: float) -> None:
        """Takes a request out of the steps to come until it has computed so many tokens. Preemption wakes
        it."""
        self._resting[req_id] = until

    def wake(self, req_id: str) -> None:
        self._resting.pop(req_id, None)

    def wake_all(self) -> None:
        self._resting.clear()

    def ended(self, req_id: str) -> None:
        self.wake(req_id)
        self._last.discard(req_id)
