# SPDX-License-Identifier: Apache-2.0
"""Whatever fails inside the cache costs time, never an answer, and leaves nothing wrong behind."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.storage.tiers.cpu import CpuTier
from tests.integration.vllm.conftest import MakePrompt, StartEngine
from tests.integration.vllm.engines import CHUNK, Engine, Reference

pytestmark = pytest.mark.vllm


def _lose(tier: CpuTier, kept: int) -> None:
    """All chunks but the `kept` oldest are gone, their leases too."""
    tier.release_where(lambda owner: True)
    for key in list(tier._index)[kept:]:
        tier._room.remove(key)


def _lose_before_load(monkeypatch: pytest.MonkeyPatch, engine: Engine, kept: int) -> None:
    """Between the next lookup and its load."""
    side = engine.side
    window = side._window

    def lose_then_load(*arguments: Any) -> Any:
        _lose(side.engine.storage.cpu, kept)
        monkeypatch.setattr(side, "_window", window)
        return window(*arguments)

    monkeypatch.setattr(side, "_window", lose_then_load)


@pytest.mark.parametrize("loading", ["Never", "Always"])
def test_chunks_that_vanish_before_the_load_are_computed(
    start_engine: StartEngine,
    reference: Reference,
    make_prompt: MakePrompt,
    monkeypatch: pytest.MonkeyPatch,
    loading: str,
) -> None:
    prompts = [make_prompt(4 * CHUNK + 50), make_prompt(4 * CHUNK)]
    expected = reference.all(prompts)
    engine = start_engine({"async_loading": loading})
    for prompt, answer, keeps in zip(prompts, expected, [(0, 1, 3), (3,)], strict=True):
        for kept in keeps:
            engine.forget_all()
            assert engine.answer(prompt).tokens == answer
            engine.forget_gpu()
            before, failed = engine.scheduler_stats, engine.rank_stats.load_failed_tokens
            _lose_before_load(monkeypatch, engine, kept)
            assert engine.answer(prompt).tokens == answer
            missing = min(4 * CHUNK, len(prompt) - 1) - kept * CHUNK
            assert engine.rank_stats.load_failed_tokens - failed == missing
            after = engine.scheduler_stats
            assert after.hit_cache_tokens["cpu"] - before.hit_cache_tokens["cpu"] == kept * CHUNK
            engine.forget_gpu()
            # What was computed instead is stored, and what was computed upon the unfilled pages is not.
            again = engine.answer(prompt)
            assert (again.tokens, again.cached_tokens) == (answer, min(4 * CHUNK, len(prompt) - 1))
    engine.check_clean(failures=True)


@pytest.mark.parametrize("budget", [4096, 500])
def test_requests_that_share_what_was_lost(
    start_engine: StartEngine,
    reference: Reference,
    make_prompt: MakePrompt,
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
) -> None:
    trunk = make_prompt(2 * CHUNK + 100)
    prompts = [trunk + make_prompt(length) for length in (420, 90, 1, 300)] + [trunk, make_prompt(30)]
    expected = reference.all(prompts)
    engine = start_engine(more={"max_num_batched_tokens": budget})
    for kept in (0, 1):
        engine.forget_all()
        engine.answer(prompts[0])
        engine.forget_gpu()
        _lose_before_load(monkeypatch, engine, kept)
        assert [answer.tokens for answer in engine.answers(prompts)] == expected
        engine.forget_gpu()
        assert [answer.tokens for answer in engine.answers(prompts)] == expected
    engine.check_clean(failures=True)


def test_a_load_that_raises_is_computed(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [make_prompt(3 * CHUNK), make_prompt(2 * CHUNK + 7)]
    expected = reference.all(prompts)
    engine = start_engine()
    engine.answers(prompts)
    engine.forget_gpu()
    with monkeypatch.context() as broken:
        for way in ("batched_to_gpu", "layers_to_gpu"):
            broken.setattr(engine.side.engine.gpu_connector, way, _broken)
        assert [answer.tokens for answer in engine.answers(prompts)] == expected
    assert engine.rank_stats.failures["BrokenError"] == 2
    engine.forget_gpu()
    answers = engine.answers(prompts)
    assert [answer.tokens for answer in answers] == expected
    assert [answer.cached_tokens for answer in answers] == [3 * CHUNK - 1, 2 * CHUNK]
    engine.check_clean(failures=True)


def test_a_store_that_raises_stores_nothing(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(5 * CHUNK)
    engine = start_engine(more={"max_num_batched_tokens": 600})
    with monkeypatch.context() as broken:
        broken.setattr(engine.side.engine.gpu_connector, "batched_from_gpu", _broken)
        assert engine.answer(prompt).tokens == reference(prompt)
    assert engine.stored() == []
    # Nothing is stored behind the gap; the next request that meets it starts over.
    assert engine.rank_stats.failures == {"BrokenError": 1}
    engine.forget_gpu()
    for cached in (0, 5 * CHUNK - 1):
        answer = engine.answer(prompt)
        assert (answer.tokens, answer.cached_tokens) == (reference(prompt), cached)
        engine.forget_gpu()
    engine.check_clean(failures=True)


@pytest.mark.parametrize("hook", ["get_num_new_matched_tokens", "build_connector_meta"])
def test_a_scheduler_hook_that_raises(
    start_engine: StartEngine,
    reference: Reference,
    make_prompt: MakePrompt,
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
) -> None:
    prompts = [make_prompt(3 * CHUNK), make_prompt(2 * CHUNK + 7)]
    expected = reference.all(prompts)
    engine = start_engine()
    engine.answers(prompts)
    engine.forget_gpu()
    with monkeypatch.context() as broken:
        broken.setattr(engine.scheduler._scheduler, hook, _broken)
        assert [answer.tokens for answer in engine.answers(prompts)] == expected
    assert engine.scheduler_stats.failures["BrokenError"] > 0
    engine.forget_gpu()
    answers = engine.answers(prompts)
    assert [answer.tokens for answer in answers] == expected
    assert [answer.cached_tokens for answer in answers] == [3 * CHUNK - 1, 2 * CHUNK]
    engine.check_clean(failures=True)


def test_a_rank_that_does_not_answer_is_a_miss(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(3 * CHUNK)
    engine = start_engine({"lookup_timeout_ms": 50})
    engine.answer(prompt)
    engine.forget_gpu()
    manager = engine.worker._manager
    assert manager is not None
    assert manager._lookup_server is not None
    manager._lookup_server.close()
    answer = engine.answer(prompt)
    assert (answer.tokens, answer.cached_tokens) == (reference(prompt), 0)
    assert engine.scheduler_stats.lookup_timeouts == 1
    manager.start_lookup_server(0)
    for _ in range(100):
        engine.forget_gpu()
        answer = engine.answer(prompt)
        assert answer.tokens == reference(prompt)
        if answer.cached_tokens:
            break
    assert answer.cached_tokens == 3 * CHUNK - 1
    engine.check_clean()


def test_with_vllms_policy_to_fail(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(3 * CHUNK + 20)
    engine = start_engine(policy="fail")
    engine.answer(prompt)
    engine.forget_gpu()
    _lose_before_load(monkeypatch, engine, 1)
    answer = engine.answer(prompt)
    assert (answer.tokens, answer.finish_reason) == ([], "error")
    for _ in range(2):
        assert engine.answer(prompt).tokens == reference(prompt)
        engine.forget_gpu()
    engine.check_clean(failures=True)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_aborted_request_leaves_nothing(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, steps: int
) -> None:
    prompts = [make_prompt(6 * CHUNK), make_prompt(6 * CHUNK + 3)]
    # Room for one of them at a time: the second one waits, with a lease, until it is aborted.
    engine = start_engine(
        more={"num_gpu_blocks_override": 15, "max_model_len": 1792, "max_num_batched_tokens": 400}
    )
    for prompt in prompts:
        engine.answer(prompt)
        engine.forget_gpu()
    vllm = engine.llm.llm_engine
    names = [engine.add(prompt, max_tokens=50) for prompt in prompts]
    for _ in range(steps):
        vllm.step()
    vllm.abort_request(names, internal=False)
    while vllm.has_unfinished_requests():
        vllm.step()
    assert engine.answer(prompts[0]).tokens == reference(prompts[0])
    engine.check_clean()


class BrokenError(RuntimeError):
    pass


def _broken(*_: Any, **__: Any) -> Any:
    raise BrokenError("broken on purpose")
