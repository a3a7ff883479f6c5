# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: which tokens are cached, what each step loads and stores, and where prompt tokens
came from.

A request's state is derived anew in each step from what vLLM says of it (computed and scheduled tokens, its
blocks), so that preemption, resumption and a roll-back after a failed load need no cases of their own.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvcache.config import LMCacheEngineConfig
from kvcache.integration.vllm.copies import Copies
from kvcache.integration.vllm.doubts import BlockUse, Doubts
from kvcache.integration.vllm.identity import request_adapter, request_inserts, request_is_nameable
from kvcache.integration.vllm.metadata import (
    LMCacheConnectorMetadata,
    LMCacheWorkerMetadata,
    LoadSpec,
    ReqMeta,
    SaveSpec,
)
from kvcache.lookup.client import LookupClient
from kvcache.stats import SchedulerStats
from kvcache.tokens.database import chain_root, chain_secret
from kvcache.tokens.hashing import DIGEST_BYTES, PrefixChain

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class RequestTracker:
    """What the scheduler remembers of a request between steps. Token counts are from the sequence's start."""

    request: Request
    chain: PrefixChain | None
    """None where the prompt cannot be named by token ids: nothing is looked up or stored."""
    hit_tokens: int | None = None
    """Answer of the lookup; None before it, and again after preemption; 0 once nothing is leased any more."""
    ask_again_at: float = 0.0
    """When half of the lease's time is over."""
    load_spec: LoadSpec | None = None
    block_ids: list[int] = field(default_factory=list)
    preemptions: int = 0
    """How often it was preempted, as far as known here."""
    computed_tokens: int = 0
    """Before the last step that it was in."""
    asked_tokens: int = 0
    """Found by the lookup, or asked of the workers to be stored."""
    open_saves: set[int] = field(default_factory=set)
    """Saves that read the request's blocks and are not acknowledged by all workers."""
    hole: bool = False
    """A store was not acknowledged in full: nothing behind the gap is stored until the request starts
    over."""
    own_tokens: int | None = None
    """Tokens that vLLM had itself when a load was promised for the first time; None if none was."""
    missing_tokens: int = 0
    """Of that load, what did not come."""
    counted_hit: int | None = None
    """Tokens counted as given back; None before the request was first scheduled."""

    @property
    def req_id(self) -> str:
        return str(self.request.request_id)

    @property
    def lookup_id(self) -> str:
        """Another one after each preemption, so that what ends one lookup's lease does not end the next
        one's."""
        return f"{self.preemptions}/{self.request.request_id}"


@dataclass
class _Save:
    """A save that not all workers have acknowledged."""

    req_id: str
    asked_tokens: int
    ranks_left: int
    saved_tokens: int


