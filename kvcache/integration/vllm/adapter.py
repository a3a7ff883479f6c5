# SPDX-License-Identifier: Apache-2.0
"""`LMCacheConnectorV1Impl`: all hooks in both roles, each behind the guard.

What the hooks decide stands in `scheduler.py`, what they move in `worker.py`, what the admin sidecar asks in
`administration.py`; this module starts the right one of the sides, keeps the step's metadata, and turns every
failure into "no cache here" with a reason.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvcache.engine import EngineCounters
from kvcache.gpu_connector.layerwise import VLLMPagedMemLayerwiseGPUConnector
from kvcache.gpu_connector.layout import LayerSpec, joined_where_pages_are
from kvcache.gpu_connector.paged import VLLMPagedMemGPUConnectorV2
from kvcache.integration.vllm import ahead
from kvcache.integration.vllm.administration import Administered, flush_rank
from kvcache.integration.vllm.copies import Copies
from kvcache.integration.vllm.events import KVEvents, hash_block_size
from kvcache.integration.vllm.guard import guarded
from kvcache.integration.vllm.identity import (
    check_supported,
    default_runtime_dir,
    namespace_of,
    naming_rank,
)
from kvcache.integration.vllm.live import LiveConfig
from kvcache.integration.vllm.metadata import LMCacheConnectorMetadata, LMCacheWorkerMetadata, StepReport
from kvcache.integration.vllm.scheduler import SchedulerSide
from kvcache.integration.vllm.versions import check_version
from kvcache.integration.vllm.vllm_stats import (
    CacheStats,
    Figures,
    StatsReporter,
    figures_of,
    rank_figures,
)
from kvcache.integration.vllm.worker import WorkerSide
from kvcache.manager import LMCacheManager
from kvcache.memory.allocator import KVShape
from kvcache.storage.changes import ChangeLog
from kvcache.tokens.database import ChunkedTokenDatabase
from kvcache.tokens.keys import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvcache")

_FLUSH_TIMEOUT_S = 10.0


class LMCacheConnectorV1Impl(Administered):
    """The connector of one process. It never raises: what cannot work leaves `reason` and a vLLM without a
    cache."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(is_worker=role == KVConnectorRole.WORKER)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._metadata: LMCacheConnectorMetadata | None = None
        self._report = StepReport()
        self._stats_reporter = StatsReporter()
        self._events: KVEvents | None = None
        self._identity: Namespace | None = None
        """A worker's, but for what its pages decide; None where there is no cache."""
        self._warm = False
        try:
            self._start()
        except Exception as error:
            self._turn_off(error)

    # Start and stop

    def _start(self) -> None:
        transfer = self._vllm_config.kv_transfer_config
        self._live = LiveConfig(transfer.kv_connector_extra_config or {})
        config = self._live.config
        self._manager = LMCacheManager(
            config, config.runtime_dir or default_runtime_dir(str(transfer.engine_id))
        )
        if not self._is_worker:
            # The scheduler reports its reason to the admin sidecar even if it cannot use the cache.
            self._manager.start_control("scheduler", self)
        check_version(vllm.__version__, allow_untested=config.allow_untested_vllm)
        check_supported(self._vllm_config, self._kv_cache_config)
        block_size = self._block_size
        config.check_block_size(block_size)
        if self._is_worker:
            self._identity = namespace_of(
                self._vllm_config, self._kv_cache_config, config.chunk_size, coded=self._layer_spec.coded
            )
            self._manager.changes = ChangeLog() if _wants_events(self._vllm_config) else None
            return
        client = self._manager.start_lookup_client(_world_size(self._vllm_config))
        spec, layers = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec, self._layer_names
        token_bytes = self._layer_spec.chunk_token_bytes * len(layers)
        on_gpu = self._vllm_config.device_config.device_type != "cpu"
        self._scheduler = SchedulerSide(
            config,
            str(transfer.kv_role),
            block_size,
            client,
            _world_size(self._vllm_config),
            Copies(run_behind=on_gpu, token_bytes=token_bytes),
            self.guard.caught,
        )
        if _wants_events(self._vllm_config):
            unit = hash_block_size(self._kv_cache_config, self._vllm_config)
            kind = get_kv_cache_spec_kind(spec).value
            self._events = KVEvents(config.chunk_size, unit, _world_size(self._vllm_config), kind)
            self._scheduler.describe = self._describe
        if _world_size(self._vllm_config) == 1:
            self._scheduler.load_ahead = partial(ahead.load_ahead, self._manager.runtime_dir)
        self.reason = ""

    def _turn_off(self, error: Exception) -> None:
        self.reason = f"{error}"
        self._worker = self._scheduler = None
        self.guard.failures[type(error).__name__] += 1
        logger.error(
            "KV cache: off in this %s: %s. vLLM serves on without it.",
            "worker" if self._is_worker else "scheduler",
            error,
        )

    @guarded(lambda: None)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Starts the rank's engine over vLLM's pages, and its servers in any case."""
        if self._manager is None:
            return
        rank = self._rank = _rank(self._vllm_config)
        if self._identity is not None:
            try:
                self._start_engine(self._manager, self._identity, kv_caches, rank)
            except Exception as error:
                self._turn_off(error)
        self._manager.start_lookup_server(rank)
        self._manager.start_control(f"rank{rank}", self)
        if self._worker is not None and _world_size(self._vllm_config) == 1:
            ahead.announce(self._manager.runtime_dir, self._worker)

    @property
    def _layer_spec(self) -> LayerSpec:
        """What vLLM declares, and whether chunks hold coded rows."""
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        declared = LayerSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            num_blocks=self._kv_cache_config.num_blocks,
            use_mla=type(spec).__name__ == "MLAAttentionSpec",
        )
        wanted = self._manager is not None and self._manager.config.compression == "Lossless"
        return replace(declared, coded=wanted and declared.can_be_coded)

    def _start_engine(
        self, manager: LMCacheManager, identity: Namespace, kv_caches: dict[str, torch.Tensor], rank: int
    ) -> None:
        layers = self._layer_names
        self._namespace = identity.digest()
        layer_spec = joined_where_pages_are(self._layer_spec, kv_caches[layers[0]])
        if layer_spec.joined:
            self._namespace = identity.with_joined_rows().digest()
        use_mla = layer_spec.use_mla
        connector = VLLMPagedMemGPUConnectorV2(layer_spec)
        connector.initialize_kvcaches_ptr(kvcaches=[kv_caches[name] for name in layers])
        config = manager.config
        if config.compression != "None" and not layer_spec.coded:
            logger.info(
                "KV cache: KV of %s with %d elements a row is stored as it is; rows of bfloat16 with 64 "
                "elements and more, a multiple of 32, are compressed",
                layer_spec.dtype,
                self._layer_spec.hidden,
            )
        shape = KVShape.of(connector, config.chunk_size)
        parallel = self._vllm_config.parallel_config
        named_by = naming_rank(rank, parallel.tensor_parallel_size, use_mla=use_mla)
        database = ChunkedTokenDatabase(config.chunk_size, self._namespace, named_by, config.hash_seed)
        layered = VLLMPagedMemLayerwiseGPUConnector(layer_spec) if config.use_layerwise else None
        if layered is not None:
            layered.share_pages(connector)
        engine = manager.start_engine(
            database,
            shape,
            connector,
            layered,
            device=kv_caches[layers[0]].device,
            writes_below=named_by == rank,
        )
        self._transfer_path = connector.path
        self._worker = WorkerSide(
            engine,
            self._block_size,
            rank,
            self._report,
            self.guard.caught,
            layers,
            stores_by_layer=config.use_layerwise,
        )
        self.reason = ""

    @guarded(lambda: None)
    def shutdown(self) -> None:
        """Stops the servers and frees the tiers. vLLM does not always call it."""
        self._worker = self._scheduler = None
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    # Worker hooks

    @guarded(lambda: None)
    def handle_preemptions(self, metadata: Any) -> None:
        """Called before anything of the step may write into blocks that were taken from a request."""
        if not isinstance(metadata, LMCacheConnectorMetadata) or not metadata.blocks_were_taken:
            return
        if self._worker is not None:
            self._worker.handle_preemptions()

    @guarded(lambda: None)
    def warmed_up(self) -> None:
        """vLLM asks for handshake data, or runs a first step: all CUDA graphs are captured."""
        if not self._warm and self._manager is not None:
            self._warm = True
            self._manager.start_pinning()

    @guarded(lambda: None)
    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata
        self.warmed_up()
        if not isinstance(metadata, LMCacheConnectorMetadata):
            return
        self._report.worker.others_loads.update(metadata.others_loads)
        if self._worker is None:
            self._report.decline(metadata)
        else:
            self._worker.begin_step(metadata, alone=self._is_alone())

    def _is_alone(self) -> bool:
        """vLLM's connector is this one, not several of which this is one."""
        return has_kv_transfer_group() and getattr(get_kv_transfer_group(), "_impl", None) is self

    def clear_connector_metadata(self) -> None:
        self._metadata = None

    @guarded(lambda: None, on_error="_lose_loads")
    def start_load_kv(self, forward_context: Any) -> None:
        metadata = self._metadata
        if metadata is None:
            return
        for lookup_id, block_ids in metadata.lost_block_ids.items():
            self._report.lose(lookup_id, len(block_ids) * self._block_size, block_ids)
        self._report.finished_recving.update(metadata.lost_async)
        if self._worker is None:
            self._lose_loads()
        else:
            self._worker.start_load_kv(metadata, forward=_layered_kind(forward_context))

    def _lose_loads(self, forward_context: Any = None) -> None:
        """vLLM must hear of every load of this step that did not come, or it serves from unfilled pages."""
        if self._worker is not None:
            self._worker.drop_followed()
        for request in () if self._metadata is None else self._metadata.requests:
            if self._worker is not None and self._worker.runs_beside(request.lookup_id):
                continue  # vLLM may give its blocks away once it hears of it
            blocks = request.promised_blocks(self._block_size)
            if blocks:
                self._report.lose(request.lookup_id, len(blocks) * self._block_size, blocks)
                if request.load_spec is not None and request.load_spec.load_async:
                    self._report.finished_recving.add(request.req_id)

    @guarded(lambda: None)
    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_for_layer_load(layer_name)

    @guarded(lambda: None)
    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any) -> None:
        """In bulk there is nothing to do: stores happen in `wait_for_save`."""
        if self._worker is not None and isinstance(self._metadata, LMCacheConnectorMetadata):
            self._worker.save_kv_layer(layer_name, self._metadata)

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        if self._worker is not None and self._metadata is not None:
            self._worker.wait_for_save(self._metadata)

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose stores are done, of those held for us, and whose asynchronous loads have ended."""
        if self._worker is not None:
            self._worker.get_finished()
        return self._report.take_finished_sending() or None, self._report.take_finished_recving() or None

    @guarded(lambda: set())
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._report.take_invalid_block_ids()

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> LMCacheWorkerMetadata | None:
        if self._worker is not None:
            self._worker.engine.poll()
        if self._manager is not None and self._manager.changes is not None:
            changes = self._manager.changes.take()
            if changes is not None:
                self._report.worker.changes.append((self._rank, changes))
        return self._report.take_worker_metadata()

    # Scheduler hooks

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    @guarded(lambda: None)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler is not None:
            block_ids = blocks.get_block_ids()[0] if num_external_tokens > 0 else []
            self._scheduler.update_state_after_alloc(request, block_ids, num_external_tokens)

    @guarded(dict)
    def hit_tiers(self, request: Request, num_external_tokens: int) -> Mapping[str, int]:
        """The tiers that give a request the tokens that were just promised."""
        if self._scheduler is None:
            return {}
        return self._scheduler.hit_tiers(request.request_id, num_external_tokens)

    @guarded(lambda: False)
    def has_pending_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_work()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> LMCacheConnectorMetadata:
        """Guarded by itself: promises to vLLM that cannot be planned must reach the workers as lost."""
        if self._scheduler is None:
            return LMCacheConnectorMetadata("")
        try:
            return self._scheduler.build_connector_meta(scheduler_output)
        except Exception as error:
            self.guard.caught("build_connector_meta", error)
            return self._scheduler.lose_promises(scheduler_output)

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None and connector_output.finished_recving:
            # Before anything that may fail: steps that use the blocks are ordered behind their copies by it.
            self._scheduler.heard_of_ready_loads()
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(report, LMCacheWorkerMetadata):
            self._scheduler.update_connector_output(report, connector_output.invalid_block_ids or ())
            if self._events is not None:
                self._events.observe(report.changes)

    @guarded(lambda: ())
    def take_events(self) -> Sequence[Any]:
        """What became visible in all ranks' tiers, or went, since the last step."""
        return () if self._events is None else self._events.take()

    @guarded(lambda: None)
    def _describe(self, request: Request, first_token: int, num_tokens: int, digests: bytes) -> None:
        if self._events is not None:
            self._events.describe(request, first_token, num_tokens, digests)

    @guarded(lambda: (False, None))
    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        held = self._scheduler is not None and self._scheduler.request_finished(request.request_id)
        return held, None

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """vLLM was told to forget external KV too (after new weights, say): empties every rank's tiers."""
        if self._manager is None or self._scheduler is None:
            return None
        self._scheduler.forget_lookups()
        ranks = range(_world_size(self._vllm_config))
        flushed = [flush_rank(self._manager.runtime_dir, rank) for rank in ranks]
        return all(flushed)

    # Either role

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> CacheStats | None:
        """For vLLM's own metrics. Asked every step: only what has changed is looked at in full."""
        failures = self.guard.failures.total()
        if self._worker is not None:
            counters = self._worker.engine.counters
            tokens = counters.stored_tokens, counters.loaded_tokens, counters.load_failed_tokens
            activity = tokens, failures + counters.failures.total()
            return self._stats_reporter.take(activity, partial(self._rank_figures, counters))
        if self._scheduler is not None:
            count, lookups = self._scheduler.counters, self._scheduler.lookups
            asked = count.requests, count.computed_tokens, lookups, failures
            return self._stats_reporter.take(asked, lambda: figures_of(self.stats()))
        return self._stats_reporter.take((self.reason, failures), lambda: figures_of(self.stats()))

    def _rank_figures(self, counters: EngineCounters) -> Figures:
        """Without those of the tiers, which take longer than a step may."""
        return rank_figures(
            self._rank,
            ready=True,
            stored=counters.stored_tokens,
            loaded=counters.loaded_tokens,
            failed=counters.load_failed_tokens,
            failures=self.guard.failures + counters.failures,
        )

    @property
    def _layer_names(self) -> list[str]:
        return list(self._kv_cache_config.kv_cache_groups[0].layer_names)

    @property
    def _block_size(self) -> int:
        """Tokens of one of vLLM's blocks, which a block id of the scheduler names."""
        return int(self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def _wants_events(vllm_config: VllmConfig) -> bool:
    """vLLM publishes KV events."""
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def _layered_kind(forward_context: Any) -> tuple[str, bool] | None:
    """The kind of a forward that calls Python around each layer's attention: its CUDA graphs, and whether it
    is cut into microbatches. None where there is no attention to compute, or a full graph is replayed."""
    if forward_context is None or not forward_context.attn_metadata:
        return None
    mode = forward_context.cudagraph_runtime_mode
    return None if mode == CUDAGraphMode.FULL else (mode.name, bool(forward_context.ubatch_slices))


def _world_size(vllm_config: VllmConfig) -> int:
    """Ranks of tensor x pipeline parallelism."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


def _rank(vllm_config: VllmConfig) -> int:
    """The rank in tensor x pipeline parallelism, stage by stage."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return int(
        get_pp_group().rank_in_group * vllm_config.parallel_config.tensor_parallel_size
        + get_tp_group().rank_in_group
    )
