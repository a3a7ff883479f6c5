# SPDX-License-Identifier: Apache-2.0
"""What stands behind the routes: the processes of one vLLM, the window of hits, and the flushes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import httpx

from kvcache.admin.flush import GPU_TIER, FlushJobs, GpuCache
from kvcache.admin.models import FlushReport, FlushRequest
from kvcache.admin.problems import Problem
from kvcache.admin.window import HitWindow
from kvcache.bearer import TokenFile
from kvcache.control.client import ControlClient
from kvcache.control.snapshot import Snapshot

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """How the sidecar was started."""

    runtime_dir: str
    token_file: str | None = None
    vllm_url: str | None = None
    expected_ranks: int | None = None
    timeout_s: float = 2.0
    """The longest that a process may take for its statistics."""
    flush_timeout_s: float = 10.0
    gpu_patience_s: float = 2.0
    """How long a flush of the GPU's cache waits for running requests."""
    sample_s: float = 10.0
    """Between two samples of the window of hits."""


class AdminService:
    """Belongs to one event loop: `start` and `close` it there.

    Args:
        settings: how the sidecar was started.
        token_file: who may use it; its token is also sent to vLLM.
        transport: to vLLM, in place of the network.
    """

    def __init__(
        self, settings: Settings, token_file: TokenFile, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.window = HitWindow()
        self._settings = settings
        self._control = ControlClient(
            settings.runtime_dir, settings.expected_ranks, settings.timeout_s, settings.flush_timeout_s
        )
        self._gpu = GpuCache(
            settings.vllm_url, token_file, patience_s=settings.gpu_patience_s, transport=transport
        )
        self.flushes = FlushJobs(self._control.flush, self._gpu)
        self._known_tiers: set[str] = set()
        self._collecting: asyncio.Task[Snapshot] | None = None
        self._sampler: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to sample the window of hits."""
        self._sampler = asyncio.create_task(self._sample())

    async def close(self) -> None:
        """Ends what runs and closes all connections."""
        tasks = [task for task in (self._sampler, self._collecting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.flushes.close()
        await self._gpu.close()
        self._control.close()

    async def snapshot(self) -> Snapshot:
        """What all processes report now. Callers at the same time share one round of questions."""
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(self._collect())
        return await asyncio.shield(self._collecting)

    async def flush(self, request: FlushRequest) -> FlushReport:
        """Begins a flush.

        Raises:
            Problem: 422 for a tier that is not there; 503 while no rank says which there are; 409 while a
                flush runs.
        """
        unknown = set(request.tiers) - {GPU_TIER} - self._known_tiers
        if unknown:
            snapshot = await self.snapshot()
            unknown -= self._known_tiers
            if unknown and not snapshot.ranks:
                raise Problem(
                    503,
                    "NoRanks",
                    "No rank answers, so its tiers are not known.",
                    missing=dict(snapshot.missing),
                )
        if unknown:
            known = [GPU_TIER, *sorted(self._known_tiers)]
            raise Problem(
                422,
                "UnknownTier",
                f"tiers: {', '.join(sorted(unknown))} was read; known are {', '.join(known)}.",
                known_tiers=known,
            )
        return self.flushes.start(request)

    async def _collect(self) -> Snapshot:
        snapshot = await self._control.snapshot()
        self._known_tiers.update(snapshot.tier_names())
        if snapshot.scheduler is not None:
            self.window.add(snapshot.taken_at, snapshot.scheduler)
        return snapshot

    async def _sample(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # a sample less; the next reader sees the reason
                await self.snapshot()
            await asyncio.sleep(self._settings.sample_s)
