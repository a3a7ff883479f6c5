# SPDX-License-Identifier: Apache-2.0
"""Greedy answers with the cache are those without it, and what was hit is what was said to be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from tests.integration.vllm.conftest import MakePrompt
from tests.integration.vllm.engines import ANSWER, CHUNK, Engine, Reference

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def shared_engine(tiny_model: Path, reference: Reference) -> Iterator[Engine]:
    engine = Engine(tiny_model)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """With empty caches; whatever a test did to it, nothing is left behind."""
    shared_engine.forget_all()
    yield shared_engine
    shared_engine.check_clean()


def test_a_repeated_prompt_is_given_back_after_vllm_forgot_it(
    engine: Engine, reference: Reference, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(1500)
    before = engine.scheduler_stats
    cold = engine.answer(prompt)
    engine.forget_gpu()
    hit = engine.answer(prompt)
    assert cold.tokens == hit.tokens == reference(prompt)
    assert (cold.cached_tokens, hit.cached_tokens) == (0, 5 * CHUNK)
    after = engine.scheduler_stats
    assert after.hit_cache_tokens["cpu"] - before.hit_cache_tokens.get("cpu", 0) == 5 * CHUNK
    assert after.prompt_tokens - before.prompt_tokens == 3000


@pytest.mark.parametrize("shared", [CHUNK - 1, CHUNK, 700, 1024])
def test_prompts_share_the_chunks_that_both_have_in_full(
    engine: Engine, reference: Reference, make_prompt: MakePrompt, shared: int
) -> None:
    start = make_prompt(shared)
    first, second = start + make_prompt(500), start + make_prompt(333)
    assert engine.answer(first).tokens == reference(first)
    engine.forget_gpu()
    answer = engine.answer(second)
    assert answer.tokens == reference(second)
    assert answer.cached_tokens == shared // CHUNK * CHUNK


def test_a_prompt_shorter_than_a_chunk_is_left_alone(
    engine: Engine, reference: Reference, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(CHUNK - 1)
    for _ in range(2):
        answer = engine.answer(prompt)
        assert (answer.tokens, answer.cached_tokens) == (reference(prompt), 0)
        engine.forget_gpu()
    assert engine.stored() == []


@pytest.mark.parametrize("length", [1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 4 * CHUNK])
def test_a_full_hit_leaves_the_last_token_to_compute(
    engine: Engine, reference: Reference, make_prompt: MakePrompt, length: int
) -> None:
    prompt = make_prompt(length)
    assert engine.answer(prompt).tokens == reference(prompt)
    engine.forget_gpu()
    hit = engine.answer(prompt)
    assert hit.tokens == reference(prompt)
    assert hit.cached_tokens == min(length // CHUNK * CHUNK, length - 1)


def test_a_hit_goes_on_where_vllms_own_ends(
    engine: Engine, reference: Reference, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(1500)
    engine.answer(prompt)
    engine.forget_gpu()
    assert engine.answer(prompt[: 2 * CHUNK + 130]).tokens == reference(prompt[: 2 * CHUNK + 130])
    # vLLM now has five blocks of it (640 tokens), which end inside of a chunk.
    answer = engine.answer(prompt)
    assert (answer.tokens, answer.cached_tokens) == (reference(prompt), 5 * CHUNK)


def test_concurrent_requests_with_shared_prefixes(
    engine: Engine, reference: Reference, make_prompt: MakePrompt
) -> None:
    trunk, branch = make_prompt(512), make_prompt(300)
    prompts = [
        trunk + make_prompt(100),
        trunk + branch + make_prompt(50),
        trunk + branch + make_prompt(1),
        make_prompt(40),
        trunk,
        make_prompt(777),
        trunk + branch,
    ]
    for _ in range(3):
        assert [answer.tokens for answer in engine.answers(prompts)] == reference.all(prompts)
        engine.forget_gpu()
    assert engine.rank_stats.loaded_tokens > 0


def test_another_salt_is_another_prompt(
    engine: Engine, reference: Reference, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(600)
    expected = reference(prompt)
    for salt, cached in [(None, 0), ("a", 0), ("b", 0), ("a", 2 * CHUNK), (None, 2 * CHUNK)]:
        asked = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
        answer = engine.answer(asked)
        assert (answer.tokens, answer.cached_tokens) == (expected, cached), salt
        engine.forget_gpu()


def test_prompt_logprobs_are_computed_not_given_back(
    engine: Engine, reference: Reference, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(600)
    engine.answer(prompt)
    engine.forget_gpu()
    answer = engine.answer(prompt, prompt_logprobs=1)
    assert (answer.tokens, answer.cached_tokens) == (reference(prompt), 0)


def test_a_reset_of_the_connector_is_a_real_miss(
    engine: Engine, reference: Reference, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(600)
    engine.answer(prompt)
    engine.forget_all()
    answer = engine.answer(prompt)
    assert (answer.tokens, answer.cached_tokens) == (reference(prompt), 0)


def test_hits_show_in_vllms_own_counters(engine: Engine, make_prompt: MakePrompt) -> None:
    prompt = make_prompt(700)
    hits, queries = (engine.metric(f"vllm:external_prefix_cache_{name}") for name in ("hits", "queries"))
    host = engine.metric("vllm:prompt_tokens_cached_by_source", "host")
    engine.answer(prompt)
    engine.forget_gpu()
    engine.answer(prompt)
    assert engine.metric("vllm:external_prefix_cache_hits") - hits == 2 * CHUNK
    assert engine.metric("vllm:external_prefix_cache_queries") - queries == 1400
    if hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources"):  # from vLLM 0.32 on
        assert engine.metric("vllm:prompt_tokens_cached_by_source", "host") - host == 2 * CHUNK


@pytest.mark.parametrize("chunk", [0, 1])
def test_wrong_bytes_in_the_cache_change_the_answer(
    engine: Engine, reference: Reference, make_prompt: MakePrompt, chunk: int
) -> None:
    """Without this the tests above could not fail."""
    prompt = make_prompt(2 * CHUNK + 40)
    assert engine.answer(prompt, 2 * ANSWER).tokens == reference(prompt, 2 * ANSWER)
    engine.forget_gpu()
    kv = engine.stored()[chunk].tensor
    kv[:, 10:40].neg_()
    assert engine.answer(prompt, 2 * ANSWER).tokens != reference(prompt, 2 * ANSWER)
