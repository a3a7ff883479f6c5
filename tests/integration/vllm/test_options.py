# SPDX-License-Identifier: Apache-2.0
"""Answers stay those of a plain vLLM under each option of vLLM or the cache that changes what is moved."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.vllm.conftest import MakePrompt, StartEngine
from tests.integration.vllm.engines import BLOCK, CHUNK, Reference

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("budget", [BLOCK + 1, 300])
def test_chunked_prefill(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, budget: int
) -> None:
    trunk = make_prompt(600)
    prompts = [trunk + make_prompt(450), trunk + make_prompt(70), make_prompt(2 * CHUNK), make_prompt(33)]
    expected = reference.all(prompts)
    engine = start_engine(more={"max_num_batched_tokens": budget, "max_num_seqs": 4})
    for cached in ([0, 0], [4 * CHUNK, 2 * CHUNK]):
        answers = engine.answers(prompts)
        assert [answer.tokens for answer in answers] == expected
        assert [answer.cached_tokens for answer in answers[:2]] >= cached
        engine.forget_gpu()
    assert [answer.tokens for answer in engine.answers(prompts[::-1])] == expected[::-1]
    engine.check_clean()


def test_without_vllms_own_prefix_cache(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt
) -> None:
    prompts = [make_prompt(1500), make_prompt(4 * CHUNK)]
    engine = start_engine(more={"enable_prefix_caching": False})
    for cached in ([0, 0], [5 * CHUNK, 4 * CHUNK - 1]):
        answers = engine.answers(prompts)
        assert [answer.tokens for answer in answers] == reference.all(prompts)
        assert [answer.cached_tokens for answer in answers] == cached
    engine.check_clean()


@pytest.mark.parametrize("save_decode_cache", [False, True])
def test_preemption(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, save_decode_cache: bool
) -> None:
    prompts = [make_prompt(length) for length in (500, 380, 250, 511)]
    expected = reference.all(prompts, max_tokens=100)
    engine = start_engine(
        {"save_decode_cache": save_decode_cache},
        more={"num_gpu_blocks_override": 14, "max_model_len": 1024},
    )
    for _ in range(2):
        assert [answer.tokens for answer in engine.answers(prompts, max_tokens=100)] == expected
        engine.forget_gpu()
    assert engine.metric("vllm:num_preemptions") > 0
    assert engine.rank_stats.loaded_tokens > 0
    engine.check_clean()


def test_a_tier_too_small_evicts(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt
) -> None:
    prompts = [make_prompt(1100) for _ in range(4)]
    # A chunk takes 512 KiB: the tier holds six of the sixteen.
    engine = start_engine({"tiers": {"cpu": {"capacity": "3Mi"}}})
    for _ in range(2):
        for prompt in prompts:
            assert engine.answer(prompt).tokens == reference(prompt)
        engine.forget_gpu()
        assert [answer.tokens for answer in engine.answers(prompts)] == reference.all(prompts)
        engine.forget_gpu()
    (tier,) = engine.rank_stats.tiers
    assert tier.evictions > 0
    assert tier.used_bytes <= tier.capacity_bytes
    # What was used last is still there.
    engine.answer(prompts[0])
    engine.forget_gpu()
    assert engine.answer(prompts[0]).cached_tokens == 4 * CHUNK
    engine.check_clean(failures=True)


@pytest.mark.parametrize(
    ("role", "stored", "hit"),
    [("kv_producer", 4, 4 * CHUNK), ("kv_consumer", 0, 0), ("kv_both", 4, 4 * CHUNK)],
)
def test_roles(
    start_engine: StartEngine,
    reference: Reference,
    make_prompt: MakePrompt,
    role: str,
    stored: int,
    hit: int,
) -> None:
    prompt = make_prompt(1100)
    engine = start_engine(role=role)
    for cached in (0, hit):
        answer = engine.answer(prompt)
        assert (answer.tokens, answer.cached_tokens) == (reference(prompt), cached)
        engine.forget_gpu()
    assert len(engine.stored()) == stored
    engine.check_clean()


def test_generated_tokens_are_given_back(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(2 * CHUNK - 20)
    first = reference(prompt, 2 * CHUNK)
    follow_up = prompt + first + make_prompt(10)
    expected = reference(follow_up)
    engine = start_engine({"save_decode_cache": True})
    assert engine.answer(prompt, 2 * CHUNK).tokens == first
    engine.forget_gpu()
    answer = engine.answer(follow_up)
    # The last generated token was never fed to the model: its KV is nowhere.
    assert (answer.tokens, answer.cached_tokens) == (
        expected,
        (len(prompt) + len(first) - 1) // CHUNK * CHUNK,
    )
    engine.check_clean()


@pytest.mark.parametrize(
    ("length", "cached"),
    [
        (700, 5 * BLOCK),
        (BLOCK, BLOCK - 1),
        (BLOCK - 1, 0),
        (2 * CHUNK, 2 * CHUNK - 1),
        (5 * BLOCK, 5 * BLOCK - 1),
    ],
)
def test_a_partial_last_chunk(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, length: int, cached: int
) -> None:
    prompt = make_prompt(length)
    longer = prompt + make_prompt(3 * CHUNK)
    engine = start_engine({"save_unfull_chunk": True, "save_decode_cache": True})
    for hit in (0, cached):
        answer = engine.answer(prompt)
        assert (answer.tokens, answer.cached_tokens) == (reference(prompt), hit)
        engine.forget_gpu()
    assert engine.answer(longer).tokens == reference(longer)
    engine.check_clean()


@pytest.mark.parametrize("length", [4 * CHUNK, 4 * CHUNK + 99, 4 * CHUNK + 100, 60])
def test_the_last_tokens_are_skipped(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, length: int
) -> None:
    prompt = make_prompt(length)
    engine = start_engine({"skip_last_n_tokens": 100})
    for cached in (0, max(0, length - 100) // CHUNK * CHUNK):
        answer = engine.answer(prompt)
        assert (answer.tokens, answer.cached_tokens) == (reference(prompt), cached)
        engine.forget_gpu()
    engine.check_clean()


def test_a_small_hit_is_not_worth_a_load(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt
) -> None:
    few, many = make_prompt(2 * CHUNK + 5), make_prompt(3 * CHUNK + 5)
    engine = start_engine({"min_retrieve_tokens": 3 * CHUNK})
    for hits in ([0, 0], [0, 3 * CHUNK]):
        answers = engine.answers([few, many])
        assert [answer.tokens for answer in answers] == reference.all([few, many])
        assert [answer.cached_tokens for answer in answers] == hits
        engine.forget_gpu()
    engine.check_clean()


@pytest.mark.parametrize("chunk", [BLOCK, 8 * BLOCK])
def test_other_chunk_sizes(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, chunk: int
) -> None:
    prompts = [make_prompt(8 * BLOCK + 17), make_prompt(8 * BLOCK)]
    engine = start_engine({"chunk_size": chunk}, more={"max_num_batched_tokens": 700})
    for _ in range(2):
        answers = engine.answers(prompts)
        assert [answer.tokens for answer in answers] == reference.all(prompts)
        engine.forget_gpu()
    assert [answer.cached_tokens for answer in answers] == [8 * BLOCK, 8 * BLOCK - 1]
    engine.check_clean()


def test_smaller_blocks(start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt) -> None:
    prompts = [make_prompt(3 * CHUNK + 40), make_prompt(2 * CHUNK)]
    engine = start_engine(more={"block_size": 32, "num_gpu_blocks_override": 256})
    for cached in ([0, 0], [3 * CHUNK, 2 * CHUNK - 1]):
        answers = engine.answers(prompts)
        assert [answer.tokens for answer in answers] == reference.all(prompts)
        assert [answer.cached_tokens for answer in answers] == cached
        engine.forget_gpu()
    engine.check_clean()


@pytest.mark.parametrize("loading", ["Always", "Never"])
def test_loads_outside_of_the_batch(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, loading: str
) -> None:
    trunk = make_prompt(600)
    prompts = [trunk + make_prompt(300), trunk, make_prompt(2 * CHUNK), make_prompt(90)]
    expected = reference.all(prompts)
    engine = start_engine({"async_loading": loading}, more={"max_num_batched_tokens": 700})
    for _ in range(3):
        assert [answer.tokens for answer in engine.answers(prompts)] == expected
        engine.forget_gpu()
    assert engine.rank_stats.loaded_tokens > 0
    engine.check_clean()


def test_ngram_drafts(start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt) -> None:
    """Drafts that are refused leave wrong KV behind the accepted tokens; none of it may be stored."""
    start = make_prompt(40)
    prompt = (start * 16)[: 2 * CHUNK + 60]
    first = reference(prompt, CHUNK)
    follow_up = prompt + first + make_prompt(5)
    expected = reference(follow_up)
    drafts: dict[str, Any] = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    engine = start_engine({"save_decode_cache": True}, more={"speculative_config": drafts})
    assert engine.answer(prompt, CHUNK).tokens == first
    engine.forget_gpu()
    answer = engine.answer(follow_up)
    assert answer.tokens == expected
    assert answer.cached_tokens >= 3 * CHUNK
    engine.check_clean()
