# SPDX-License-Identifier: Apache-2.0
"""What a sidecar finds in a pod, without the model: a real engine with its tiers, built from the
configuration that the operator made, behind the real control sockets.

    python -m tests.cluster.engine CONFIG_FILE RUNTIME_DIR NAMESPACE_HEX

stores two prompts, prints `ready` and serves until it is ended. Of vLLM only the scheduler's part is played:
each time it is asked for its numbers, it has looked up one prompt that is stored and one that is not.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from kvcache.control.rank import RankControl
from kvcache.control.server import ControlServer
from kvcache.control.wire import Configured, FlushResult, FlushScope
from kvcache.engine import LMCacheEngine
from kvcache.gpu_connector.layout import LayerSpec
from kvcache.gpu_connector.paged import VLLMPagedMemGPUConnectorV2
from kvcache.integration.vllm.live import LiveConfig
from kvcache.manager import LMCacheManager
from kvcache.memory.allocator import KVShape
from kvcache.stats import RankStats, SchedulerStats
from kvcache.storage.futures import done
from kvcache.tokens.database import ChunkedTokenDatabase
from tests.control.processes import Process, rank_stats, scheduler_stats

BLOCK, LAYERS, HEADS, HEAD = 16, 2, 2, 16
CHUNKS = 3
"""Of each prompt."""


class Rank:
    """The worker's process, as far as the sidecar asks it."""

    def __init__(self, live: LiveConfig, manager: LMCacheManager, engine: LMCacheEngine) -> None:
        self._live = live
        self._manager = manager
        self._engine = engine
        self._control = RankControl(engine)
        self.pin, self.unpin = self._control.pin, self._control.unpin
        self.pins, self.locate = self._control.pins, self._control.locate

    def stats(self) -> RankStats:
        return rank_stats(
            0,
            pid=os.getpid(),
            namespace=self._engine.database.namespace.hex(),
            stored_tokens=self._engine.counters.stored_tokens,
            tiers=self._engine.storage.stats(),
            config_digest=self._live.digest,
            config_restart=self._live.restart,
        )

    def flush(self, tiers: Sequence[str], scope: FlushScope) -> Future[list[FlushResult]]:
        return self._control.flush(tiers, scope)

    def configure(self, file: Mapping[str, Any]) -> Configured:
        return self._live.take_in(file, self._manager.adapt)


class Scheduler(Process):
    """The scheduler's part: it counts what it looks up."""

    def __init__(self, live: LiveConfig, look_up: Callable[[], tuple[int, int]]) -> None:
        super().__init__(scheduler_stats())
        self._live = live
        self._look_up = look_up
        self._count: Counter[str] = Counter()

    def stats(self) -> SchedulerStats:
        wanted, found = self._look_up()
        self._count.update(requests=2, prompt_tokens=wanted, hits=found)
        return scheduler_stats(
            pid=os.getpid(),
            requests=self._count["requests"],
            prompt_tokens=self._count["prompt_tokens"],
            hit_cache_tokens={"cpu": self._count["hits"]},
            computed_tokens=self._count["prompt_tokens"] - self._count["hits"],
            config_digest=self._live.digest,
        )

    def flush(self, tiers: Sequence[str], scope: FlushScope) -> Future[list[FlushResult]]:
        return done([])

    def configure(self, file: Mapping[str, Any]) -> Configured:
        return Configured()


def main(config_file: str, runtime_dir: str, namespace: str) -> None:
    live = LiveConfig({"config_file": config_file, "runtime_dir": runtime_dir})
    manager, chunk = LMCacheManager(live.config, runtime_dir), live.config.chunk_size
    tokens = CHUNKS * chunk
    blocks = tokens // BLOCK
    spec = LayerSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float32, num_blocks=blocks
    )
    connector = VLLMPagedMemGPUConnectorV2(spec)
    connector.initialize_kvcaches_ptr(
        kvcaches=[torch.randn(blocks, HEADS, BLOCK, 2 * HEAD) for _ in range(LAYERS)]
    )
    database = ChunkedTokenDatabase(chunk, bytes.fromhex(namespace), 0)
    shape = KVShape.of(connector, chunk)
    engine = manager.start_engine(database, shape, connector, device=torch.device("cpu"))

    def prompt() -> list[int]:
        return [random.randrange(1000) for _ in range(tokens)]

    known = prompt()
    for stored in (known, prompt()):
        engine.store(stored, slot_mapping=torch.arange(tokens))
    while any(tier.objects != 2 * CHUNKS for tier in engine.storage.stats() if tier.name == "cpu"):
        time.sleep(0.01)

    def look_up() -> tuple[int, int]:
        return 2 * tokens, engine.lookup(known) + engine.lookup(prompt())

    rank = Rank(live, manager, engine)
    servers = [
        ControlServer(runtime_dir, name, backend)
        for name, backend in (("rank0", rank), ("scheduler", Scheduler(live, look_up)))
    ]
    print("ready", flush=True)  # noqa: T201
    threading.Event().wait()
    del servers


if __name__ == "__main__":
    main(*sys.argv[1:])
