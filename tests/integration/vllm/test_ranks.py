# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism on a real vLLM: each rank stores and loads its part, and a hit is what all of them have.

Pipeline parallelism does not run on vLLM's CPU backend (0.32 fails an assertion of its own on a
stage's `intermediate_tensors` before the connector has a say); the simulator has its ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.vllm.conftest import MakePrompt
from tests.integration.vllm.engines import CHUNK
from tests.integration.vllm.servers import Server, snapshot_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_two_tensor_parallel_ranks(
    tiny_model: Path, make_prompt: MakePrompt, socket_dir: Path, tmp_path: Path
) -> None:
    prompt = make_prompt(2 * CHUNK + 40)
    server = Server(
        tiny_model,
        socket_dir,
        tmp_path / "log",
        tensor_parallel_size=2,
        # vLLM binds each rank to cores of its own, and takes these for the first two.
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    try:
        server.wait_until_ready(400)
        cold = server.complete(prompt)
        server.forget_gpu()
        assert server.complete(prompt) == cold
        assert server.external_hits() == 2 * CHUNK
        snapshot = snapshot_of(socket_dir, ranks=2)
        assert snapshot.not_ready() == {}
        assert len({stats.namespace for stats in snapshot.ranks.values()}) == 1
        for rank in (0, 1):
            stats = snapshot.ranks[rank]
            assert (stats.stored_tokens, stats.loaded_tokens) == (2 * CHUNK, 2 * CHUNK)
            assert [(tier.objects, tier.leases) for tier in stats.tiers] == [(2, 0)]
        shown = server.metrics("vllm:kvcache_loaded_tokens_total")
        assert set(shown.values()) == {2 * CHUNK}
        assert len(shown) == 2
    finally:
        server.stop()
