# SPDX-License-Identifier: Apache-2.0
"""The manager: starts what a process of the cache needs, hands it out, and stops it in order.

It stores and looks up nothing itself; callers take the engine or the lookup client from it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from kvcache import _native
from kvcache.config import LMCacheEngineConfig
from kvcache.control.server import ControlBackend, ControlServer
from kvcache.engine import LMCacheEngine
from kvcache.gpu_connector.layerwise import LayerwiseConnector
from kvcache.gpu_connector.paged import BulkConnector
from kvcache.lookup.client import LookupClient
from kvcache.lookup.server import LookupServer
from kvcache.lookup.wire import LookupReply, LookupRequest
from kvcache.memory.allocator import ChunkAllocator, KVShape
from kvcache.memory.region import HostRegion
from kvcache.storage.adapt import adapt
from kvcache.storage.build import host_policies, open_lanes
from kvcache.storage.changes import ChangeLog
from kvcache.storage.fetch import Query, Standing
from kvcache.storage.manager import StorageManager
from kvcache.storage.pins import PinBook
from kvcache.storage.tenants import Quotas
from kvcache.storage.tier import TierContext
from kvcache.storage.tiers.cpu import CpuTier
from kvcache.tokens.database import ChunkedTokenDatabase

_STATES = {"Pinned": "Ready"}
"""Of page-locked memory, as the tier's state: `Pinning` serves already, `PinningFailed` serves slowly."""


class _EngineLookups:
    """What the lookup server asks of the engine: digests in, leased chunks out."""

    def __init__(self, engine: LMCacheEngine) -> None:
        self._engine = engine

    def lookup(self, request: LookupRequest, owner: str) -> LookupReply:
        database = self._engine.database
        keys = database.keys(request.hashes)
        tokens = len(keys) * database.chunk_size
        if 0 < request.num_tokens <= tokens:
            tokens = request.num_tokens
        skip = min(request.skip, len(keys))
        query = Query(keys, tokens, request.tenant, request.seconds_per_token, skip)
        return _reply(self._engine.storage.begin_lookup(owner, query))

    def progress(self, owner: str) -> LookupReply:
        return _reply(self._engine.storage.standing(owner))

    def release(self, owner: str) -> None:
        self._engine.storage.release(owner)

    def release_session(self, prefix: str) -> None:
        self._engine.storage.release_where(lambda owner: owner.startswith(prefix))


def _reply(standing: Standing) -> LookupReply:
    return LookupReply(
        standing.chunks, standing.most, standing.stored, standing.wait_s, list(standing.sources)
    )


class _NoLookups:
    """A rank without an engine holds nothing, and says so at once instead of letting the scheduler wait."""

    def lookup(self, request: LookupRequest, owner: str) -> LookupReply:
        return LookupReply(0, 0, 0)

    def progress(self, owner: str) -> LookupReply:
        return LookupReply(0, 0, 0)

    def release(self, owner: str) -> None:
        return

    def release_session(self, prefix: str) -> None:
        return


