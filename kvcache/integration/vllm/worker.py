# SPDX-License-Identifier: Apache-2.0
"""The worker's side: carries out a step's loads and stores on one rank.

A request whose load fails is reported to the block (`get_block_ids_with_load_errors`), so that vLLM computes
it; an error while one request is served leaves the others alone.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kvcache import _native
from kvcache.control.rank import RankControl
from kvcache.engine import LMCacheEngine
from kvcache.gpu_connector.interface import Completion
from kvcache.gpu_connector.streams import current_stream
from kvcache.gpu_connector.transfer import TransferWay
from kvcache.integration.vllm.layerwise import LayerHooks, LayerwiseStores
from kvcache.integration.vllm.metadata import (
    LMCacheConnectorMetadata,
    LoadSpec,
    ReqMeta,
    SaveSpec,
    StepReport,
)
from kvcache.lookup.wire import lease_owner
from kvcache.plans import Loaded
from kvcache.stats import RankStats, WayStats


@dataclass
class _Ahead:
    """A load that started before its step."""

    request: ReqMeta
    there: slice | None
    """Tokens of the window that are on their way; None where the load failed."""


class WorkerSide:
    """All of the connector that lives in one of vLLM's worker processes. One thread, except `stats`.

    Args:
        engine: the engine of this rank.
        block_size: tokens of a block.
        rank: of tensor x pipeline parallelism.
        report: collects what the scheduler must hear.
        caught: called with the name of the hook and the error when one request's load or store failed.
        layers: names of the layers, in the order of the model.
        stores_by_layer: each layer is stored while the next ones are computed, not all after the last.
    """

    def __init__(
        self,
        engine: LMCacheEngine,
        block_size: int,
        rank: int,
        report: StepReport,
        caught: Callable[[str, Exception], None],
        layers: Sequence[str],
        *,
        stores_by_layer: bool = False,
    ) -> None:
        self.engine = engine
        self.control = RankControl(engine)
        self._block_size = block_size
        self._rank = rank
        self._caught = caught
        self._report = report
        self._stores_of: Counter[str] = Counter()
        """Stores that still read a request's blocks."""
        self._held: set[str] = set()
        self._hooks = LayerHooks(layers)
        self._followed: list[Callable[[bool], None]] = []
        """Loads that this forward follows layer by layer: called with whether it waited for every layer."""
        self._ahead: dict[str, _Ahead] = {}
        """Loads of the step that comes next, by lookup."""
        self._begun: tuple[int, int, int | None] | None = None
        """Number, thread and stream of the last step; None beside other connectors."""
        self._before_step: _native.Event | None = None
        self._beside: set[str] = set()
        """Lookups of loads beside the model that were not reported yet."""
        self._joining: list[tuple[int, Completion]] = []
        """Loads beside the model that were reported in a step and are in the pages behind these copies."""
        self._first_layers: set[int] = set()
        """Those before which the model's stream must be told to wait for these loads."""
        self._layer_stores = LayerwiseStores(len(layers), caught) if stores_by_layer else None
        self._storing = False

    def begin_step(self, metadata: LMCacheConnectorMetadata, *, alone: bool = False) -> None:
        """Takes note of finished requests whose blocks vLLM keeps for their stores. What the step reads or
        writes comes behind all loads that the scheduler had heard are there, and that its plan left out.

        Args:
            metadata: the step's.
            alone: vLLM has no connector but this one. Others may read or write pages that vLLM takes for free
                before a step begins, or without a look at the model's stream.
        """
        self._order_joining(metadata.heard)
        self._held.update(metadata.held_requests)
        self._begun = (metadata.step, *self._here()) if alone else None
        named = {request.lookup_id: request for request in metadata.requests if request.load_spec is not None}
        if named:
            # vLLM 0.32 starts asynchronous loads after it launched the forward; they need not wait for that.
            self._before_step = self.engine.gpu_connector.transfer.now()
        planned = {key: load for key, load in self._ahead.items() if named.get(key) == load.request}
        if len(planned) < len(self._ahead):
            # Planning them failed later, or their step: their pages are computed.
            self.engine.order_layers()
        self._ahead = planned

    def handle_preemptions(self) -> None:
        """Blocks were taken from requests: what the model writes from now on waits for the stores that
        read."""
        self.engine.order_after_stores()

    def load_ahead(self, session: str, step: int, request: ReqMeta) -> None:
        """Starts a load of the step that is being planned, behind all that the model's stream was given
        (`kvcache.integration.vllm.ahead`). Its metadata may do without it after all.

        Does nothing where the step before was not given to that stream yet, by this thread; and while copies
        run that the step will be ordered behind: stores, since a request of theirs may have been preempted,
        which the step's metadata says first, and what is left of loads beside the model.
        """
        spec = request.load_spec
        if spec is None or self._begun != (step - 1, *self._here()):
            return
        if self.engine.stores_run() or not all(copies.done() for _, copies in self._joining):
            return
        there = self._retrieve(request, spec, lease_owner(session, spec.lookup_id), by_layer=True)
        self._ahead[spec.lookup_id] = _Ahead(request, there)

    def start_load_kv(self, metadata: LMCacheConnectorMetadata, *, forward: Hashable | None = None) -> None:
        """Loads what requests were promised; on a GPU ordered before the kernels of the model that read it,
        unless the request waits outside of the batch.

        Args:
            forward: its kind, if the step's forward calls the hooks around each layer's attention.
        """
        self._end_followed(complete=False)  # of a forward that broke off
        self._hooks.begin(forward)
        session = metadata.lookup_session
        self.engine.lookup_unpin(
            [lease_owner(session, req_id) for req_id in metadata.lookup_requests_in_step]
        )
        for request in metadata.requests:
            if request.load_spec is not None and request.load_spec.can_load:
                owner = lease_owner(session, request.load_spec.lookup_id)
                self._load(request, request.load_spec, owner)
        if self._followed:
            self._first_layers = self.engine.first_layers()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """The layer's pages are filled before whatever the model's stream is given next."""
        layer = self._hooks.called(layer_name)
        if layer in self._first_layers:
            self.engine.order_layer(layer)

    def save_kv_layer(self, layer_name: str, metadata: LMCacheConnectorMetadata) -> None:
        """Layerwise: starts to store the layer. The first layer's hook opens the step's stores."""
        if self._layer_stores is None or (layer := self._hooks.index(layer_name)) is None:
            return
        if not self._storing:
            self._storing = True
            for request in metadata.requests:
                if request.save_spec is not None and request.save_spec.can_save:
                    self._store(request, request.save_spec)
        self._layer_stores.after_layer(layer)

    def wait_for_save(self, metadata: LMCacheConnectorMetadata) -> None:
        """Starts to store what this step has computed. The pages stay as they are until that is done: no
        token is written twice, and blocks are not given away before (`get_finished`,
        `handle_preemptions`)."""
        self._end_followed(complete=self._hooks.end())
        if self._storing:
            self._storing = False
        else:
            # In bulk, or in a step in which the layers' hooks were not called.
            for request in metadata.requests:
                if request.save_spec is not None and request.save_spec.can_save:
                    self._store(request, request.save_spec, bulk=True)
        if self._layer_stores is not None:
            self._layer_stores.finish()

    def get_finished(self) -> None:
        """Reports the requests whose blocks were held and are not read any more."""
        # vLLM may ask before it waits for saves, when drafts are to follow.
        self._end_followed(complete=self._hooks.end())
        self.engine.poll()
        done = {req_id for req_id in self._held if not self._stores_of[req_id]}
        self._held -= done
        self._report.finished_sending |= done

    def stats(self, namespace: bytes, transfer_path: str, failures: Counter[str]) -> RankStats:
        """A snapshot; safe to take from another thread."""
        counters, transfer = self.engine.counters, self.engine.gpu_connector.transfer
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
            ways=[
                _way_stats("store", transfer.store_way),
                _way_stats("load", transfer.load_way),
                _way_stats("short_load", transfer.short_load_way),
                _way_stats("quiet_load", transfer.quiet_load_way),
            ],
        )

    def _load(self, request: ReqMeta, spec: LoadSpec, owner: str) -> None:
        if spec.load_async:
            self._load_beside(request, spec, owner)
            return
        by_layer = self._hooks.count_on()
        ahead = self._ahead.pop(spec.lookup_id, None)
        if ahead is None:
            there = self._retrieve(request, spec, owner, by_layer=by_layer)
        else:
            there = ahead.there
            if not by_layer:
                self.engine.order_layers()
        check = partial(self._check_load, request, spec)
        if by_layer:
            self._followed.append(lambda complete: check(there if complete else None))
        else:
            check(there)

    def _load_beside(self, request: ReqMeta, spec: LoadSpec, owner: str) -> None:
        tell = partial(self._ready_beside, request, spec)

        def ended(loaded: Loaded) -> None:
            self._count_load(loaded)
            tell(loaded)

        told = {"on_loaded": ended} if self._begun is None else {"on_ready": tell}
        self._beside.add(spec.lookup_id)
        try:
            window = self._window(request, spec, owner) | {"after": self._before_step} | told
            self.engine.retrieve_beside(**window)
        except Exception as error:
            tell(Loaded(request.num_tokens - request.first_token, slice(0, 0), error=error))

    def runs_beside(self, lookup_id: str) -> bool:
        """Whether a load beside the model has started that was not reported yet, and will be whatever comes
        of it."""
        return lookup_id in self._beside

    def _retrieve(self, request: ReqMeta, spec: LoadSpec, owner: str, *, by_layer: bool) -> slice | None:
        """Tokens of the window that are on their way; None after an error."""
        try:
            return self.engine.retrieve_span(**self._window(request, spec, owner), by_layer=by_layer)
        except Exception as error:
            self._caught("retrieve", error)
            return None

    def _window(self, request: ReqMeta, spec: LoadSpec, owner: str) -> dict[str, Any]:
        """What the engine's loads of this window are called with.

        With an array of slots: a request waits for it, and each call into torch takes its time.
        """
        # Window positions. vLLM's own pages stay untouched. On the CPU a page is loaded whole, also where its
        # last token is left to compute: its bytes are ordered so that no part of it is some tokens' KV. On a
        # GPU that token is left alone: vLLM writes it before it waits for the layer.
        first, last = _bounds(request, spec)
        whole_pages = self.engine.gpu_connector.path == "host"
        end = -(-last // self._block_size) * self._block_size if whole_pages else last
        slots = request.slots(self._block_size, first, end)
        there = first // self.engine.database.chunk_size * self.engine.database.chunk_size
        wanted = np.ones(len(slots), dtype=np.bool_) if there else None
        if wanted is not None:
            wanted[:there] = False
        return {
            "mask": None if wanted is None else torch.from_numpy(wanted),
            "slot_mapping": slots,
            "digests": request.digests,
            "lookup_id": owner,
            "on_loaded": self._count_load,
        }

    def _here(self) -> tuple[int, int | None]:
        """This thread, and the stream that what it launches is given to."""
        device = self.engine.gpu_connector.transfer.pages.device
        return threading.get_ident(), None if device < 0 else current_stream(device)

    def _order_joining(self, heard: int) -> None:
        """Whatever the model's stream is given from now on sees the loads that were reported until the step
        `heard`: their blocks are nobody else's, and not read, before the scheduler has heard of them."""
        self._joining = [(step, copies) for step, copies in self._joining if not copies.done()]
        for step, copies in self._joining:
            if step <= heard:
                copies.order_current_stream()

    def _end_followed(self, *, complete: bool) -> None:
        """Of a forward that did not wait for every layer nobody knows what it read: its loads have failed."""
        followed, self._followed = self._followed, []
        self._first_layers = set()
        if followed and not complete:
            # They still write the pages, which are given to others now.
            self.engine.order_layers()
        for end in followed:
            end(complete)

    def drop_followed(self) -> None:
        """The loads of this step are reported as failed by the caller."""
        if self._followed or self._ahead:
            self.engine.order_layers()
        self._followed, self._ahead = [], {}

    def _check_load(self, request: ReqMeta, spec: LoadSpec, there: slice | None) -> None:
        """Reports what of the window's promised tokens did not come; `there` None stands for all of them."""
        first, last = _bounds(request, spec)
        loaded = first
        if there is not None and there.start <= first:
            loaded = max(first, min(there.stop, last))
        if loaded < last:
            self.record_failed_blocks(request, last - loaded, loaded)
        else:
            self._report.worker.finished_loads[request.lookup_id] = 0

    def _count_load(self, loaded: Loaded) -> None:
        self._report.worker.load_bytes += loaded.num_bytes
        self._report.worker.load_seconds += loaded.seconds

    def _ready_beside(self, request: ReqMeta, spec: LoadSpec, loaded: Loaded) -> None:
        """The request that waited outside of the batch may go on: it takes vLLM a step or two to have it in
        one, in which most of the last copies are made. In one report with what did not come.

        The lease ends with the first step after the last copy: if the request was aborted, and vLLM has no
        other, when it has one again.
        """
        self._beside.discard(spec.lookup_id)
        if loaded.error is not None:
            self._caught("retrieve", loaded.error)
        self._check_load(request, spec, loaded.span)
        self._report.finished_recving.add(request.req_id)
        if self._begun is not None:
            self._joining.append((self._begun[0], loaded.copies))

    def record_failed_blocks(self, request: ReqMeta, tokens: int, first_missing: int) -> None:
        """Reports the blocks of the promised tokens from window position `first_missing` on."""
        self._report.lose(request.lookup_id, tokens, request.promised_blocks(self._block_size, first_missing))
        self.engine.counters.load_failed_tokens += tokens
        self.engine.counters.failures["LoadIncomplete"] += 1

    def _store(self, request: ReqMeta, spec: SaveSpec, *, bulk: bool = False) -> None:
        skipped = max(0, spec.skip_leading_tokens - request.first_token)
        acknowledge = partial(self._stored, request.req_id, spec.save_id, request.first_token)
        self._stores_of[request.req_id] += 1
        try:
            slots = torch.from_numpy(request.slots(self._block_size))
            mask = torch.ones(len(slots), dtype=torch.bool)
            mask[:skipped] = False
            window: dict[str, Any] = {
                "mask": mask,
                "slot_mapping": slots,
                "digests": request.digests,
                "tenant": request.tenant,
                "parent": request.parent,
                "on_stored": acknowledge,
            }
            if self._layer_stores is not None and not bulk:
                self._layer_stores.add(self.engine.store_layer(**window))
            else:
                self.engine.store(**window)
        except Exception as error:
            self._caught("store", error)
            acknowledge(skipped)

    def _stored(self, req_id: str, save_id: int, first_token: int, window_tokens: int) -> None:
        self._report.worker.saves[save_id] = (first_token + window_tokens, 1)
        self._stores_of[req_id] -= 1
        if not self._stores_of[req_id]:
            del self._stores_of[req_id]


def _bounds(request: ReqMeta, spec: LoadSpec) -> tuple[int, int]:
    """Window positions of the first promised token, and behind the last."""
    return spec.vllm_cached_tokens - request.first_token, spec.lmcache_cached_tokens - request.first_token


def _way_stats(direction: str, way: TransferWay) -> WayStats:
    return WayStats(
        direction=direction,
        way=way.way.value,
        multiprocessors=way.blocks,
        bytes_per_second=way.bytes_per_s,
        link_bytes_per_second=way.link_bytes_per_s,
    )
