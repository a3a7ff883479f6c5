# SPDX-License-Identifier: Apache-2.0
"""The engine of one rank: stores, looks up and gives back the KV of token sequences.

The engine works on windows of a sequence: `digests` name the chunks of the window, `slot_mapping` says where
each of its tokens lies in vLLM's pages (-1: nowhere, leave it out). Copies run on the GPU connector's
streams; a chunk becomes visible only when its copy is done, and a lease ends only when its load is.
"""

from __future__ import annotations

import itertools
import logging
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from kvcache import _native
from kvcache.gpu_connector.base import layer_slices
from kvcache.gpu_connector.interface import Completed, Completion
from kvcache.gpu_connector.layerwise import LayerwiseConnector
from kvcache.gpu_connector.paged import BulkConnector
from kvcache.gpu_connector.transfer_plan import SlotMapping
from kvcache.plans import LoadCopies, Loaded, LoadPlan, OnLoaded, StoreCopies, StorePlan, mask_of
from kvcache.storage.manager import StorageManager
from kvcache.storage.tier import NO_PARENT, NO_TENANT
from kvcache.storage.tiers.cpu import Outcome
from kvcache.tokens.database import ChunkedTokenDatabase

logger = logging.getLogger("vllm.kvcache")


@dataclass
class EngineCounters:
    """What the engine did since it started."""

    stored_tokens: int = 0
    loaded_tokens: int = 0
    load_failed_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)


CopiesT = TypeVar("CopiesT", StoreCopies, LoadCopies)


def _take_done(running: list[CopiesT]) -> list[CopiesT]:
    """Taken out before anything follows: what fails in one must neither come again nor keep the others."""
    done = [copies for copies in running if copies.completion.done()]
    if done:
        running[:] = [copies for copies in running if copies not in done]
    return done


