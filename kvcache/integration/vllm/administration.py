# SPDX-License-Identifier: Apache-2.0
"""What the admin sidecar asks of one of vLLM's processes, and how the scheduler's one empties the ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from kvcache.config import LMCacheEngineConfig
from kvcache.control.wire import (
    Configured,
    Flush,
    Flushed,
    FlushResult,
    FlushScope,
    Located,
    Pinned,
    Pins,
    Prefix,
    Unpinned,
    rank_name,
    socket_path,
)
from kvcache.integration.vllm.guard import Guard
from kvcache.integration.vllm.live import LiveConfig
from kvcache.integration.vllm.scheduler import SchedulerSide
from kvcache.integration.vllm.worker import WorkerSide
from kvcache.ipc import Client, IpcError
from kvcache.manager import LMCacheManager
from kvcache.stats import RankStats, SchedulerStats
from kvcache.storage.futures import done

logger = logging.getLogger("vllm.kvcache")

_FLUSH_TIMEOUT_S = 10.0


class Administered:
    """A process of the connector as its control server knows it (`kvcache.control.server.ControlBackend`).
    Questions come on that server's thread."""

    def __init__(self, *, is_worker: bool) -> None:
        self.guard = Guard()
        self.reason = "the KV caches are not registered yet"
        """Why there is no cache here; empty where there is one."""
        self._is_worker = is_worker
        self._manager: LMCacheManager | None = None
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._live: LiveConfig | None = None
        self._namespace = b""
        self._transfer_path = "none"
        self._rank = 0
        """Known when the KV caches are registered."""

    def stats(self) -> RankStats | SchedulerStats:
        """A snapshot of this process."""
        stats = self._rank_stats() if self._is_worker else self._scheduler_stats()
        if self._live is None:
            return stats
        return msgspec.structs.replace(
            stats, config_digest=self._live.digest, config_restart=self._live.restart
        )

    def configure(self, file: Mapping[str, Any]) -> Configured:
        """Takes in what the configuration file says, as far as it can without a restart."""
        if self._live is None or (self._worker is None and self._scheduler is None):
            return Configured(refused=f"the cache is off in this process ({self.reason}); start it anew")
        return self._live.take_in(file, self._adapt)

    def _adapt(self, config: LMCacheEngineConfig) -> list[str]:
        if self._scheduler is not None:
            self._scheduler.adapt(config)
        return [] if self._manager is None else self._manager.adapt(config)

    def flush(self, tiers: Sequence[str], scope: FlushScope) -> Future[list[FlushResult]]:
        """Empties tiers of this rank; the scheduler process holds none."""
        return done([]) if self._worker is None else self._worker.control.flush(tiers, scope)

    def pin(self, owner: str, prefix: Prefix, check: bool) -> Pinned:
        """Keeps a prefix in this rank's tiers."""
        if self._worker is None:
            return Pinned(chunks=0, stored=0)
        return self._worker.control.pin(owner, prefix, check)

    def unpin(self, owner: str) -> Unpinned:
        return Unpinned(0) if self._worker is None else self._worker.control.unpin(owner)

    def pins(self) -> Pins:
        return Pins([]) if self._worker is None else self._worker.control.pins()

    def locate(self, prefix: Prefix) -> Future[Located]:
        """Which part of a prompt this rank has, and where."""
        return done(Located([])) if self._worker is None else self._worker.control.locate(prefix)

    def _scheduler_stats(self) -> SchedulerStats:
        if self._scheduler is not None:
            return self._scheduler.stats(self.guard.failures)
        return SchedulerStats(
            pid=os.getpid(),
            ready=False,
            reason=self.reason,
            requests=0,
            prompt_tokens=0,
            hit_gpu_tokens=0,
            hit_cache_tokens={},
            computed_tokens=0,
            lookups=0,
            lookup_seconds=0.0,
            lookup_timeouts=0,
            failures=dict(self.guard.failures),
        )

    def _rank_stats(self) -> RankStats:
        if self._worker is not None:
            return self._worker.stats(self._namespace, self._transfer_path, self.guard.failures)
        return RankStats(
            rank=self._rank,
            pid=os.getpid(),
            ready=False,
            reason=self.reason,
            transfer_path="none",
            namespace=self._namespace.hex(),
            stored_tokens=0,
            loaded_tokens=0,
            load_failed_tokens=0,
            failures=dict(self.guard.failures),
            tiers=[],
        )


def flush_rank(runtime_dir: Path, rank: int) -> bool:
    """Drops all that the model may use from a rank's tiers; False if something of it can still be hit. What
    is still read there is out of reach."""
    everything = Flush([], FlushScope(own=True, force=True))
    with Client(socket_path(runtime_dir, rank_name(rank))) as client:
        try:
            flushed = client.request(everything, Flushed, timeout_s=_FLUSH_TIMEOUT_S)
        except IpcError as error:
            logger.warning("KV cache: rank %d was not flushed: %s", rank, error)
            return False
    for result in flushed.results:
        if not result.reached:
            logger.warning("KV cache: %s of rank %d was not flushed: %s", result.tier, rank, result.reason)
    return all(result.reached for result in flushed.results)
