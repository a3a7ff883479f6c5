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
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvcache.config import LMCacheEngineConfig
from kvcache.integration.vllm.batches import Batches
from kvcache.integration.vllm.copies import Copies
from kvcache.integration.vllm.counters import HOST_TIER, Prompt, TokenCounters, tokens_by_tier
from kvcache.integration.vllm.doubts import BlockUse, Doubts
from kvcache.integration.vllm.first_tokens import FirstTokens
from kvcache.integration.vllm.identity import request_adapter, request_inserts, request_is_nameable
from kvcache.integration.vllm.lookups import Lookups
from kvcache.integration.vllm.metadata import (
    LMCacheConnectorMetadata,
    LMCacheWorkerMetadata,
    LoadSpec,
    ReqMeta,
)
from kvcache.integration.vllm.promises import Promise, Promises
from kvcache.integration.vllm.saves import Saves
from kvcache.integration.vllm.switches import read_switches
from kvcache.integration.vllm.trackers import RequestTracker, request_of
from kvcache.integration.vllm.windows import Windows
from kvcache.lookup.client import LookupClient
from kvcache.stats import SchedulerStats
from kvcache.storage.tenants import tenant_of
from kvcache.tokens.database import chain_root, chain_secret
from kvcache.tokens.hashing import PrefixChain

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


