# SPDX-License-Identifier: Apache-2.0
"""What stands behind the routes: the processes of one vLLM, the window of hits, and the flushes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass

import httpx

from kvcache.admin.cached import CachedPrompts
from kvcache.admin.flush import GPU_TIER, FlushJobs, GpuCache
from kvcache.admin.models import FlushReport, FlushRequest
from kvcache.admin.mounted import MountedConfig
from kvcache.admin.prefixes import PromptFields, PromptReader
from kvcache.admin.problems import Problem
from kvcache.admin.rounds import Pace, Rounds
from kvcache.admin.window import HitWindow
from kvcache.bearer import TokenFile
from kvcache.control.client import ControlClient
from kvcache.control.snapshot import Snapshot
from kvcache.control.wire import SCHEDULER, FlushScope
from kvcache.observability.metrics import SidecarStats

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
    sample_s: float = 1.0
    """Between two rounds of questions to all processes: open routes answer from the last one."""
    rounds_per_s: float = 4.0
    """In the long run, however many ask. Each takes some 0.5 ms of vLLM's processors; who comes between two
    is told what was so 0.25 s before at most."""
    rounds_at_once: int = 8
    """That may follow each other without a pause after some in which nobody asked."""
    config_file: str | None = None
    """The mounted configuration, which is handed to all processes."""


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
        self.prompts = PromptReader(settings.vllm_url, transport=transport)
        self.rounds = Rounds(
            self._ask,
            Pace(settings.rounds_per_s, settings.rounds_at_once),
            Snapshot(time.time(), missing={SCHEDULER: "it was not asked yet"}),
        )
        self.cached = CachedPrompts(self._control, settings.flush_timeout_s, self.rounds.outdate)
        self.flushes = FlushJobs(self._control.flush, self._gpu, self.rounds.outdate)
        self.mounted = MountedConfig(settings.config_file)
        self._known_tiers: set[str] = set()
        self._sampler: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to ask all processes again and again, and to watch the mounted configuration."""
        self._sampler = asyncio.create_task(self._sample())

    async def close(self) -> None:
        """Ends what runs and closes all connections."""
        if self._sampler is not None:
            self._sampler.cancel()
            await asyncio.gather(self._sampler, return_exceptions=True)
        await self.rounds.close()
        await self.flushes.close()
        await self._gpu.close()
        await self.prompts.close()
        self._control.close()

    def sidecar_stats(self, requests: Counter[tuple[str, int]]) -> SidecarStats:
        """What is counted here and nowhere else."""
        # From the start on, or the first flush of a tier would be no growth of its counter.
        none_yet = {
            (tier, result): 0
            for tier in (GPU_TIER, *self._known_tiers)
            for result in ("complete", "incomplete")
        }
        return SidecarStats(
            requests=dict(requests),
            flushes=none_yet | dict(self.flushes.ended),
            config_valid=self.mounted.valid,
            config_changes=dict(self.mounted.changes),
            config_in_effect={name: found.in_effect for name, found in self.mounted.processes.items()},
        )

    async def flush(self, request: FlushRequest) -> FlushReport:
        """Begins a flush.

        Raises:
            Problem: 422 for a tier that is not there or a part of the gpu tier; 503 while no rank says which
                tiers there are, or where a prompt cannot be read; 409 while a flush runs.
        """
        unknown = set(request.tiers) - {GPU_TIER} - self._known_tiers
        if unknown:
            snapshot = await self.rounds.snapshot()
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
        return self.flushes.start(request, await self._flush_scope(request))

    async def _flush_scope(self, request: FlushRequest) -> FlushScope:
        """As the ranks understand it."""
        asked = request.scope
        if GPU_TIER in request.tiers and asked.is_partial:
            detail = "scope: a part of the gpu tier was asked for; vLLM can drop it as a whole only."
            raise Problem(422, "ScopedGpu", detail)
        prefix = None
        if asked.tokens is not None or asked.prompt is not None:
            fields = PromptFields(tokens=asked.tokens, prompt=asked.prompt, salt=asked.salt or "")
            prefix = await self.prompts.prefix(fields)
        return FlushScope(
            namespace=None if asked.namespace is None else bytes.fromhex(asked.namespace),
            salt=asked.salt,
            prefix=prefix,
            force=asked.force,
        )

    async def _ask(self) -> Snapshot:
        snapshot = await self._control.snapshot()
        self._known_tiers.update(snapshot.tier_names())
        if snapshot.scheduler is not None:
            self.window.add(snapshot.taken_at, snapshot.scheduler)
        return snapshot

    async def _sample(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # a round less; the next reader sees the reason
                self.mounted.look()
                if await self.mounted.hand_over(await self.rounds.snapshot(), self._control):
                    self.rounds.outdate()
            await asyncio.sleep(self._settings.sample_s)
