# SPDX-License-Identifier: Apache-2.0
"""What is stored after each step, and what the workers have acknowledged of it.

Tokens count as saved when all workers say so, and nothing behind a gap is stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvcache.config import LMCacheEngineConfig
from kvcache.integration.vllm.metadata import ReqMeta
from kvcache.integration.vllm.trackers import RequestTracker
from kvcache.integration.vllm.windows import Windows, extend
from kvcache.tokens.hashing import PrefixChain


@dataclass
class _Save:
    """One that not all workers have acknowledged."""

    req_id: str
    asked_tokens: int
    ranks_left: int
    saved_tokens: int


class Saves:
    """Of all requests. One thread.

    Args:
        config: the configuration.
        kv_role: `kv_producer` stores all, from the prompt's start, `kv_consumer` nothing.
        ranks: workers that acknowledge.
        windows: cuts sequences.
        trackers: requests by their ids.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        kv_role: str,
        ranks: int,
        windows: Windows,
        trackers: Mapping[str, RequestTracker],
    ) -> None:
        self.config = config
        self._role = kv_role
        self._ranks = ranks
        self._windows = windows
        self._trackers = trackers
        self._open: dict[int, _Save] = {}
        self._next = self._first = 0
        """Of the saves to come, and of those of the step that is being planned."""

    def __len__(self) -> int:
        """Saves that not all workers have acknowledged."""
        return len(self._open)

    def begin_step(self) -> None:
        """What is planned from now on belongs to one step."""
        self._first = self._next

    def forget_step(self) -> None:
        """Nothing of the step reaches the workers."""
        for save_id in [save_id for save_id in self._open if save_id >= self._first]:
            save = self._open.pop(save_id)
            save.saved_tokens = 0
            self._ended(save_id, save)

    def acknowledge(self, saves: Mapping[int, tuple[int, int]]) -> None:
        """What workers have stored: save to tokens, from the sequence's start without a gap, and to the
        number of workers that say so."""
        for save_id, (saved, ranks) in saves.items():
            save = self._open[save_id]
            save.ranks_left -= ranks
            save.saved_tokens = min(save.saved_tokens, saved)
            if save.ranks_left <= 0:
                self._ended(save_id, self._open.pop(save_id))

    def plan(
        self, tracker: RequestTracker, chain: PrefixChain, computed: int, scheduled: int
    ) -> ReqMeta | None:
        """What to store after this step: whole chunks whose KV will be there and cannot be taken back."""
        if not self._stores(tracker):
            return None
        floor, prompt = self._windows.floor, self._prompt(tracker)
        there = min(computed + scheduled, prompt)
        if self.config.save_decode_cache:
            # Tokens scheduled behind the prompt may be drafts; those computed by earlier steps are accepted.
            there = max(there, min(computed, len(tracker.request.all_token_ids)))
        end = self._windows.storable(there) if there == prompt else floor(there)
        if end <= tracker.asked_tokens:
            return None
        extend(chain, tracker.request, end)
        if chain.num_tokens > end:
            # Hashed on for a lookup behind the prompt: a partial chunk that ends here has no digest any more.
            end = floor(end)
            if end <= tracker.asked_tokens:
                return None
        start = 0 if self._role == "kv_producer" else floor(tracker.asked_tokens)
        window = self._windows.to_save(tracker, chain, start, end, self._next)
        self._open[self._next] = _Save(tracker.req_id, end, self._ranks, end)
        tracker.asked_tokens = end
        tracker.open_saves.add(self._next)
        self._next += 1
        return window

    def rests_until(self, tracker: RequestTracker, computed: int) -> float:
        """How many tokens a request of which `computed` are there must have before there is something to
        store of it again; 0 if there is now."""
        if computed < self._prompt(tracker):
            return 0
        if tracker.chain is None or not self._stores(tracker):
            return math.inf
        if tracker.asked_tokens < self._windows.storable(self._prompt(tracker)):
            return 0
        if self.config.save_decode_cache:
            return self._windows.floor(tracker.asked_tokens) + self._windows.chunk_size
        return math.inf

    def _stores(self, tracker: RequestTracker) -> bool:
        return self._role != "kv_consumer" and not tracker.switches.skip_save and not tracker.hole

    def _prompt(self, tracker: RequestTracker) -> int:
        return int(tracker.request.num_prompt_tokens) - self.config.skip_last_n_tokens

    def _ended(self, save_id: int, save: _Save) -> None:
        tracker = self._trackers.get(save.req_id)
        if tracker is None:
            return
        tracker.open_saves.discard(save_id)
        if save.saved_tokens < save.asked_tokens:
            tracker.asked_tokens, tracker.hole = min(tracker.asked_tokens, save.saved_tokens), True