_COMPUTED_AS_FAST = 16
"""Fewer tokens than these behind vLLM's own are computed together with the last one in the time that this
takes: what is left of a prompt that vLLM has in full."""


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
        clock: seconds, monotonic.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._block_size = block_size
        self._lookup_client = lookup_client
        self._copies = copies
        self._caught = caught
        self._secret = chain_secret(config.hash_seed)
        self._trackers: dict[str, RequestTracker] = {}
        self._unused_lookups: list[str] = []
        self._held: list[str] = []
        self._promised = Promises(block_size)
        self._async_loads: list[str] = []
        self._others_loads: list[str] = []
        """Of other connectors, in the step that is being planned."""
        self._doubts = Doubts(block_size)
        self._windows = Windows(config.chunk_size, block_size, config.save_unfull_chunk)
        self._saves = Saves(config, kv_role, ranks, self._windows, self._trackers)
        self._batches = Batches(self._trackers)
        self.counters = TokenCounters()
        self.describe: Callable[[Request, int, int, bytes], None] = lambda request, first, last, digests: None
        """Called with chunks that are looked up or stored: tokens `[first, last)` and their digests."""
        self._planned_steps = 0
        self._heard = 0
        self.load_ahead: Callable[[str, int, ReqMeta], None] | None = None
        """Called with the lookups' session, a step's number, and each load that the step will wait for."""
        self._first_tokens = FirstTokens()
        self._lookups = Lookups(
            lookup_client, config.chunk_size, config.lease_timeout_s, self._seconds_per_token, clock
        )

    def adapt(self, config: LMCacheEngineConfig) -> None:
        """Goes on with another configuration, whose live fields alone differ. Any thread."""
        self._config = self._saves.config = config
        self._batches.wake_all()
        self._lookups.lease_timeout_s = config.lease_timeout_s

    # Admission

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond vLLM's own `num_computed_tokens` that the cache gives back, and whether the request
        waits for them outside of the batch. Asking again is free. None: more is being fetched from slower
        tiers, and vLLM is to ask again in its next step.

        A hit of the whole sequence leaves its last token to compute: the model must run to sample the next.
        """
        tracker = self._tracker(request)
        self._notice_preemption(tracker)
        tracker.local_tokens = num_computed_tokens
        if tracker.chain is None or tracker.switches.skip_load:
            return 0, False
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        if self._lookups.due(tracker, num_computed_tokens):
            self._lookup(tracker, tracker.chain, num_computed_tokens)
        if self._lookups.waits(tracker):
            return None, False
        hit = min(tracker.hit_tokens or 0, int(request.num_tokens) - 1)
        new = hit - num_computed_tokens
        if new < self._least(num_computed_tokens):
            tracker.load_spec = None
            return 0, False
        others = self._batches.others(tracker.req_id)
        waits = self._copies.worth_waiting_outside(self._config.async_loading, new, others)
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
            lookup_id = f"-/{request.request_id}" if tracker is None else tracker.lookup_id
            promise = Promise(lookup_id, own, list(block_ids) if waits else [])
            self._promised.add(request.request_id, promise)
        if tracker is None:
            return
        if num_external_tokens <= 0:
            tracker.load_spec = None
            self._drop_lookup(tracker)
        elif spec is not None:
            # Whatever vLLM made of our answer is what it relies on. What of it is not there, workers report.
            spec.lmcache_cached_tokens = spec.vllm_cached_tokens + num_external_tokens
            spec.can_load = True
            tracker.local_tokens = None
            if tracker.own_tokens is None:
                tracker.own_tokens = spec.vllm_cached_tokens
            tracker.block_ids = list(block_ids)
            if spec.load_async:
                self._async_loads.append(tracker.req_id)
                return
            tracker.loading = spec.lookup_id
            if tracker.chain is not None and self.load_ahead is not None:
                window = self._windows.to_load(tracker, tracker.chain, spec)
                self.load_ahead(self._lookup_client.session, self._planned_steps + 1, window)

    def hit_tiers(self, req_id: str, num_external_tokens: int) -> Counter[str]:
        """The tiers that give the tokens which vLLM was just promised."""
        tracker = self._trackers.get(req_id)
        if tracker is None or tracker.load_spec is None:
            return Counter()
        first = tracker.load_spec.vllm_cached_tokens
        return tokens_by_tier(tracker.sources, first, first + num_external_tokens)

    def request_finished(self, req_id: str) -> bool:
        """The request has ended in whatever way. True if its blocks must stay until its stores are done.

        Its lookup's lease ends here if no load was ever sent.
        """
        tracker = self._trackers.pop(req_id, None)
        self._batches.ended(req_id)
        if tracker is None:
            return False
        self._first_tokens.ended(req_id)
        self._doubts.blocks_left(tracker.block_ids)
        self._lookups.cancel(tracker)
        if not tracker.open_saves or not self._copies.run_behind:
            return False
        self._held.append(req_id)
        return True

    def forget_lookups(self) -> None:
        """What lookups found for requests that still wait is not good any more: they ask again."""
        for tracker in self._trackers.values():
            self._lookups.cancel(tracker)
            if tracker.load_spec is None or not tracker.load_spec.can_load:
                tracker.hit_tokens = tracker.load_spec = None

    def has_pending_work(self) -> bool:
        """Workers have stores to acknowledge: vLLM must go on stepping to hear of it."""
        return self._copies.run_behind and bool(self._saves or self._held)

    # Steps

    def build_connector_meta(self, output: SchedulerOutput) -> LMCacheConnectorMetadata:
        """What the workers load and store in this step."""
        preempted = getattr(output, "preempted_req_ids", None) or ()
        self._planned_steps += 1
        metadata = LMCacheConnectorMetadata(
            self._lookup_client.session,
            self._planned_steps,
            self._heard,
            lookup_requests_in_step=self._unused_lookups,
            others_loads=self._others_loads,
            held_requests=self._held,
            blocks_were_taken=bool(preempted),
        )
        self._first_tokens.look()
        self._saves.begin_step()
        for req_id in preempted:
            if req_id in self._trackers:
                self._notice_preemption(self._trackers[req_id])
        for req_id in self._async_loads:
            tracker = self._trackers.get(req_id)
            if tracker is not None:
                self._attempt(tracker, partial(self._add_async_load, metadata, tracker))
        steps = list(self._batches.step(output))
        self._doubts.step_planned([BlockUse(tracker.block_ids, *tokens) for tracker, *tokens in steps])
        for tracker, computed, _ in steps:
            self._attempt(tracker, partial(self._begin_step, metadata, tracker, computed))
        planned = {request.req_id for request in metadata.requests if request.load_spec is not None}
        self._lose_promises(metadata, output, without=planned)
        # Only now is it known which blocks are doubtful, whosever load it is.
        for tracker, computed, scheduled in steps:
            self._attempt(tracker, partial(self._add_save, metadata, tracker, computed, scheduled))
            until = 0 if self._doubts.unfilled else self._saves.rests_until(tracker, computed + scheduled)
            if until:
                # It will ask for nothing before; a failed load wakes it, since it may start over then.
                self._batches.rest(tracker.req_id, until)
        self._unused_lookups, self._held, self._async_loads, self._others_loads = [], [], [], []
        return metadata

    def lose_promises(self, output: SchedulerOutput) -> LMCacheConnectorMetadata:
        """Stands in for a step that could not be planned."""
        metadata = LMCacheConnectorMetadata(
            self._lookup_client.session,
            self._planned_steps,
            self._heard,
            lookup_requests_in_step=self._unused_lookups + self._promised.lookup_ids(),
            others_loads=self._others_loads,
            held_requests=self._held,
            blocks_were_taken=True,
        )
        self._unused_lookups, self._held, self._async_loads, self._others_loads = [], [], [], []
        self._saves.forget_step()
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
        for lost in self._promised.take_lost(output, without):
            metadata.lost_block_ids[lost.lookup_id] = lost.blocks
            if lost.waits:
                metadata.lost_async.append(lost.req_id)
            else:
                tokens = len(lost.blocks) * self._block_size
                self._doubts.load_planned(lost.lookup_id, lost.blocks, tokens)

    def heard_of_ready_loads(self) -> None:
        """vLLM counts asynchronous loads as ready that were reported in a step planned by now."""
        self._heard = self._planned_steps

    def update_connector_output(
        self, report: LMCacheWorkerMetadata, invalid_blocks: Collection[int] = ()
    ) -> None:
        """What the workers acknowledged and what failed to load, on our side or another connector's."""
        self._copies.observe(report.load_bytes, report.load_seconds)
        if invalid_blocks or any(report.finished_loads.values()):
            self._batches.wake_all()
        for lookup_id in report.others_loads:
            tables = (tracker.block_ids for tracker in self._trackers.values())
            self._doubts.others_load_ended(lookup_id, invalid_blocks, tables)
        self._saves.acknowledge(report.saves)
        for lookup_id, missing in report.finished_loads.items():
            tracker = self._trackers.get(request_of(lookup_id))
            tables = (other.block_ids for other in self._trackers.values())
            self._doubts.load_ended(lookup_id, missing, tables)
            self.counters.load_ended(lookup_id, missing)
            if tracker is None:
                continue
            if tracker.loading == lookup_id:
                tracker.loading = None
            if missing:
                # What the lookup found is not all there: what is computed in its place is stored.
                tracker.asked_tokens = 0

    @property
    def lookups(self) -> int:
        """Made so far."""
        return self._lookup_client.counters.lookups

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
            hit_cache_tokens={HOST_TIER: 0, **counters.hit_cache_tokens},
            computed_tokens=counters.computed_tokens,
            lookups=client.counters.lookups,
            lookup_seconds=client.counters.seconds,
            lookup_timeouts=client.counters.timeouts,
            lookup_waits=self._lookups.waited.waits,
            lookup_wait_seconds=self._lookups.waited.seconds,
            lookup_waits_expired=self._lookups.waited.expired,
            failures=dict(failures),
            first_token_seconds=self._first_tokens.stats(),
            prefill_tokens=self._first_tokens.prefill_tokens,
            prefill_seconds=self._first_tokens.prefill_seconds,
        )

    # Parts of a step

    def _tracker(self, request: Request) -> RequestTracker:
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            chain, switches = None, read_switches(request.kv_transfer_params)
            if request_is_nameable(request):
                root = chain_root(request_adapter(request), request.cache_salt or "", switches.tags)
                chain = PrefixChain(self._config.chunk_size, self._secret, root, request_inserts(request))
            tenant = tenant_of(request.cache_salt or "")
            tracker = self._trackers[request.request_id] = RequestTracker(request, chain, tenant, switches)
        return tracker

    def _lookup(self, tracker: RequestTracker, chain: PrefixChain, own_tokens: int) -> None:
        """Asks what all ranks have of the sequence, of which vLLM has `own_tokens` itself."""
        tokens = len(tracker.request.all_token_ids) - self._config.skip_last_n_tokens
        usable = self._windows.storable(tokens)
        digests = self._windows.prefix_digests(tracker, chain, usable)
        if not digests:
            tracker.hit_tokens = 0
            return
        self.describe(tracker.request, 0, usable, digests)
        # The last token of a whole sequence is computed in any case.
        least = self._least(own_tokens) + (usable == int(tracker.request.num_tokens))
        self._lookups.begin(tracker, digests, usable, own_tokens, least)

    def _least(self, own_tokens: int) -> int:
        """Tokens that are worth a load, behind `own_tokens` that vLLM has itself."""
        return max(1, self._config.min_retrieve_tokens, _COMPUTED_AS_FAST if own_tokens else 0)

    def _seconds_per_token(self) -> float:
        """What computing a prompt's token takes; 0 before any was measured."""
        tokens = self._first_tokens.prefill_tokens
        return self._first_tokens.prefill_seconds / tokens if tokens else 0.0

    def _drop_lookup(self, tracker: RequestTracker) -> None:
        """Ends, with the next step, the lease of a lookup that nothing is loaded for."""
        if tracker.hit_tokens or tracker.waits_until is not None:
            self._unused_lookups.append(tracker.lookup_id)
        self._lookups.drop(tracker)

    def _notice_preemption(self, tracker: RequestTracker) -> None:
        """A preempted request's blocks are gone; the workers' stores from them are ordered before whatever is
        written there. vLLM may have admitted it again before it names it as preempted."""
        if tracker.preemptions != tracker.request.num_preemptions:
            self._batches.wake(tracker.req_id)
            tracker.preemptions = int(tracker.request.num_preemptions)
            tracker.hit_tokens = None
            tracker.open_saves.clear()
            self._doubts.blocks_left(tracker.block_ids)
            tracker.block_ids = []

    def _add_async_load(self, metadata: LMCacheConnectorMetadata, tracker: RequestTracker) -> None:
        if tracker.chain is None or tracker.load_spec is None:
            return
        load, tracker.load_spec = tracker.load_spec, None
        metadata.requests.append(self._load(tracker, tracker.chain, load))

    def _begin_step(self, metadata: LMCacheConnectorMetadata, tracker: RequestTracker, computed: int) -> None:
        load = tracker.load_spec if tracker.load_spec is not None and tracker.load_spec.can_load else None
        tracker.load_spec = None
        self._count(tracker, computed)
        if computed < tracker.computed_tokens:
            # Started over, or rolled back after a failed load: what lies behind may be stored or not.
            tracker.asked_tokens = min(tracker.asked_tokens, self._windows.floor(computed))
            tracker.hole = False
        tracker.computed_tokens = computed
        self._notice_others_load(tracker, computed)
        if load is not None and tracker.chain is not None:
            request = self._load(tracker, tracker.chain, load)
            metadata.requests.append(request)
            tokens = load.lmcache_cached_tokens - load.vllm_cached_tokens
            self._doubts.load_planned(load.lookup_id, request.promised_blocks(self._block_size), tokens)

    def _notice_others_load(self, tracker: RequestTracker, computed: int) -> None:
        """Beside us, another connector may have promised tokens. Whether they came is known after the
        step."""
        local, tracker.local_tokens = tracker.local_tokens, None
        if local is not None and local < computed:
            blocks = tracker.block_ids[local // self._block_size : -(-computed // self._block_size)]
            lookup_id = f"other {tracker.lookup_id}"
            self._doubts.load_planned(lookup_id, blocks, len(blocks) * self._block_size)
            self._others_loads.append(lookup_id)

    def _add_save(
        self, metadata: LMCacheConnectorMetadata, tracker: RequestTracker, computed: int, scheduled: int
    ) -> None:
        if tracker.chain is not None and self._doubts.allow_storing(tracker.block_ids):
            save = self._saves.plan(tracker, tracker.chain, computed, scheduled)
            if save is not None:
                self.describe(tracker.request, save.first_token, save.num_tokens, save.digests)
                metadata.requests.append(save)

    def _load(self, tracker: RequestTracker, chain: PrefixChain, load: LoadSpec) -> ReqMeta:
        window = self._windows.to_load(tracker, chain, load)
        tracker.hit_tokens = 0  # the worker ends the lease with the load: there is nothing to cancel
        return window

    def _count(self, tracker: RequestTracker, computed: int) -> None:
        """Counts the request's prompt when it is first scheduled, `computed` of its tokens being there."""
        if tracker.scheduled:
            return
        tracker.scheduled = True
        prompt = int(tracker.request.num_prompt_tokens)
        on_gpu = min(computed if tracker.own_tokens is None else tracker.own_tokens, computed, prompt)
        hit = min(computed, prompt) - on_gpu
        self.counters.scheduled(Prompt(prompt, on_gpu, hit, tracker.sources), tracker.loading)
        self._first_tokens.scheduled(tracker.request, hit, on_gpu)