@dataclass
class TokenCounters:
    """Where prompt tokens came from; each one of a scheduled request is in exactly one of the three."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_gpu_tokens: int = 0
    hit_cache_tokens: int = 0
    computed_tokens: int = 0


class SchedulerSide:
    """All of the connector that lives in vLLM's scheduler. One thread.

    Args:
        config: the configuration.
        kv_role: `kv_both`, `kv_producer` (stores all, from the prompt's start) or `kv_consumer` (never
            stores).
        block_size: tokens of a block.
        lookup_client: asks the ranks.
        ranks: workers, of tensor x pipeline parallelism.
        copies: how the workers' copies run.
        caught: called with the name of the hook and the error when one request's part in a step could not be
            planned.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        kv_role: str,
        block_size: int,
        lookup_client: LookupClient,
        ranks: int,
        copies: Copies,
        caught: Callable[[str, Exception], None],
    ) -> None:
        self._config = config
        self._role = kv_role
        self._block_size = block_size
        self._lookup_client = lookup_client
        self._ranks = ranks
        self._copies = copies
        self._caught = caught
        self._secret = chain_secret(config.hash_seed)
        self._trackers: dict[str, RequestTracker] = {}
        self._unused_lookups: list[str] = []
        self._held: list[str] = []
        self._promised: dict[str, tuple[int, list[int]]] = {}
        """Requests whose load vLLM relies on from the step on that is being planned, with the tokens that it
        has itself and, if the load is asynchronous, the blocks."""
        self._async_loads: list[str] = []
        self._doubts = Doubts(block_size)
        self._saves: dict[int, _Save] = {}
        self._next_save = self._first_save = 0
        """Of the saves to come, and of those of the step that is being planned."""
        self._scheduled_before = 0
        """Requests in the last step."""
        self.counters = TokenCounters()

    # Admission

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens beyond vLLM's own `num_computed_tokens` that the cache gives back, and whether the request
        waits for them outside of the batch. Asking again is free.

        A hit of the whole sequence leaves its last token to compute: the model must run to sample the next.
        """
        tracker = self._tracker(request)
        self._notice_preemption(tracker)
        if tracker.chain is None or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        if tracker.hit_tokens is None or (tracker.hit_tokens and time.monotonic() > tracker.ask_again_at):
            tracker.hit_tokens = self._lookup(tracker, tracker.chain)
        hit = min(tracker.hit_tokens, int(request.num_tokens) - 1)
        new = hit - num_computed_tokens
        if new < max(1, self._config.min_retrieve_tokens):
            tracker.load_spec = None
            return 0, False
        waits = self._copies.worth_waiting_outside(self._config.async_loading, new, self._scheduled_before)
        tracker.load_spec = LoadSpec(
            num_computed_tokens, hit, can_load=False, lookup_id=tracker.lookup_id, load_async=waits
        )
        return new, waits

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """vLLM has allocated blocks and will count `num_external_tokens` as computed: just those are
        loaded."""
        tracker = self._trackers.get(request.request_id)
        spec = None if tracker is None else tracker.load_spec
        if num_external_tokens > 0:
            waits = spec is not None and spec.load_async
            own = 0 if spec is None else spec.vllm_cached_tokens
            self._promised[request.request_id] = (own, list(block_ids) if waits else [])
        if tracker is None:
            return
        if num_external_tokens <= 0:
            tracker.load_spec = None
            self._drop_lookup(tracker)
        elif spec is not None:
            # Whatever vLLM made of our answer is what it relies on. What of it is not there, workers report.
            spec.lmcache_cached_tokens = spec.vllm_cached_tokens + num_external_tokens
            spec.can_load = True
            if tracker.own_tokens is None:
                tracker.own_tokens = spec.vllm_cached_tokens
            if spec.load_async:
                tracker.block_ids = list(block_ids)
                self._async_loads.append(tracker.req_id)

    def request_finished(self, req_id: str) -> bool:
        """The request has ended in whatever way. True if its blocks must stay until its stores are done.

        Its lookup's lease ends here if no load was ever sent.
        """
        tracker = self._trackers.pop(req_id, None)
        if tracker is None:
            return False
        self._doubts.blocks_left(tracker.block_ids)
        if tracker.hit_tokens:
            self._lookup_client.cancel(tracker.lookup_id)
        else:
            self._lookup_client.clear(tracker.lookup_id)
        if not tracker.open_saves or not self._copies.run_behind:
            return False
        self._held.append(req_id)
        return True

    def forget_lookups(self) -> None:
        """What lookups found for requests that still wait is not good any more: they ask again."""
        for tracker in self._trackers.values():
            if tracker.hit_tokens:
                self._lookup_client.cancel(tracker.lookup_id)
            if tracker.load_spec is None or not tracker.load_spec.can_load:
                tracker.hit_tokens = tracker.load_spec = None

    def has_pending_work(self) -> bool:
        """Workers have stores to acknowledge: vLLM must go on stepping to hear of it."""
        return self._copies.run_behind and bool(self._saves or self._held)

    # Steps

    def build_connector_meta(self, output: SchedulerOutput) -> LMCacheConnectorMetadata:
        """What the workers load and store in this step."""
        preempted = getattr(output, "preempted_req_ids", None) or ()
        metadata = LMCacheConnectorMetadata(
            self._lookup_client.session,
            lookup_requests_in_step=self._unused_lookups,
            held_requests=self._held,
            blocks_were_taken=bool(preempted),
        )
        self._first_save = self._next_save
        self._scheduled_before = len(output.num_scheduled_tokens)
        for req_id in preempted:
            if req_id in self._trackers:
                self._notice_preemption(self._trackers[req_id])
        for req_id in self._async_loads:
            tracker = self._trackers.get(req_id)
            if tracker is not None:
                self._attempt(tracker, partial(self._add_async_load, metadata, tracker))
        steps = list(self._scheduled(output))
        self._doubts.step_planned([BlockUse(tracker.block_ids, *tokens) for tracker, *tokens in steps])
        for tracker, computed, _ in steps:
            self._attempt(tracker, partial(self._begin_step, metadata, tracker, computed))
        planned = {request.req_id for request in metadata.requests if request.load_spec is not None}
        self._lose_promises(metadata, output, without=planned)
        # Only now is it known which blocks are doubtful, whosever load it is.
        for tracker, computed, scheduled in steps:
            self._attempt(tracker, partial(self._add_save, metadata, tracker, computed, scheduled))
        self._unused_lookups, self._held, self._async_loads = [], [], []
        return metadata

    def lose_promises(self, output: SchedulerOutput) -> LMCacheConnectorMetadata:
        """Stands in for a step that could not be planned."""
        metadata = LMCacheConnectorMetadata(
            self._lookup_client.session,
            lookup_requests_in_step=self._unused_lookups
            + [self._trackers[req_id].lookup_id for req_id in self._promised if req_id in self._trackers],
            held_requests=self._held,
            blocks_were_taken=True,
        )
        self._unused_lookups, self._held, self._async_loads = [], [], []
        for save_id in [save_id for save_id in self._saves if save_id >= self._first_save]:
            save = self._saves.pop(save_id)
            save.saved_tokens = 0
            self._acknowledged(save_id, save)
        for req_id in output.num_scheduled_tokens:
            if req_id in self._trackers:
                # Which blocks it has now may not be known any more.
                self._give_up(self._trackers[req_id])
        self._lose_promises(metadata, output, without=())
        return metadata

    def _attempt(self, tracker: RequestTracker, plan: Callable[[], None]) -> None:
        """Plans one request's part in a step. What fails costs its use of the cache, not the others'."""
        try:
            plan()
        except Exception as error:
            self._caught("build_connector_meta", error)
            self._give_up(tracker)

    def _give_up(self, tracker: RequestTracker) -> None:
        tracker.chain = None
        self._drop_lookup(tracker)

    def _lose_promises(
        self, metadata: LMCacheConnectorMetadata, output: SchedulerOutput, without: Collection[str]
    ) -> None:
        """Names the blocks that vLLM takes for loaded in this step, leaving out the requests `without`."""
        promised, self._promised = self._promised, {}
        if promised.keys() <= set(without):
            return
        cached = output.scheduled_cached_reqs
        blocks = {new.req_id: new.block_ids[0] for new in output.scheduled_new_reqs}
        blocks |= {
            req_id: ids[0] for req_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True) if ids
        }
        for req_id, (own_tokens, waiting_blocks) in promised.items():
            if req_id in without:
                continue
            lost = (waiting_blocks or blocks.get(req_id, []))[own_tokens // self._block_size :]
            metadata.lost_block_ids[req_id] = lost
            if waiting_blocks:
                metadata.lost_async.append(req_id)
            else:
                self._doubts.load_planned(req_id, lost, len(lost) * self._block_size)

    def update_connector_output(self, report: LMCacheWorkerMetadata) -> None:
        """What the workers acknowledged and what failed to load."""
        self._copies.observe(report.load_bytes, report.load_seconds)
        for save_id, (saved, ranks) in report.saves.items():
            save = self._saves[save_id]
            save.ranks_left -= ranks
            save.saved_tokens = min(save.saved_tokens, saved)
            if save.ranks_left <= 0:
                self._acknowledged(save_id, self._saves.pop(save_id))
        for req_id, missing in report.finished_loads.items():
            tracker = self._trackers.get(req_id)
            self._doubts.load_ended(req_id, missing, (other.block_ids for other in self._trackers.values()))
            if missing and tracker is not None:
                # What the lookup found is not all there: what is computed in its place is stored.
                tracker.asked_tokens = 0
            if tracker is None or missing <= tracker.missing_tokens:
                continue
            if tracker.counted_hit is not None:
                wrong = min(missing - tracker.missing_tokens, tracker.counted_hit)
                tracker.counted_hit -= wrong
                self.counters.hit_cache_tokens -= wrong
                self.counters.computed_tokens += wrong
            tracker.missing_tokens = missing

    def stats(self, failures: Counter[str]) -> SchedulerStats:
        """A snapshot; safe to take from another thread, since it reads single counters."""
        client, counters = self._lookup_client, self.counters
        return SchedulerStats(
            pid=os.getpid(),
            ready=True,
            reason="",
            requests=counters.requests,
            prompt_tokens=counters.prompt_tokens,
            hit_gpu_tokens=counters.hit_gpu_tokens,
            hit_cache_tokens={"cpu": counters.hit_cache_tokens},
            computed_tokens=counters.computed_tokens,
            lookups=client.counters.lookups,
            lookup_seconds=client.counters.seconds,
            lookup_timeouts=client.counters.timeouts,
            failures=dict(failures),
        )

    # Parts of a step

    def _tracker(self, request: Request) -> RequestTracker:
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            chain = None
            if request_is_nameable(request):
                root = chain_root(request_adapter(request), request.cache_salt or "")
                chain = PrefixChain(self._config.chunk_size, self._secret, root, request_inserts(request))
            tracker = self._trackers[request.request_id] = RequestTracker(request, chain)
        return tracker

    def _lookup(self, tracker: RequestTracker, chain: PrefixChain) -> int:
        """Tokens from the start that all ranks have, leased to the request."""
        usable = self._storable(len(tracker.request.all_token_ids) - self._config.skip_last_n_tokens)
        _extend(chain, tracker.request, usable)
        digests = bytes(chain.digests[: usable // self._config.chunk_size * DIGEST_BYTES])
        if usable % self._config.chunk_size and usable == chain.num_tokens:
            digests += chain.tail_digest() or b""
        if not digests:
            return 0
        tracker.ask_again_at = time.monotonic() + self._config.lease_timeout_s / 2
        chunks = self._lookup_client.lookup(tracker.lookup_id, digests).chunks
        hit = min(chunks * self._config.chunk_size, usable)
        tracker.asked_tokens = max(tracker.asked_tokens, self._floor(hit))
        return hit

    def _drop_lookup(self, tracker: RequestTracker) -> None:
        """Ends, with the next step, the lease of a lookup that nothing is loaded for."""
        if tracker.hit_tokens:
            self._unused_lookups.append(tracker.lookup_id)
        tracker.hit_tokens = 0

    def _notice_preemption(self, tracker: RequestTracker) -> None:
        """A preempted request's blocks are gone; the workers' stores from them are ordered before whatever is
        written there. vLLM may have admitted it again before it names it as preempted."""
        if tracker.preemptions != tracker.request.num_preemptions:
            tracker.preemptions = int(tracker.request.num_preemptions)
            tracker.hit_tokens = None
            tracker.open_saves.clear()
            self._doubts.blocks_left(tracker.block_ids)
            tracker.block_ids = []

    def _acknowledged(self, save_id: int, save: _Save) -> None:
        tracker = self._trackers.get(save.req_id)
        if tracker is None:
            return
        tracker.open_saves.discard(save_id)
        if save.saved_tokens < save.asked_tokens:
            tracker.asked_tokens, tracker.hole = min(tracker.asked_tokens, save.saved_tokens), True

    def _add_async_load(self, metadata: LMCacheConnectorMetadata, tracker: RequestTracker) -> None:
        if tracker.chain is None or tracker.load_spec is None:
            return
        load, tracker.load_spec = tracker.load_spec, None
        metadata.requests.append(self._load_window(tracker, tracker.chain, load))

    def _scheduled(self, output: SchedulerOutput) -> Iterator[tuple[RequestTracker, int, int]]:
        """The requests of a step, their blocks brought up to date, with computed and scheduled tokens."""
        for new in output.scheduled_new_reqs:
            tracker = self._trackers.get(new.req_id)
            if tracker is not None:
                tracker.block_ids = list(new.block_ids[0])
                yield tracker, new.num_computed_tokens, output.num_scheduled_tokens[new.req_id]
        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            tracker = self._trackers.get(req_id)
            if tracker is None:
                continue
            new_blocks = cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:
                tracker.block_ids = list(new_blocks[0]) if new_blocks else []
            elif new_blocks:
                tracker.block_ids.extend(new_blocks[0])
            yield tracker, cached.num_computed_tokens[index], output.num_scheduled_tokens[req_id]

    def _begin_step(self, metadata: LMCacheConnectorMetadata, tracker: RequestTracker, computed: int) -> None:
        load = tracker.load_spec if tracker.load_spec is not None and tracker.load_spec.can_load else None
        tracker.load_spec = None
        self._count(tracker, computed)
        if computed < tracker.computed_tokens:
            # Started over, or rolled back after a failed load: what lies behind may be stored or not.
            tracker.asked_tokens, tracker.hole = min(tracker.asked_tokens, self._floor(computed)), False
        tracker.computed_tokens = computed
        if load is not None and tracker.chain is not None:
            request = self._load_window(tracker, tracker.chain, load)
            metadata.requests.append(request)
            tokens = load.lmcache_cached_tokens - load.vllm_cached_tokens
            self._doubts.load_planned(tracker.req_id, request.promised_blocks(self._block_size), tokens)

    def _add_save(
        self, metadata: LMCacheConnectorMetadata, tracker: RequestTracker, computed: int, scheduled: int
    ) -> None:
        if tracker.chain is not None:
            save = self._save_window(tracker, tracker.chain, computed, scheduled)
            if save is not None:
                metadata.requests.append(save)

    def _save_window(
        self, tracker: RequestTracker, chain: PrefixChain, computed: int, scheduled: int
    ) -> ReqMeta | None:
        """What to store after this step: whole chunks whose KV will be there and cannot be taken back."""
        if self._role == "kv_consumer" or tracker.hole:
            return None
        if not self._doubts.allow_storing(tracker.block_ids):
            return None
        prompt = tracker.request.num_prompt_tokens - self._config.skip_last_n_tokens
        there = min(computed + scheduled, prompt)
        if self._config.save_decode_cache:
            # Tokens scheduled behind the prompt may be drafts; those computed by earlier steps are accepted.
            there = max(there, min(computed, len(tracker.request.all_token_ids)))
        end = self._storable(there) if there == prompt else self._floor(there)
        if end <= tracker.asked_tokens:
            return None
        _extend(chain, tracker.request, end)
        if chain.num_tokens > end:
            # Hashed on for a lookup behind the prompt: a partial chunk that ends here has no digest any more.
            end = self._floor(end)
            if end <= tracker.asked_tokens:
                return None
        skip = 0 if self._role == "kv_producer" else self._floor(tracker.asked_tokens)
        save_id = self._next_save
        window = self._window(tracker, chain, skip, end, None, SaveSpec(skip, can_save=True, save_id=save_id))
        self._next_save += 1
        self._saves[save_id] = _Save(tracker.req_id, end, self._ranks, end)
        tracker.asked_tokens = end
        tracker.open_saves.add(save_id)
        return window

    def _load_window(self, tracker: RequestTracker, chain: PrefixChain, load: LoadSpec) -> ReqMeta:
        start, end = self._floor(load.vllm_cached_tokens), self._chunk_end(chain, load.lmcache_cached_tokens)
        window = self._window(tracker, chain, start, end, load, None)
        tracker.hit_tokens = 0  # the worker ends the lease with the load: there is nothing to cancel
        return window

    def _window(
        self,
        tracker: RequestTracker,
        chain: PrefixChain,
        start: int,
        end: int,
        load: LoadSpec | None,
        save: SaveSpec | None,
    ) -> ReqMeta:
        chunk, block = self._config.chunk_size, self._block_size
        digests = bytes(chain.digests[start // chunk * DIGEST_BYTES : end // chunk * DIGEST_BYTES])
        if end % chunk:
            digests += chain.tail_digest() or b""
        blocks = tracker.block_ids[start // block : -(-end // block)]
        return ReqMeta(tracker.req_id, start, end, digests, blocks, load, save)

    def _count(self, tracker: RequestTracker, computed: int) -> None:
        """Counts the request's prompt when it is first scheduled, `computed` of its tokens being there."""
        if tracker.counted_hit is not None:
            return
        prompt = int(tracker.request.num_prompt_tokens)
        on_gpu = min(computed if tracker.own_tokens is None else tracker.own_tokens, computed, prompt)
        tracker.counted_hit = min(computed, prompt) - on_gpu
        self.counters.requests += 1
        self.counters.prompt_tokens += prompt
        self.counters.hit_cache_tokens += tracker.counted_hit
        self.counters.hit_gpu_tokens += on_gpu
        self.counters.computed_tokens += prompt - tracker.counted_hit - on_gpu

    def _floor(self, tokens: int) -> int:
        return tokens // self._config.chunk_size * self._config.chunk_size

    def _storable(self, tokens: int) -> int:
        """How many of a sequence's tokens are looked up or stored: whole chunks, or else whole blocks, since
        a page's bytes need not be in the order of its tokens."""
        unit = self._block_size if self._config.save_unfull_chunk else self._config.chunk_size
        return max(0, tokens) // unit * unit

    def _chunk_end(self, chain: PrefixChain, tokens: int) -> int:
        """The end of the chunk that the token before `tokens` lies in, cut to what the sequence has."""
        chunk = self._config.chunk_size
        return min(-(-tokens // chunk) * chunk, chain.num_tokens)


def _extend(chain: PrefixChain, request: Request, num_tokens: int) -> None:
    """Hashes the request's tokens up to `num_tokens`, those that are new to the chain.

    A session's later inputs bring items of their own, which lie behind all tokens that were hashed.
    """
    if len(request.mm_features or ()) != len(chain.inserts):
        chain.inserts = request_inserts(request)
    if chain.num_tokens < num_tokens:
        chain.extend(request.all_token_ids[chain.num_tokens : num_tokens])
