# SPDX-License-Identifier: Apache-2.0
"""What the cache cannot serve, vLLM serves without it; log and statistics give the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcache.integration.vllm.versions import is_tested
from tests.conftest import MODELS
from tests.integration.vllm.conftest import Log, MakePrompt, StartEngine
from tests.integration.vllm.engines import CHUNK, Reference
from tests.models import tiny_llama

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


@pytest.mark.parametrize("allowed", [False, True])
def test_a_version_that_is_not_tested(
    start_engine: StartEngine,
    reference: Reference,
    make_prompt: MakePrompt,
    monkeypatch: pytest.MonkeyPatch,
    allowed: bool,
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.99.1+cpu")
    refusal = (
        "vLLM 0.99.1+cpu was read, which this connector is not tested with: install vLLM 0.26 to 0.32, or "
        "set allow_untested_vllm to true"
    )
    prompt = make_prompt(2 * CHUNK + 30)
    engine = start_engine({"allow_untested_vllm": allowed})
    for stats in (engine.scheduler_stats, engine.rank_stats):
        assert stats.ready == allowed
        assert stats.reason == ("" if allowed else refusal)
    for cached in (0, 2 * CHUNK * allowed):
        answer = engine.answer(prompt)
        assert (answer.tokens, answer.cached_tokens) == (reference(prompt), cached)
        engine.forget_gpu()
    shown = {
        metric.labels["process"]: metric.value
        for metric in engine.llm.get_metrics()
        if metric.name == "vllm:kvcache_ready"
    }
    assert shown == {"scheduler": allowed, "rank0": allowed}


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.25.1", False),
        ("0.26.0", True),
        ("0.26.1+cu130", True),
        ("0.32.0+cpu", True),
        ("0.32", True),
        ("0.33.0", False),
        ("1.30.0", False),
        ("0.32.0rc1", False),
        ("0.31.1.dev12+g1234567", False),
        ("dev", False),
        ("", False),
    ],
)
def test_the_range_of_versions(version: str, tested: bool) -> None:
    assert is_tested(version) == tested


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
    assert (side._trackers, len(side._saves), side._doubts.open_loads) == ({}, 0, 0)
    assert engine.scheduler_stats.lookup_timeouts == 0


def test_a_model_with_several_groups_of_layers(start_engine: StartEngine, log: Log) -> None:
    """vLLM keeps its hybrid manager (`SupportsHMA`), whose blocks outside of a window come and go."""
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


def test_a_hybrid_model_of_which_vllm_keeps_all_kv(start_engine: StartEngine) -> None:
    """Without the hybrid manager there is one group, in which nothing is dropped: that can be cached."""
    more = {"max_model_len": 1024, "disable_hybrid_kv_cache_manager": True}
    engine = start_engine(model=_gemma2(), more=more)
    prompt = [index % 300 + 3 for index in range(600)]
    first = engine.answer(prompt)
    engine.forget_gpu()
    again = engine.answer(prompt)
    assert (first.tokens, first.cached_tokens) == (again.tokens, 0)
    assert again.cached_tokens == 2 * CHUNK
    engine.check_clean()


def test_a_model_with_sliding_windows_alone(start_engine: StartEngine, log: Log) -> None:
    engine = start_engine(model=_mistral(), more={"max_model_len": 1024})
    for stats in (engine.scheduler_stats, engine.rank_stats):
        assert not stats.ready
        assert "the model's KV cache is a SlidingWindowSpec" in stats.reason
    prompt = [index % 300 + 3 for index in range(600)]
    first = engine.answer(prompt)
    engine.forget_gpu()
    assert engine.answer(prompt) == first
    assert (len(first.tokens), first.cached_tokens) == (12, 0)


def _mistral() -> Path:
    """A random Mistral, all of whose layers have a sliding window."""
    from transformers import MistralConfig, MistralForCausalLM

    return _made(
        "tiny-mistral",
        MistralForCausalLM,
        MistralConfig(**_SIZES, sliding_window=256, max_position_embeddings=2048),
    )


def _gemma2() -> Path:
    """A random Gemma 2 of four layers, two of them with a sliding window."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **_SIZES, query_pre_attn_scalar=64, sliding_window=256, max_position_embeddings=2048
    )
    return _made("tiny-gemma2", Gemma2ForCausalLM, config)


_SIZES: dict[str, Any] = {
    "vocab_size": tiny_llama.VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _made(name: str, model: Any, config: Any) -> Path:
    import torch

    from image.models.folder import made_once

    def make(target: Path) -> None:
        tiny_llama.make(target)
        model(config).to(torch.bfloat16).save_pretrained(target)

    target = MODELS / name
    made_once(target, tiny_llama.made_from() + " " + name.removeprefix("tiny-"), make)
    return target
