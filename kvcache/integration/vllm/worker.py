# SPDX-License-Identifier: Apache-2.0
"""The worker's side: carries out a step's loads and stores on one rank.

A request whose load fails is reported to the block (`get_block_ids_with_load_errors`), so that vLLM computes
it; an error while one request is served leaves the others alone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from kvcache.engine import LMCacheEngine
from kvcache.integration.vllm.metadata import (
    LMCacheConnectorMetadata,
    LoadSpec,
    ReqMeta,
    SaveSpec,
    StepReport,
)
from kvcache.lookup.wire import lease_owner
from kvcache.stats import RankStats


class WorkerSide:
    """All of the connector that lives in one of vLLM's worker processes. One thread, except `stats`.

    Args:
        engine: the engine of this rank.
        block_size: tokens of a block.
        rank: of tensor x pipeline parallelism.
        report: collects what the scheduler must hear.
        caught: called with the name of the hook and the error when one request's load or store failed.
    """

    def __init__(
        self,
        engine: LMCacheEngine,
        block_size: int,
        rank: int,
        report: StepReport,
        caught: Callable[[str, Exception], None],
    ) -> None:
        self.engine = engine
        self._block_size = block_size
        self._rank = rank
        self._caught = caught
        self._report = report

    def start_load_kv(self, metadata: LMCacheConnectorMetadata) -> None:
        """Loads what this step's requests were promised; on a GPU ordered before the model's next kernels."""
        session = metadata.lookup_session
        self.engine.lookup_unpin(
            [lease_owner(session, req_id) for req_id in metadata.lookup_requests_in_step]
        )
        for request in metadata.requests:
            if request.load_spec is not None and request.load_spec.can_load:
                self._load(request, request.load_spec, lease_owner(session, request.req_id))

    def wait_for_save(self, metadata: LMCacheConnectorMetadata) -> None:
        """Stores what this step has computed; the model's next kernels wait until their pages were read."""
        for request in metadata.requests:
            if request.save_spec is not None and request.save_spec.can_save:
                self._store(request, request.save_spec)
        self.engine.poll()

    def stats(self, namespace: bytes, transfer_path: str, failures: Counter[str]) -> RankStats:
        """A snapshot; safe to take from another thread."""
        counters = self.engine.counters
        return RankStats(
            rank=self._rank,
            pid=os.getpid(),
            ready=True,
            reason="",
            transfer_path=transfer_path,
            namespace=namespace.hex(),
            stored_tokens=counters.stored_tokens,
            loaded_tokens=counters.loaded_tokens,
            load_failed_tokens=counters.load_failed_tokens,
            failures=dict(failures + counters.failures),
            tiers=self.engine.storage.stats(),
        )

    def _load(self, request: ReqMeta, spec: LoadSpec, owner: str) -> None:
        slots = request.slot_mapping(self._block_size)
        # Window positions. vLLM's own pages stay untouched, and so does the page of what is left to compute.
        first, last = (
            tokens - request.first_token for tokens in (spec.vllm_cached_tokens, spec.lmcache_cached_tokens)
        )
        slots[:first] = slots[last:] = -1
        wanted = torch.ones(len(slots), dtype=torch.bool)
        wanted[: first // self.engine.database.chunk_size * self.engine.database.chunk_size] = False
        loaded = first
        try:
            there = self.engine.retrieve(
                mask=wanted, slot_mapping=slots, digests=request.digests, lookup_id=owner
            )
            missing = (~there[first:last]).nonzero()
            loaded = last if not len(missing) else first + int(missing[0])
        except Exception as error:
            self._caught("retrieve", error)
        self._report.worker.finished_loads[request.req_id] = 0
        if loaded < last:
            self.record_failed_blocks(request, last - loaded, loaded)

    def record_failed_blocks(self, request: ReqMeta, tokens: int, first_missing: int) -> None:
        """Reports the blocks of the promised tokens from window position `first_missing` on."""
        self._report.lose(request.req_id, tokens, request.promised_blocks(self._block_size, first_missing))
        self.engine.counters.load_failed_tokens += tokens
        self.engine.counters.failures["LoadIncomplete"] += 1

    def _store(self, request: ReqMeta, spec: SaveSpec) -> None:
        slots = request.slot_mapping(self._block_size)
        mask = torch.ones(len(slots), dtype=torch.bool)
        skipped = max(0, spec.skip_leading_tokens - request.first_token)
        mask[:skipped] = False
        acknowledge = partial(self._stored, request.req_id, request.first_token, request.num_tokens)
        try:
            self.engine.store(mask=mask, slot_mapping=slots, digests=request.digests, on_stored=acknowledge)
        except Exception as error:
            self._caught("store", error)
            acknowledge(skipped)

    def _stored(self, req_id: str, first_token: int, asked: int, window_tokens: int) -> None:
        self._report.worker.saved_tokens[req_id] = (first_token + window_tokens, asked)
