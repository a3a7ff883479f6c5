# SPDX-License-Identifier: Apache-2.0
"""What must hold whatever requests, faults and time do.

Any of these is an error: a load that fails without a fault that takes its chunks away (a slow tier's failure
is none), a stored chunk that anybody could hit and that is not the KV of its tokens on that
rank; a load into a page that was not promised to it; a token that a vLLM without a cache would not have
generated; an object that a rank writes below although another one writes it; an exception out of a hook; a
request that never ends; and, when all is over, a lease, a held block, a copy, a tracker, or a prompt token
that is in none or in two of the counters. A counter that falls is one too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.request import Request

from kvcache.integration.vllm.metadata import ReqMeta
from kvcache.integration.vllm.worker import WorkerSide
from kvcache.memory.objects import MemoryObj
from kvcache.stats import SchedulerStats
from kvcache.storage.tiers.cpu import CpuTier
from kvcache.tokens.database import chain_root, chain_secret
from kvcache.tokens.hashing import PrefixChain
from kvcache.tokens.keys import CacheEngineKey
from tests.simulator.copies import Injected
from tests.simulator.engine import Engine, Shape
from tests.simulator.values import Model


class Broken(BaseException):
    """Something that must hold does not. No guard catches it."""


class Checks:
    """Args:
    shape: of the engine.
    model: what pages must hold.
    seen: counts what happens.
    """

    def __init__(self, shape: Shape, model: Model, seen: Counter[str]) -> None:
        self.shape, self.model, self.seen = shape, model, seen
        self.loadable: set[int] = set()
        """Blocks that the loads of the step in hand may write."""
        self._local_tokens: dict[str, int] = {}
        self._counted: Counter[str] = Counter()

    def watch(self, engine: Engine) -> None:
        """Looks at what the connector is told and does, without changing it."""
        self.engine = engine
        impl = engine.scheduler_impl
        ask, allocated = impl.get_num_new_matched_tokens, impl.update_state_after_alloc

        def watched_ask(request: Request, num_computed_tokens: int) -> Any:
            self._local_tokens[request.request_id] = num_computed_tokens
            answer = ask(request, num_computed_tokens)
            self.seen["waits"] += answer[0] is None
            return answer

        def watched_alloc(request: Request, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens:
                first = self._local_tokens[request.request_id]
                last = first + num_external_tokens
                size = self.shape.block_size
                table = blocks.get_block_ids()[0]
                self.loadable.update(table[first // size : -(-last // size)])
                self.seen["loads"] += 1
            allocated(request, blocks, num_external_tokens)

        impl.get_num_new_matched_tokens = watched_ask  # type: ignore[method-assign]
        impl.update_state_after_alloc = watched_alloc  # type: ignore[method-assign]
        for rank, worker in enumerate(engine.rank_impls):
            if worker._worker is not None:
                storage = worker._worker.engine.storage
                self._watch_tier(rank, storage.cpu)
                self._watch_ahead(worker._worker)
                if self.shape.named_by(rank) != rank:
                    for lane in storage.lanes:
                        lane.put = self._nobody_writes  # type: ignore[method-assign]

    def _watch_ahead(self, side: WorkerSide) -> None:
        load_ahead = side.load_ahead

        def watched(session: str, step: int, request: ReqMeta) -> None:
            load_ahead(session, step, request)
            self.seen["loads ahead"] += request.lookup_id in side._ahead

        side.load_ahead = watched  # type: ignore[method-assign]

    def _nobody_writes(self, objects: Sequence[Any]) -> Any:
        raise Broken(f"{len(objects)} objects are written below that the stage's first rank writes")

    def check_counters(self) -> None:
        """No counter of prompt tokens has fallen, and together they are all prompts' tokens at any time."""
        stats = self.engine.scheduler_impl.stats()
        assert isinstance(stats, SchedulerStats)
        now = Counter(
            {f"hit in {tier}": tokens for tier, tokens in stats.hit_cache_tokens.items()}
            | {"hit on the GPU": stats.hit_gpu_tokens, "computed": stats.computed_tokens}
        )
        fell = {name: (before, now[name]) for name, before in self._counted.items() if now[name] < before}
        if fell:
            raise Broken(f"counters that must never fall did: {fell}")
        if now.total() != stats.prompt_tokens:
            raise Broken(f"{stats.prompt_tokens} prompt tokens, of which {now.total()} are counted")
        self._counted = now

    def _watch_tier(self, rank: int, tier: CpuTier) -> None:
        publish = tier.publish

        def watched_publish(keys: Iterable[CacheEngineKey], seconds: float = 0.0) -> list[CacheEngineKey]:
            shown = publish(keys, seconds)
            for key in shown:
                self._check_stored(rank, tier, key)
            return shown

        arrived = tier.arrived

        def watched_arrived(key: CacheEngineKey, obj: MemoryObj) -> bool:
            shown = arrived(key, obj)
            if shown:
                self.seen["fetched chunks"] += 1
                self._check_stored(rank, tier, key)
            return shown

        tier.publish = watched_publish  # type: ignore[method-assign]
        tier.arrived = watched_arrived  # type: ignore[method-assign]

    def _check_stored(self, rank: int, tier: CpuTier, key: CacheEngineKey) -> None:
        entry = tier._index.get(key)
        if entry is None:
            return
        self.seen["stored chunks"] += 1
        if self.shape.whole_pages and entry.obj.num_tokens % self.shape.block_size:
            raise Broken(f"rank {rank}: a part of a page is stored, which is no token's KV")
        shape = self.shape.layers_of(rank), -1, self.shape.lanes_of(rank)
        kv = entry.obj.tensor.reshape(shape).view(torch.int64).numpy().view(np.uint64)
        kv = np.stack([self.model.as_tokens(layer) for layer in kv])
        prefixes = self.model.prefix_of(kv, rank)
        if prefixes is None:
            raise Broken(f"rank {rank}: {kv.shape[1]} tokens are stored that are no KV of any prompt")
        salt, tokens = self.model.tokens(prefixes[-1])
        chain = PrefixChain(self.shape.chunk_size, chain_secret(""), chain_root("", salt))
        chain.extend(tokens)
        named = chain.tail_digest() or bytes(chain.digests[-16:])
        if key.chunk_hash != named or key.rank != self.shape.named_by(rank):
            raise Broken(f"rank {rank}: a chunk is stored under another prefix's name")

    def check_write(self, rank: int, slots: Sequence[int]) -> None:
        wrong = sorted({slot // self.shape.block_size for slot in slots} - self.loadable)
        if wrong:
            raise Broken(f"rank {rank}: a load writes blocks {wrong}, which were not promised to any")

    def check_output(self, request: Request, root: int) -> None:
        """The tokens so far are those that the prompt's `root` leads to."""
        prompt = list(request.prompt_token_ids or ())
        outputs = list(request.output_token_ids)
        prefixes = self.model.hashes(root, prompt + outputs)[len(prompt) - 1 :]
        right = [self.model.next_token(prefix) for prefix in prefixes[:-1]]
        if outputs != right:
            at = [a == b for a, b in zip(outputs, right, strict=True)].index(False)
            raise Broken(f"{request.request_id}: token {at} behind a prompt of {len(prompt)} is wrong")

    def check_end(self) -> None:
        """When all is over: nothing is left, and every prompt token was counted once."""
        scheduler = self.engine.scheduler
        left: dict[str, Any] = {"requests": dict(scheduler.requests)}
        pool = scheduler.kv_cache_manager.block_pool
        left["blocks"] = self.shape.num_blocks - 1 - pool.get_num_free_blocks()
        side = self.engine.scheduler_impl._scheduler
        assert side is not None
        for name in ("_trackers", "_promised", "_saves", "_held", "_async_loads"):
            left[name] = getattr(side, name)
        left["open loads"] = side._doubts.open_loads
        left["open prompts"] = side.counters.open_prompts
        left["waiting lookups"] = side._lookups._waiting
        for rank, worker in enumerate(sides(self.engine)):
            storage = worker.engine.storage
            stats = storage.cpu.stats()
            left[f"searches of rank {rank}"] = storage._fetcher._searches
            left[f"claims of rank {rank}"] = len(storage.cpu._claims)
            left[f"chunks being written on rank {rank}"] = storage.cpu._writing
            left[f"queues of rank {rank}"] = sum(lane.queued_bytes for lane in storage.lanes) + sum(
                writer.pending_bytes for writer in storage._writers
            )
            left[f"leases of rank {rank}"] = stats.leases
            left[f"copies of rank {rank}"] = worker.engine._loads + worker.engine._stores
            left[f"loads ahead on rank {rank}"] = worker._ahead
            left[f"held on rank {rank}"] = worker._held | set(+worker._stores_of)
            allocator = worker.engine.storage.cpu._allocator
            left[f"lost memory of rank {rank}"] = allocator.num_objects - stats.objects
        for impl in (self.engine.scheduler_impl, *self.engine.rank_impls):
            caught = dict(impl.guard.failures)
            caught.pop(Injected.__name__, None)
            if self.shape.broken_rank is not None:
                caught.pop("OSError", None)
            left["caught"] = left.get("caught") or caught
        stats = self.engine.scheduler_impl.stats()
        assert isinstance(stats, SchedulerStats)
        hits = sum(stats.hit_cache_tokens.values())
        counted = stats.hit_gpu_tokens + hits + stats.computed_tokens
        left["tokens in no counter"] = stats.prompt_tokens - counted
        for name in ("hit_gpu_tokens", "computed_tokens"):
            left[f"{name} below zero"] = min(0, getattr(stats, name))
        wrong = {name: value for name, value in left.items() if value}
        if wrong:
            raise Broken(f"left at the end: {wrong}")
        self.seen["hits below"] += hits - stats.hit_cache_tokens["cpu"]
        self.seen["waits that expired"] += stats.lookup_waits_expired
        for worker in sides(self.engine):
            self.seen["loaded tokens"] += worker.engine.counters.loaded_tokens
            for lane in worker.engine.storage.lanes:
                self.seen["written below"] += len(lane.tier.objects)
            self.seen["evictions"] += worker.engine.storage.cpu.stats().evictions


def sides(engine: Engine) -> list[Any]:
    """The workers' sides of all ranks that have one."""
    return [impl._worker for impl in engine.rank_impls if impl._worker is not None]