class LMCacheManager:
    """One process's share of the cache: a rank's engine with its lookup server, or the scheduler's lookup
    client."""

    def __init__(self, config: LMCacheEngineConfig, runtime_dir: str | Path) -> None:
        self.config = config
        self.runtime_dir = Path(runtime_dir)
        self.engine: LMCacheEngine | None = None
        self.lookup_client: LookupClient | None = None
        self._lookup_server: LookupServer | None = None
        self._control_server: ControlServer | None = None
        self._region: HostRegion | None = None
        self._writes_below = True
        self.changes: ChangeLog | None = None
        """Where the tiers note what becomes visible and what goes; to be set before the engine starts."""

    def start_engine(
        self,
        database: ChunkedTokenDatabase,
        shape: KVShape,
        gpu_connector: BulkConnector,
        layer_connector: LayerwiseConnector | None = None,
        *,
        device: torch.device,
        writes_below: bool = True,
    ) -> LMCacheEngine:
        """Makes the engine of a rank.

        Args:
            database: names the rank's chunks.
            shape: of the KV of one chunk on this rank.
            gpu_connector: copies between the rank's pages and the chunks, all layers at once.
            layer_connector: the same a layer at a time; None where that is not asked for.
            device: of the pages. A GPU's copies want page-locked memory on its side of the machine.
            writes_below: False where another rank writes the same chunks to the tiers below host memory.

        Raises:
            OSError: the region cannot be reserved.
        """
        self._writes_below = writes_below
        tiers = self.config.tiers
        on_gpu = device.type == "cuda"
        number = device.index or 0
        region = HostRegion(
            tiers.cpu.capacity,
            pin=tiers.cpu.pinning if on_gpu else "Disabled",
            numa_node=_native.numa_node(number) if on_gpu else -1,
            hold=True,
            device=number,
        )
        self._region = region
        # Pageable is what was asked for where there is no GPU.
        state = (lambda: _STATES.get(region.state, region.state)) if on_gpu else (lambda: "Ready")
        allocator = ChunkAllocator(region, shape)
        quotas = Quotas(tiers.tenants)
        pins = PinBook(lambda: cpu.stats().capacity_bytes // shape.chunk_bytes // 2)
        policy, admission = host_policies(tiers, allocator.capacity_bytes // shape.chunk_bytes)
        cpu = CpuTier(
            allocator,
            policy,
            self.config.lease_timeout_s,
            state,
            changes=self.changes,
            admission=admission,
            quota=quotas.of,
            pinned=pins.pinned,
        )
        context = TierContext(
            shape=shape,
            namespace=database.namespace,
            rank=database.rank,
            pinned=pins.pinned,
            quota=quotas.of,
            encryption_key_file=tiers.encryption_key_file,
            changes=self.changes,
        )
        self.engine = LMCacheEngine(
            database,
            self._storage(cpu, context, pins, quotas),
            gpu_connector,
            layer_connector,
        )
        return self.engine

    def _storage(self, cpu: CpuTier, context: TierContext, pins: PinBook, quotas: Quotas) -> StorageManager:
        """All tiers of the rank."""
        return StorageManager(
            cpu,
            open_lanes(self.config.tiers, context),
            pins=pins,
            quotas=quotas,
            forget_after_s=self.config.lease_timeout_s,
            writes_below=self._writes_below,
        )

    def adapt(self, config: LMCacheEngineConfig) -> list[str]:
        """Takes over the live fields of another configuration. Any thread.

        Args:
            config: differs from the one in use in live fields alone.

        Returns:
            Those of them that cannot take effect after all (dotted names), and wait for the next start.
        """
        waiting = []
        if self.engine is not None:
            waiting = adapt(self.engine.storage, self.config.tiers, config.tiers)
        if self.lookup_client is not None:
            self.lookup_client.set_timeout(config.lookup_timeout_ms / 1000)
        self.config = config
        return waiting

    def start_pinning(self) -> None:
        """Lets the engine's memory be page-locked: vLLM has captured its CUDA graphs, which that would break.

        Idempotent.
        """
        if self._region is not None:
            self._region.start_pinning()

    def start_lookup_server(self, rank: int) -> None:
        """Answers the scheduler's lookups, with nothing stored where there is no engine. Raises IpcError."""
        backend = _NoLookups() if self.engine is None else _EngineLookups(self.engine)
        self._lookup_server = LookupServer(self.runtime_dir, rank, backend)

    def start_lookup_client(self, world_size: int) -> LookupClient:
        """The scheduler's way to ask `world_size` ranks. Raises IpcError."""
        timeout_s = self.config.lookup_timeout_ms / 1000
        client = LookupClient(self.runtime_dir, world_size, timeout_s, call_own=True)
        client.hello(timeout_s)
        self.lookup_client = client
        return client

    def start_control(self, name: str, backend: ControlBackend) -> None:
        """Lets the admin sidecar ask this process (`scheduler` or `rank<R>`). Raises IpcError."""
        self._control_server = ControlServer(self.runtime_dir, name, backend)

    def close(self) -> None:
        """Servers first, so that nobody asks an engine that is going, then the engine."""
        for server in (self._control_server, self._lookup_server, self.lookup_client):
            if server is not None:
                server.close()
        self._control_server = self._lookup_server = self.lookup_client = None
        if self.engine is not None:
            self.engine.close()
            self.engine = self._region = None
        if self.config.runtime_dir is None:
            # Made for this engine alone; the last of its processes finds it empty.
            with contextlib.suppress(OSError):
                self.runtime_dir.rmdir()
