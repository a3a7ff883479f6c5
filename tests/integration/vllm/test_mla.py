# SPDX-License-Identifier: Apache-2.0
"""MLA on a real vLLM: the latent comes back bit for bit, and of tensor-parallel ranks the first one writes.

Answers are compared with those of other hits alone. vLLM 0.32's reference backend for MLA on CPUs does not
agree with itself: without any connector a decoding step writes another rotary part of the key than a prefill
of the same token, and the latent of a prompt's token depends on how many tokens follow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from kvcache.integration.vllm.adapter import LMCacheConnectorV1Impl
from kvcache.stats import RankStats, TierStats
from tests.integration.vllm.conftest import MakePrompt
from tests.integration.vllm.engines import CHUNK, Engine
from tests.integration.vllm.servers import Server, eventually, snapshot_of
from tests.models.tiny_mla import LATENT, LAYERS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = 16
"""vLLM's kernel for MLA on CPUs knows no other."""


def test_pages_after_a_hit_are_those_of_the_prefill(
    tiny_mla_model: Path, make_prompt: MakePrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[torch.Tensor] = []
    register = LMCacheConnectorV1Impl.register_kv_caches

    def watched(self: LMCacheConnectorV1Impl, kv_caches: dict[str, torch.Tensor]) -> None:
        registered.extend(kv_caches.values())
        register(self, kv_caches)

    monkeypatch.setattr(LMCacheConnectorV1Impl, "register_kv_caches", watched)
    engine = Engine(tiny_mla_model, more={"num_gpu_blocks_override": 300})
    try:
        assert engine.rank_stats.ready, engine.rank_stats.reason
        assert len(registered) == LAYERS
        prompt = make_prompt(2 * CHUNK + 1)
        engine.answer(prompt, 1)
        (tier,) = engine.rank_stats.tiers
        assert tier.objects == 2
        stored = [obj.tensor.clone() for obj in engine.stored()]
        assert all(obj.shape == (LAYERS, CHUNK, LATENT) for obj in stored)
        for pages in registered:
            pages.fill_(7)
        answer = engine.answer(prompt)
        assert answer.cached_tokens == 2 * CHUNK
        # Every latent of the prefill is in some page again, whichever blocks vLLM has chosen now.
        for layer, pages in enumerate(registered):
            rows = {bytes(row.numpy()) for row in pages.reshape(-1, LATENT)}
            assert all(bytes(row.numpy()) in rows for obj in stored for row in obj[layer])
        for pages in registered:
            pages.fill_(9)
        assert engine.answer(prompt).tokens == answer.tokens
        engine.check_clean()
    finally:
        engine.close()


def test_two_ranks_share_what_the_first_one_writes(
    tiny_mla_model: Path, make_prompt: MakePrompt, socket_dir: Path, tmp_path: Path
) -> None:
    prompt, disk = make_prompt(2 * CHUNK + 1), tmp_path / "disk"
    disk.mkdir()

    def start(life: str) -> Server:
        server = Server(
            tiny_mla_model,
            socket_dir,
            tmp_path / f"log of the {life}",
            extra={
                "tiers": {
                    "cpu": {"capacity": "64Mi"},
                    "disk": {"directories": [str(disk)], "capacity": "256Mi"},
                }
            },
            tensor_parallel_size=2,
            num_gpu_blocks_override=300,
            environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        )
        server.wait_until_ready(400)
        return server

    def tiers(rank: int) -> dict[str, TierStats]:
        return {tier.name: tier for tier in ranks()[rank].tiers}

    def ranks() -> Mapping[int, RankStats]:
        snapshot = snapshot_of(socket_dir, ranks=2)
        assert snapshot.not_ready() == {}
        return snapshot.ranks

    server = start("first")
    try:
        server.complete(prompt)
        assert eventually(lambda: tiers(0)["disk"].objects == tiers(1)["disk"].objects == 2)
        assert [tiers(rank)["cpu"].objects for rank in (0, 1)] == [2, 2]
        assert tiers(0)["disk"].write_bytes > 0
        assert tiers(1)["disk"].write_bytes == 0
        from_memory = server.complete(prompt)
        assert server.external_hits() == 2 * CHUNK
    finally:
        server.stop()
    server = start("second")
    try:
        assert server.complete(prompt) == from_memory
        assert server.external_hits() == 2 * CHUNK
        for rank, stats in ranks().items():
            assert stats.loaded_tokens == 2 * CHUNK
            assert tiers(rank)["disk"].hit_tokens == 2 * CHUNK
            assert tiers(rank)["disk"].write_bytes == 0
    finally:
        server.stop()
