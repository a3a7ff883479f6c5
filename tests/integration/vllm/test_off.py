# SPDX-License-Identifier: Apache-2.0
"""What the cache cannot serve, vLLM serves without it; log and statistics give the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MODELS
from tests.integration.vllm.conftest import Log, MakePrompt, StartEngine
from tests.integration.vllm.engines import CHUNK, Reference

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("extra", "reasons"),
    [
        ({"chunk_sice": 256}, ["chunk_sice", "unknown key", "chunk_size"]),
        ({"chunk_size": 64}, ["chunk_size: 64", "128"]),
        ({"chunk_size": 384}, ["chunk_size: 384", "power of two"]),
        ({"tiers": {"cpu": {"capacity": "lots"}}}, ["tiers.cpu.capacity", "lots"]),
    ],
)
def test_a_configuration_that_cannot_be_used(
    start_engine: StartEngine,
    reference: Reference,
    make_prompt: MakePrompt,
    log: Log,
    extra: dict[str, Any],
    reasons: list[str],
) -> None:
    prompt = make_prompt(2 * CHUNK + 30)
    engine = start_engine(extra)
    for stats in (engine.scheduler_stats, engine.rank_stats):
        assert not stats.ready
        for reason in reasons:
            assert reason in stats.reason
            assert reason in log.text
    for _ in range(2):
        answer = engine.answer(prompt)
        assert (answer.tokens, answer.cached_tokens) == (reference(prompt), 0)
        engine.forget_gpu()
    assert engine.metric("vllm:external_prefix_cache_hits") == 0


def test_a_rank_whose_tier_holds_no_chunk(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, log: Log
) -> None:
    """Only the worker finds out; the scheduler goes on asking it and is told of nothing."""
    prompt = make_prompt(1030)
    engine = start_engine({"chunk_size": 1024, "tiers": {"cpu": {"capacity": "1Mi"}}})
    assert "holds no chunk" in engine.rank_stats.reason
    assert "holds no chunk" in log.text
    for _ in range(2):
        answer = engine.answer(prompt)
        assert (answer.tokens, answer.cached_tokens) == (reference(prompt), 0)
        engine.forget_gpu()
    side = engine.scheduler._scheduler
    assert side is not None
    assert (side._trackers, side._saves, side._doubts.open_loads) == ({}, {}, 0)
    assert engine.scheduler_stats.lookup_timeouts == 0


def test_a_model_with_several_groups_of_layers(start_engine: StartEngine, log: Log) -> None:
    engine = start_engine(model=_gemma2(), more={"max_model_len": 1024})
    for stats in (engine.scheduler_stats, engine.rank_stats):
        assert not stats.ready
        assert "2 KV cache groups (FullAttentionSpec, SlidingWindowSpec)" in stats.reason
    assert "vLLM serves on without it" in log.text
    prompt = [index % 300 + 3 for index in range(600)]
    first = engine.answer(prompt)
    engine.forget_gpu()
    assert engine.answer(prompt) == first
    assert (len(first.tokens), first.cached_tokens) == (12, 0)


def _gemma2() -> Path:
    """A random Gemma 2 of four layers, two of them with a sliding window."""
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    from image.models.folder import made_once
    from tests.models import tiny_llama

    def make(target: Path) -> None:
        tiny_llama.make(target)
        config = Gemma2Config(
            vocab_size=tiny_llama.VOCABULARY,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=64,
            query_pre_attn_scalar=64,
            sliding_window=256,
            max_position_embeddings=2048,
            bos_token_id=1,
            eos_token_id=2,
        )
        Gemma2ForCausalLM(config).to(torch.bfloat16).save_pretrained(target)

    target = MODELS / "tiny-gemma2"
    made_once(target, tiny_llama.made_from() + " gemma2", make)
    return target