class LMCacheEngine:
    """Store, retrieve and lookup for one rank.

    `store`, `retrieve` and its like, and `poll` belong to the thread that runs the model; `lookup`,
    `lookup_unpin` and what they stand on are thread-safe, since the lookup server answers from its own
    thread.
    """

    def __init__(
        self,
        database: ChunkedTokenDatabase,
        storage: StorageManager,
        gpu_connector: BulkConnector,
        layer_connector: LayerwiseConnector | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.database = database
        self.storage = storage
        self.gpu_connector = gpu_connector
        self._layer_connector = layer_connector
        self.counters = EngineCounters()
        self._clock = clock
        self._stores: list[StoreCopies] = []
        self._loads: list[LoadCopies] = []
        self._load_numbers = itertools.count()

    @property
    def layer_connector(self) -> LayerwiseConnector:
        """Raises RuntimeError where the engine was made without one."""
        if self._layer_connector is None:
            raise RuntimeError("the engine has no layerwise connector; it moves all layers at once")
        return self._layer_connector

    # Store

    def store(
        self,
        tokens: Sequence[int] | None = None,
        mask: torch.Tensor | None = None,
        *,
        slot_mapping: torch.Tensor,
        digests: bytes | None = None,
        tenant: bytes = NO_TENANT,
        parent: bytes = NO_PARENT,
        on_stored: Callable[[int], None] = lambda tokens: None,
    ) -> int:
        """Copies the KV of a window's chunks out of the pages, those that are not stored yet.

        Args:
            tokens: token ids of the window; may be left out where `digests` is given.
            mask: bool, one an id: a prefix of False (stored by an earlier call, not looked at) of a whole
                number of chunks, then True. All True if None.
            slot_mapping: int64, one a token of the window.
            digests: 16 bytes a chunk of the window.
            tenant: 16 bytes, whose chunks these are (`kvcache.storage.tenants`).
            parent: 16 bytes, the digest of the chunk before the window.
            on_stored: called once when the copies are visible, with the tokens from the window's start up to
                the first chunk that could not be stored: what is safe to count as saved.

        Returns:
            Tokens, from the window's start, that are stored or on their way.

        Raises:
            ValueError: a mask that is not of that form, or more digests than tokens.
        """
        plan = self._plan_store(tokens, mask, len(slot_mapping), digests, tenant, parent)
        if not plan.chunks:
            on_stored(plan.acknowledged)
            return plan.stored
        started = self._clock()
        try:
            completion = self.gpu_connector.batched_from_gpu(
                plan.objs, plan.starts, plan.ends, slot_mapping=slot_mapping
            )
        except BaseException:
            self.storage.cpu.abandon([chunk.key for chunk in plan.chunks])
            raise
        self._stores.append(plan.copies(completion, started, on_stored))
        self.poll()
        return plan.stored

    def store_layer(
        self,
        tokens: Sequence[int] | None = None,
        mask: torch.Tensor | None = None,
        *,
        slot_mapping: torch.Tensor,
        digests: bytes | None = None,
        tenant: bytes = NO_TENANT,
        parent: bytes = NO_PARENT,
        on_stored: Callable[[int], None] = lambda tokens: None,
    ) -> Generator[None, None, None]:
        """As `store`, but a layer a step: resumed after each layer's attention and once more at the end, it
        yields layers + 1 times. Closed early or failing, it leaves nothing behind.

        Raises:
            ValueError: as `store`, at the first step.
        """
        try:
            plan = self._plan_store(tokens, mask, len(slot_mapping), digests, tenant, parent)
        except Exception:
            on_stored(0)
            raise
        connector = self.layer_connector
        layers = layer_slices(plan.objs, connector.num_layers)
        started = self._clock()
        last: Completion = Completed()
        complete = False
        try:
            copies = connector.batched_from_gpu(layers, plan.starts, plan.ends, slot_mapping=slot_mapping)
            for _ in range(connector.num_layers):
                last = next(copies)
                yield
            last = next(copies)
            complete = last.error is None
        finally:
            self._stores.append(plan.copies(last, started, on_stored, keep=complete))
            self.poll()
        if last.error is not None:
            raise last.error
        yield

    # Retrieve

    def lookup(
        self,
        tokens: Sequence[int] | None = None,
        *,
        digests: bytes | None = None,
        lookup_id: str = "",
        pin: bool = False,
    ) -> int:
        """Tokens, from the start without a gap, whose KV is stored.

        Args:
            tokens: token ids, or
            digests: 16 bytes a chunk; every chunk counts as full.
            lookup_id: the owner of the lease.
            pin: lease what is found to `lookup_id` until it is retrieved or unpinned.
        """
        keys = self.database.keys(self._digests(tokens, digests))
        found = self.storage.lookup_and_lease(keys, lookup_id) if pin else self.storage.lookup(keys)
        return found * self.database.chunk_size

    def lookup_unpin(self, lookup_ids: Sequence[str]) -> None:
        """Ends the leases of these lookups. An unknown one is none."""
        for lookup_id in lookup_ids:
            self.storage.release(lookup_id)

    def retrieve(
        self,
        tokens: Sequence[int] | None = None,
        mask: torch.Tensor | None = None,
        *,
        slot_mapping: SlotMapping,
        digests: bytes | None = None,
        lookup_id: str = "",
        on_loaded: OnLoaded = lambda loaded: None,
        by_layer: bool = False,
    ) -> torch.Tensor:
        """Copies stored KV into the pages and ends the lease once that is done. On a GPU whatever the model's
        stream is given afterwards waits for the copies.

        Args:
            tokens: token ids of the window; may be left out where `digests` is given.
            mask: bool, one an id: a prefix of False (there already; whole chunks are not read), then True.
            slot_mapping: int64, one a token of the window; -1 leaves a token's page as it is.
            digests: 16 bytes a chunk of the window.
            lookup_id: the owner of the lease that the lookup took; without one the window is looked up here.
            on_loaded: called once when the copies are done; with 0 bytes where there was nothing to copy.
            by_layer: the model's stream waits for a layer's pages not before `order_layer` says so.

        Returns:
            bool [tokens]: True where the KV was wanted and is now (or, where the slot is -1, could have been)
            in the pages. It is True without a gap from the first wanted token on.
        """
        span = self.retrieve_span(
            tokens,
            mask,
            slot_mapping=slot_mapping,
            digests=digests,
            lookup_id=lookup_id,
            on_loaded=on_loaded,
            by_layer=by_layer,
        )
        return mask_of(len(slot_mapping), span)

    def retrieve_span(
        self,
        tokens: Sequence[int] | None = None,
        mask: torch.Tensor | None = None,
        *,
        slot_mapping: SlotMapping,
        digests: bytes | None = None,
        lookup_id: str = "",
        on_loaded: OnLoaded = lambda loaded: None,
        by_layer: bool = False,
    ) -> slice:
        """As `retrieve`, for whom a request waits: the tokens that would be True, empty where none would."""
        plan = self._plan_load(tokens, mask, len(slot_mapping), digests, lookup_id)
        connector = self.gpu_connector
        copy = connector.layers_to_gpu if by_layer else connector.batched_to_gpu
        copies = self._start_load(plan, slot_mapping, on_loaded, copy)
        if copies is not None:
            copies.counted = True
            self.counters.loaded_tokens += plan.count()
        self.poll()
        return plan.span()

    def retrieve_beside(
        self,
        tokens: Sequence[int] | None = None,
        mask: torch.Tensor | None = None,
        *,
        slot_mapping: SlotMapping,
        digests: bytes | None = None,
        lookup_id: str = "",
        on_ready: OnLoaded = lambda loaded: None,
        on_loaded: OnLoaded = lambda loaded: None,
        after: _native.Event | None = None,
    ) -> None:
        """As `retrieve`, but beside the model: nobody waits for the pages, and nobody reads or writes them
        before `on_ready`. The copies are queued by another thread, so that this call is short however much is
        loaded.

        Args:
            after: on a GPU they start behind it; None for what the model's stream was given before the call.
            on_ready: called once, with what is in the pages behind `Loaded.copies`. These are queued by now:
                whoever reads or writes the pages orders the model's stream behind them first.
        """
        plan = self._plan_load(tokens, mask, len(slot_mapping), digests, lookup_id)
        copy = partial(self.gpu_connector.feed_to_gpu, after=after)
        copies = self._start_load(plan, slot_mapping, on_loaded, copy)
        if copies is None:
            on_ready(Loaded(len(slot_mapping), plan.span()))
        else:
            copies.on_ready = on_ready
        self.poll()

    def retrieve_layer(
        self,
        tokens: Sequence[int] | None = None,
        mask: torch.Tensor | None = None,
        *,
        slot_mapping: torch.Tensor,
        digests: bytes | None = None,
        lookup_id: str = "",
        on_loaded: OnLoaded = lambda loaded: None,
    ) -> Generator[torch.Tensor | None, None, None]:
        """As `retrieve`, but a layer a step, so that copies run beside the layers' attention.

        It yields layers + 2 times: the mask of what will be loaded; None for each layer, whose copy is then
        on its way while the model's stream waits for the layer before; the mask of what was loaded. Closed
        early it ends its lease, and what it did not copy is not in the pages.
        """
        plan = self._plan_load(tokens, mask, len(slot_mapping), digests, lookup_id)
        connector = self.layer_connector
        started = self._clock()
        last: Completion = Completed()
        finished = False
        try:
            copies = connector.batched_to_gpu(plan.starts, plan.ends, slot_mapping=slot_mapping)
            next(copies)
            yield plan.mask(len(slot_mapping))
            for objs in layer_slices(plan.objs, connector.num_layers):
                last = copies.send(objs)
                yield None
            last = next(copies)
            finished = last.error is None
        finally:
            # Copies that run read the chunks until they are done, whether anybody still wants them or not.
            self._loads.append(LoadCopies(last, plan, len(slot_mapping), started, on_loaded, counted=True))
            self.poll()
        result = plan.mask(len(slot_mapping)) & finished
        self.counters.loaded_tokens += int(result.sum())
        yield result

    # Completion

    def poll(self) -> None:
        """Publishes finished stores and ends the leases of finished loads. Cheap with nothing to do.

        It raises nothing: the error of one copy, or of whoever waits for it, is no other's.
        """
        for load in self._loads:
            if load.on_ready is not None and load.completion.queued():
                self._follow(load, self._tell_ready)
        for load in _take_done(self._loads):
            self._follow(load, self._finish_load)
        for store in _take_done(self._stores):
            self._follow(store, self._finish_store)

    def _follow(self, copies: CopiesT, finish: Callable[[CopiesT], None]) -> None:
        try:
            finish(copies)
        except Exception as error:
            self.counters.failures[type(error).__name__] += 1
            logger.exception("KV cache: what follows a finished copy failed")

    def stores_run(self) -> bool:
        """Some still read their pages, as far as known after a look."""
        self.poll()
        return bool(self._stores)

    def order_after_stores(self) -> None:
        """Whatever the model's stream is given from now on waits until running stores have read their
        pages."""
        for copies in self._stores:
            copies.completion.order_current_stream()

    def order_layer(self, layer: int) -> None:
        """Whatever the model's stream is given from now on sees this layer of what is loaded by layer."""
        for copies in self._loads:
            copies.completion.order_layer(layer)

    def order_layers(self) -> None:
        """The same of all layers: nothing of it is written to the pages afterwards."""
        for layer in sorted(self.first_layers()):
            self.order_layer(layer)

    def first_layers(self) -> set[int]:
        """Those at which `order_layer` does something for the loads that run."""
        return {layer for copies in self._loads for layer in copies.completion.first_layers}

    def drain(self, timeout_s: float) -> bool:
        """Waits for all copies; False if some are not done in time."""
        deadline = self._clock() + timeout_s
        running = [load.completion for load in self._loads]
        running += [store.completion for store in self._stores]
        for completion in running:
            completion.wait(max(0.0, deadline - self._clock()))
        self.poll()
        return not (self._loads or self._stores)

    def close(self) -> None:
        """Waits for the copies that run, then frees the tiers' memory. Loads beside the model that were not
        queued in full end with an error."""
        self.gpu_connector.close()
        self.storage.close(free=self.drain(timeout_s=10.0))

    def _start_load(
        self,
        plan: LoadPlan,
        slot_mapping: SlotMapping,
        on_loaded: OnLoaded,
        copy: Callable[..., Completion],
    ) -> LoadCopies | None:
        """None where there is nothing to copy: it has ended then."""
        if not plan.objs:
            self.storage.release(plan.owner)
            on_loaded(Loaded(len(slot_mapping), plan.span()))
            return None
        started = self._clock()
        try:
            completion = copy(plan.objs, plan.starts, plan.ends, slot_mapping=slot_mapping)
        except BaseException:
            self.storage.release(plan.owner)
            raise
        self._loads.append(LoadCopies(completion, plan, len(slot_mapping), started, on_loaded))
        return self._loads[-1]

    def _finish_store(self, copies: StoreCopies) -> None:
        keys = [chunk.key for chunk in copies.chunks]
        if not copies.keep:
            self.storage.cpu.abandon(keys)
            copies.on_stored(copies.skipped)
            return
        moved = copies.completion.moved(len(keys))
        stored, acknowledged = copies.chunks[:moved], copies.acknowledged
        if stored:
            self.storage.publish(keys[:moved], self._clock() - copies.started)
            self.counters.stored_tokens += sum(chunk.end - chunk.start for chunk in stored)
        if moved < len(keys):
            self.storage.cpu.abandon(keys[moved:])
            acknowledged = min(acknowledged, copies.chunks[moved].start)
            self.counters.failures["StoreNotCoded"] += 1
        copies.on_stored(acknowledged)

    def _tell_ready(self, copies: LoadCopies) -> None:
        on_ready, copies.on_ready = copies.on_ready, None
        if on_ready is not None:
            on_ready(Loaded(copies.num_tokens, copies.plan.span(), copies=copies.completion))

    def _finish_load(self, copies: LoadCopies) -> None:
        plan, error = copies.plan, copies.completion.error
        moved = copies.completion.moved(len(plan.objs))
        tokens = plan.tokens(moved)
        num_bytes = tokens * self.storage.cpu.shape.token_bytes
        seconds = self._clock() - copies.started
        if plan.sources:
            for key, start, end in zip(plan.keys[:moved], plan.starts, plan.ends, strict=False):
                lane = plan.sources.get(key)
                if lane is not None:
                    lane.count.hit_tokens += end - start
                    tokens -= end - start
        self.storage.cpu.count_read(num_bytes, seconds, tokens)
        self.storage.release(plan.owner)
        if not copies.counted:
            self.counters.loaded_tokens += plan.count(moved)
        loaded = Loaded(copies.num_tokens, plan.span(moved), num_bytes, seconds, error)
        on_ready, copies.on_ready = copies.on_ready, None
        if on_ready is not None:
            on_ready(loaded)
        copies.on_loaded(loaded)

    def _plan_store(
        self,
        tokens: Sequence[int] | None,
        mask: torch.Tensor | None,
        num_tokens: int,
        digests: bytes | None,
        tenant: bytes,
        parent: bytes,
    ) -> StorePlan:
        """Reserves memory for the window's chunks that are not stored yet, up to the first without room."""
        skipped = self._skipped(mask, num_tokens)
        chunks = list(self.database.chunks(self._digests(tokens, digests), num_tokens))
        if skipped % self.database.chunk_size:
            raise ValueError(
                f"the mask starts with {skipped} False, which is no multiple of the chunk size "
                f"{self.database.chunk_size}; round it down"
            )
        plan = StorePlan(skipped=skipped, stored=skipped, acknowledged=skipped)
        contiguous = True
        parents = [parent, *(chunk.key.chunk_hash for chunk in chunks)]
        for chunk, before in zip(chunks, parents, strict=False):
            if chunk.end <= skipped:
                continue
            outcome, obj = self.storage.cpu.reserve(chunk.key, chunk.end - chunk.start, tenant, before)
            if outcome is Outcome.FULL:
                self.counters.failures["StoreNoRoom"] += 1
                break
            if outcome is Outcome.DECLINED:
                break
            if obj is not None:
                plan.chunks.append(chunk)
                plan.objs.append(obj)
            plan.stored = chunk.end
            contiguous = contiguous and outcome is not Outcome.IN_FLIGHT
            plan.acknowledged = chunk.end if contiguous else plan.acknowledged
        return plan

    def _plan_load(
        self,
        tokens: Sequence[int] | None,
        mask: torch.Tensor | None,
        num_tokens: int,
        digests: bytes | None,
        lookup_id: str,
    ) -> LoadPlan:
        """The window's wanted chunks that are there, from the first on without a gap, under a lease."""
        skipped = self._skipped(mask, num_tokens)
        digests = self._digests(tokens, digests)
        starts, ends = self.database.spans(digests, num_tokens)
        first = bisect_right(ends, skipped)
        keys = self.database.keys(digests)[first:]
        # Of this load alone: whoever looks up, cancels or gives up in the request's name leaves it as it is.
        owner = f"loading/{next(self._load_numbers)}"
        sources = self.storage.hand_over(lookup_id, owner)
        objs = self.storage.cpu.leased(keys, owner)
        if len(objs) < len(keys):
            # The lease ran out, or there was none: what is still there is as good.
            objs = self.storage.cpu.leased(keys[: self.storage.lookup_and_lease(keys, owner)], owner)
        end = first + len(objs)
        return LoadPlan(keys[: len(objs)], starts[first:end], ends[first:end], objs, skipped, owner, sources)

    def _digests(self, tokens: Sequence[int] | None, digests: bytes | None) -> bytes:
        if digests is not None:
            return digests
        if tokens is None:
            raise ValueError("neither tokens nor digests are given; the window's chunks cannot be named")
        return self.database.hash_tokens(tokens)

    @staticmethod
    def _skipped(mask: torch.Tensor | None, num_tokens: int) -> int:
        if mask is None:
            return 0
        if len(mask) != num_tokens:
            raise ValueError(
                f"a mask of {len(mask)} tokens for {num_tokens} slots; both name the same window"
            )
        wanted = mask.cpu().numpy()
        skipped = num_tokens - int(np.count_nonzero(wanted))
        if wanted[:skipped].any():
            raise ValueError(
                "the mask has True before False; it must be False for a prefix and True from there on"
            )
        return skipped
