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
from kvcache.memory.allocator import ChunkAllocator, KVShape
from kvcache.memory.region import HostRegion
from kvcache.storage.manager import StorageManager
from kvcache.storage.policies import POLICIES
from kvcache.storage.tiers.cpu import CpuTier
from kvcache.tokens.database import ChunkedTokenDatabase

_STATES = {"Pinned": "Ready"}
"""Of page-locked memory, as the tier's state: `Pinning` serves already, `PinningFailed` serves slowly."""


class _EngineLookups:
    """What the lookup server asks of the engine: digests in, leased chunks out."""

    def __init__(self, engine: LMCacheEngine) -> None:
        self._engine = engine

    def lookup_and_lease(self, hashes: bytes, owner: str) -> int:
        return self._engine.storage.lookup_and_lease(self._engine.database.keys(hashes), owner)

    def release(self, owner: str) -> None:
        self._engine.storage.release(owner)

    def release_session(self, prefix: str) -> None:
        self._engine.storage.release_where(lambda owner: owner.startswith(prefix))


class _NoLookups:
    """A rank without an engine holds nothing, and says so at once instead of letting the scheduler wait."""

    def lookup_and_lease(self, hashes: bytes, owner: str) -> int:
        return 0

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

    def start_engine(
        self,
        database: ChunkedTokenDatabase,
        shape: KVShape,
        gpu_connector: BulkConnector,
        layer_connector: LayerwiseConnector | None = None,
        *,
        device: torch.device,
    ) -> LMCacheEngine:
        """Makes the engine of a rank.

        Args:
            database: names the rank's chunks.
            shape: of the KV of one chunk on this rank.
            gpu_connector: copies between the rank's pages and the chunks, all layers at once.
            layer_connector: the same a layer at a time; None where that is not asked for.
            device: of the pages. A GPU's copies want page-locked memory on its side of the machine.

        Raises:
            OSError: the region cannot be reserved.
        """
        cpu = self.config.tiers.cpu
        on_gpu = device.type == "cuda"
        region = HostRegion(
            cpu.capacity,
            pin=cpu.pinning if on_gpu else "Disabled",
            numa_node=_native.numa_node(device.index or 0) if on_gpu else -1,
            hold=True,
        )
        self._region = region
        # Pageable is what was asked for where there is no GPU.
        state = (lambda: _STATES.get(region.state, region.state)) if on_gpu else (lambda: "Ready")
        allocator = ChunkAllocator(region, shape)
        tier = CpuTier(
            allocator,
            POLICIES[cpu.eviction](allocator.capacity_bytes // shape.chunk_bytes),
            self.config.lease_timeout_s,
            state,
        )
        self.engine = LMCacheEngine(database, StorageManager(tier), gpu_connector, layer_connector)
        return self.engine

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
        client = LookupClient(self.runtime_dir, world_size, self.config.lookup_timeout_ms / 1000)
        client.hello(self.config.lookup_timeout_ms / 1000)
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
