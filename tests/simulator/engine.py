# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler and the connector in both its roles, put together in one process.

The scheduler, its block pool and the aggregation of the ranks' reports are vLLM's code as it is; the sockets
between scheduler and ranks and the model are doubles.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from kvcache.config.tiers import WriteMode
from kvcache.gpu_connector import base
from kvcache.integration.vllm import adapter
from kvcache.integration.vllm.adapter import LMCacheConnectorV1Impl
from kvcache.integration.vllm.connector import LMCacheConnectorV1Dynamic
from kvcache.lookup.client import LookupClient
from kvcache.manager import LMCacheManager, _EngineLookups, _NoLookups
from kvcache.storage.manager import StorageManager
from kvcache.storage.pins import PinBook
from kvcache.storage.tenants import Quotas
from kvcache.storage.tiers.cpu import CpuTier
from tests.simulator.copies import SimulatedTransfer, Streams
from tests.simulator.lookups import SimulatedLookups
from tests.simulator.runner import Rank
from tests.simulator.slow import SlowTiers
from tests.simulator.values import LANES

MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class Shape:
    """What stays the same while an engine lives.

    Args:
        block_size, chunk_size: tokens.
        num_blocks: of vLLM's pool, one of them unusable.
        tier_chunks: capacity of each rank's tier.
        budget: tokens that vLLM schedules in a step.
        max_seqs: requests in a step.
        depth: steps in flight: 2 is asynchronous scheduling.
        ranks: of tensor parallelism, in each stage of the pipeline.
        layers: of each stage.
        mla: the ranks of a stage hold the same bytes.
        heads: of each rank, 1 or 2; chunks of more than one have joined rows.
        behind: copies run beside the model, as on a GPU.
        whole_pages: a page's bytes are not in the order of its tokens.
        prefix_caching: vLLM's own.
        role: `kv_role`.
        broken_rank: a rank whose engine cannot start.
        drafts: speculative tokens a step.
        sockets: lookups go over unix sockets, in the folder that `extra` names as `runtime_dir`.
        below: tiers below host memory, the fastest first: how each is written, and whether it knows at once
            what it has.
        mixed_loads: loads beside others wait outside of the batch or not at random; by their length all of
            them are too short here for any to.
        extra: more of the cache's configuration.
    """

    block_size: int = 8
    chunk_size: int = 16
    num_blocks: int = 40
    tier_chunks: int = 40
    budget: int = 48
    max_seqs: int = 6
    depth: int = 1
    ranks: int = 1
    layers: tuple[int, ...] = (2,)
    mla: bool = False
    heads: int = 1
    behind: bool = False
    whole_pages: bool = False
    prefix_caching: bool = True
    role: str = "kv_both"
    broken_rank: int | None = None
    drafts: int = 0
    sockets: bool = False
    below: tuple[tuple[WriteMode, bool], ...] = ()
    mixed_loads: bool = False
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def workers(self) -> int:
        """Ranks of tensor x pipeline parallelism, stage by stage."""
        return self.ranks * len(self.layers)

    def layers_of(self, worker: int) -> int:
        return self.layers[worker // self.ranks]

    def lanes_of(self, worker: int) -> int:
        """Every other stage has wider heads."""
        return LANES * (1 + worker // self.ranks % 2)

    def named_by(self, worker: int) -> int:
        """The first of those who hold the same bytes."""
        return worker - worker % self.ranks if self.mla else worker

    def tier_bytes(self, worker: int) -> int:
        """Chunks take whole pages of 4 KiB."""
        chunk = self.chunk_size * self.lanes_of(worker) * 8 * self.layers_of(worker)
        return -(-chunk // 4096) * 4096 * self.tier_chunks


class Engine:
    """One life of a vLLM.

    Args:
        model_dir: folder of any model that vLLM knows; only its configuration is read.
        times_out: whether a rank misses the next lookup.
        copy_fails: whether a rank's next copy cannot be made.
        about_to_write: called with the rank and the slots of each load.
    """

    def __init__(
        self,
        shape: Shape,
        model_dir: Path,
        dice: random.Random,
        times_out: Callable[[], bool],
        copy_fails: Callable[[], bool],
        about_to_write: Callable[[int, Sequence[int]], None],
    ) -> None:
        self.shape = shape
        self.slow = SlowTiers()
        self.backends: list[Any] = []
        self.lookups = SimulatedLookups(self.backends, times_out)
        self.config = _vllm_config(shape, model_dir)
        with self._patched():
            self.ranks = [
                self._start_rank(rank, dice, copy_fails, about_to_write) for rank in range(shape.workers)
            ]
            scheduler_class = AsyncScheduler if shape.depth > 1 else Scheduler
            self.scheduler: Any = scheduler_class(
                vllm_config=self.config,
                kv_cache_config=_pages(shape, 0),
                block_size=shape.block_size,
                structured_output_manager=_structured_output(model_dir),
                log_stats=True,
            )
        self.block_hasher = _block_hasher(shape.block_size)
        for number, impl in enumerate([self.scheduler_impl, *self.rank_impls], start=-1):
            if impl.reason and number != shape.broken_rank:
                raise RuntimeError(f"the cache is off: {impl.reason}")

    @property
    def scheduler_impl(self) -> LMCacheConnectorV1Impl:
        impl: LMCacheConnectorV1Impl = self.scheduler.connector._impl
        return impl

    @property
    def rank_impls(self) -> list[LMCacheConnectorV1Impl]:
        return [rank.connector._impl for rank in self.ranks]

    def close(self) -> None:
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()

    def _patched(self) -> Any:
        return mock.patch.multiple(
            adapter,
            LMCacheManager=functools.partial(_Manager, self),
            namespace_of=_namespace,
            _rank=lambda config: len(self.backends),
        )

    def _start_rank(
        self,
        number: int,
        dice: random.Random,
        copy_fails: Callable[[], bool],
        about_to_write: Callable[[int, Sequence[int]], None],
    ) -> Rank:
        shape, pages = self.shape, _pages(self.shape, number)
        lanes = shape.lanes_of(number) // shape.heads
        size = (shape.num_blocks, shape.block_size, shape.heads, lanes)
        tensors = {
            name: torch.zeros(size, dtype=torch.float64).transpose(1, 2)
            for name in pages.kv_cache_groups[0].layer_names
        }
        connector = LMCacheConnectorV1Dynamic(self.config, KVConnectorRole.WORKER, pages)
        with mock.patch.object(base, "PageTransfer", SimulatedTransfer):
            connector.register_kv_caches(tensors)
        rank = Rank(connector, tensors)
        side = connector._impl._worker
        if side is not None:
            rank.streams = Streams(dice, shape.behind, copy_fails, functools.partial(about_to_write, number))
            transfer: Any = side.engine.gpu_connector.transfer
            transfer.streams = rank.streams
        return rank


class _Manager(LMCacheManager):
    """The manager without sockets."""

    def __init__(self, simulated: Engine, config: Any, runtime_dir: Any) -> None:
        super().__init__(config, runtime_dir)
        self._simulated = simulated

    def start_control(self, name: str, backend: Any) -> None:
        pass

    def start_engine(self, *arguments: Any, **more: Any) -> Any:
        if self._simulated.shape.broken_rank == len(self._simulated.backends):
            raise OSError("no memory on this rank")
        # Smaller than a configuration may say, so that tiers are full.
        capacity = self._simulated.shape.tier_bytes(len(self._simulated.backends))
        cpu = self.config.tiers.cpu.model_copy(update={"capacity": capacity})
        tiers = self.config.tiers.model_copy(update={"cpu": cpu})
        self.config = self.config.model_copy(update={"tiers": tiers})
        return super().start_engine(*arguments, **more)

    def _storage(self, cpu: CpuTier, context: Any, pins: PinBook, quotas: Quotas) -> StorageManager:
        slow, shape = self._simulated.slow, self._simulated.shape
        return StorageManager(
            cpu,
            slow.lanes(shape.below, shape.named_by(len(self._simulated.backends))),
            pins=pins,
            quotas=quotas,
            run_soon=slow.soon.append,
            clock=slow.clock,
            writes_below=self._writes_below,
        )

    def start_lookup_server(self, rank: int) -> None:
        if self._simulated.shape.sockets:
            super().start_lookup_server(rank)
        self._simulated.backends.append(_NoLookups() if self.engine is None else _EngineLookups(self.engine))

    def start_lookup_client(self, world_size: int) -> LookupClient:
        if self._simulated.shape.sockets:
            # Not the manager's: it would call the ranks, which are in its process.
            client = LookupClient(self.runtime_dir, world_size, self.config.lookup_timeout_ms / 1000)
            client.hello(client.timeout_s)
            self.lookup_client = client  # to be closed
            return client
        return cast(LookupClient, self._simulated.lookups)


def _pages(shape: Shape, worker: int) -> KVCacheConfig:
    """Of the layers of a worker's stage; vLLM's scheduler goes by the first stage's."""
    stage = worker // shape.ranks
    first = sum(shape.layers[:stage])
    names = [f"layer{layer}" for layer in range(first, first + shape.layers_of(worker))]
    kind = MLAAttentionSpec if shape.mla else FullAttentionSpec
    spec = kind(
        block_size=shape.block_size,
        num_kv_heads=shape.heads,
        head_size=shape.lanes_of(worker) // shape.heads // (1 if shape.mla else 2),
        dtype=torch.float64,
    )
    return KVCacheConfig(
        num_blocks=shape.num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
    )


def _vllm_config(shape: Shape, model_dir: Path) -> Any:
    config = copy.copy(_base_config(model_dir, shape.drafts))
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.block_size = shape.block_size
    config.cache_config.num_gpu_blocks = shape.num_blocks
    config.cache_config.enable_prefix_caching = shape.prefix_caching
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.max_num_batched_tokens = shape.budget
    config.scheduler_config.max_num_seqs = shape.max_seqs
    config.scheduler_config.async_scheduling = shape.depth > 1
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.tensor_parallel_size = shape.ranks
    config.parallel_config.pipeline_parallel_size = len(shape.layers)
    config.device_config = copy.copy(config.device_config)
    config.device_config.device_type = "cuda" if shape.behind else "cpu"
    config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    config.kv_transfer_config.kv_role = shape.role
    config.kv_transfer_config.kv_connector_extra_config = {
        "chunk_size": shape.chunk_size,
        **dict(shape.extra),
    }
    return config


@functools.cache
def _base_config(model_dir: Path, drafts: int) -> Any:
    speculative = None
    if drafts:
        speculative = {
            "method": "ngram",
            "num_speculative_tokens": drafts,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        }
    return EngineArgs(
        model=str(model_dir),
        enforce_eager=True,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
        speculative_config=speculative,
        kv_transfer_config={
            "kv_connector": "LMCacheConnectorV1Dynamic",
            "kv_connector_module_path": "kvcache.integration.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        },
    ).create_engine_config()


@functools.cache
def _structured_output(model_dir: Path) -> StructuredOutputManager:
    return StructuredOutputManager(_base_config(model_dir, 0))


@functools.cache
def _block_hasher(block_size: int) -> Any:
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    return get_request_block_hasher(block_size, hash_function)


@dataclass(frozen=True)
class _Namespace:
    joined: bool = False

    def with_joined_rows(self) -> _Namespace:
        return _Namespace(joined=True)

    def digest(self) -> bytes:
        return bytes(range(16, 32) if self.joined else range(16))


def _namespace(*_: Any, **__: Any) -> _Namespace:
    """Reading the model's weights takes longer than a whole simulation."""
    return _Namespace()
