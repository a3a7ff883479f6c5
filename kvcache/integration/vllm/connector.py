# SPDX-License-Identifier: Apache-2.0
"""The shell that vLLM loads: `kv_connector: LMCacheConnectorV1Dynamic`, `kv_connector_module_path` this
module.

It only delegates. If the implementation cannot start, it stays in place as an inert connector that says why,
and vLLM serves on without a cache.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvcache.config import ConfigError, load_config
from kvcache.integration.vllm.adapter import LMCacheConnectorV1Impl
from kvcache.integration.vllm.metadata import LMCacheConnectorMetadata
from kvcache.integration.vllm.vllm_stats import CachePromMetrics, CacheStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM below 0.32 does not ask where a hit came from
    CacheHitSource = None

logger = logging.getLogger("vllm.kvcache")


def _hit_source(tier: str) -> Any:
    """vLLM's name for where a tier keeps KV."""
    sources = {"cpu": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
    return sources.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)


class LMCacheConnectorV1Dynamic(KVConnectorBase_V1, SupportsHMA):
    """vLLM's side of the cache, in the scheduler process and in each worker process.

    `SupportsHMA` keeps vLLM from switching its hybrid KV cache manager off on our account; a model with
    several KV cache groups is then served without the cache.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._impl = LMCacheConnectorV1Impl(vllm_config, role, kv_cache_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer by layer, the hooks around attention do work: they must not be captured in a graph."""
        try:
            return load_config(extra_config).use_layerwise
        except ConfigError:
            return False  # the connector says so itself when it starts

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """None: pages of every layout that vLLM declares are copied as they lie, at the link's rate, so the
        backend's choice and other connectors' wishes stand."""
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return CacheStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return CachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache promises nothing: a request that is preempted or finished need not wait for its stores."""
        return False

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._impl.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> None:
        """None: there is nothing to shake hands about. vLLM asks when its workers are ready to serve."""
        self._impl.warmed_up()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._impl.handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._impl.bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._impl.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._impl.start_load_kv(forward_context)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._impl.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._impl.save_kv_layer(layer_name, kv_layer, attn_metadata)

    def wait_for_save(self) -> None:
        self._impl.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._impl.get_finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._impl.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._impl.build_connector_worker_meta()

    # Scheduler

    def on_new_request(self, request: Request) -> None:
        """Nothing to prepare: a request is named when vLLM asks for its hits."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._impl.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._impl.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """vLLM 0.32 and later: which of its kinds of place gave how many tokens."""
        found: Counter[Any] = Counter()
        for tier, tokens in self._impl.hit_tiers(request, num_external_tokens).items():
            found[_hit_source(tier)] += tokens
        return dict(found)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> LMCacheConnectorMetadata:
        return self._impl.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._impl.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._impl.request_finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._impl.request_finished(request)

    def has_pending_push_work(self) -> bool:
        return self._impl.has_pending_work()

    def take_events(self) -> Iterable[Any]:
        return self._impl.take_events()

    def reset_cache(self) -> bool | None:
        return self._impl.reset_cache()

    # Either role

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._impl.get_kv_connector_stats()

    def shutdown(self) -> None:
        self._impl.shutdown()
