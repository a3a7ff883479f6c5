# SPDX-License-Identifier: Apache-2.0
"""Loads that vLLM's forward follows layer by layer, through its hooks around attention."""

from __future__ import annotations

import pytest

from kvcache.integration.vllm.layerwise import LayerHooks
from tests.integration.vllm.conftest import MakePrompt, StartEngine
from tests.integration.vllm.engines import CHUNK, Reference


@pytest.mark.vllm
@pytest.mark.parametrize("use_layerwise", [False, True])
def test_a_hit_is_followed_layer_by_layer(
    start_engine: StartEngine,
    reference: Reference,
    make_prompt: MakePrompt,
    monkeypatch: pytest.MonkeyPatch,
    use_layerwise: bool,
) -> None:
    prompt = make_prompt(4 * CHUNK + 5)
    answer = reference(prompt)
    engine = start_engine({"async_loading": "Never", "use_layerwise": use_layerwise})
    engine.store(prompt, answer)
    side = engine.side
    asked: list[int] = []
    first_layers = range(0, side.engine.gpu_connector.num_layers, 2)  # of groups, as on a GPU
    monkeypatch.setattr(side.engine, "first_layers", lambda: set(first_layers))
    monkeypatch.setattr(side.engine, "order_layer", asked.append)
    again = engine.answer(prompt)
    assert (again.tokens, again.cached_tokens) == (answer, 4 * CHUNK)
    assert asked == list(first_layers), "of the first step, each once"
    engine.check_clean()


@pytest.mark.vllm
def test_a_load_whose_layers_nobody_waits_for_has_failed(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(4 * CHUNK + 5)
    answer = reference(prompt)
    engine = start_engine({"async_loading": "Never"})
    engine.store(prompt, answer)
    side = engine.side
    monkeypatch.setattr(side, "wait_for_layer_load", lambda layer_name: None)
    assert engine.answer(prompt).tokens == answer
    assert engine.rank_stats.load_failed_tokens == 4 * CHUNK
    assert engine.rank_stats.failures == {"LoadIncomplete": 1}
    engine.forget_gpu()
    # Hooks that failed to come are not counted on again: the next load is waited for as a whole.
    again = engine.answer(prompt)
    assert (again.tokens, again.cached_tokens) == (answer, 4 * CHUNK)
    assert engine.rank_stats.load_failed_tokens == 4 * CHUNK
    engine.check_clean(failures=True)


def test_hooks_are_counted_on_after_one_forward_that_called_them_all_in_order() -> None:
    hooks = LayerHooks(["a", "b", "c"])

    def forward(called: str, kind: str | None = "eager", *, loads: bool = False) -> tuple[bool, bool]:
        """vLLM starts loads before the forward where there are some, else after it."""
        if loads:
            hooks.begin(kind)
        counted_on = loads and hooks.count_on()
        for name in called:
            hooks.called(name)
        if not loads:
            hooks.begin(kind)
        return counted_on, hooks.end()

    assert forward("ab", loads=True) == (False, False)
    assert forward("acb", loads=True) == (False, False)
    assert forward("abc") == (False, True)
    assert forward("abc", loads=True) == (True, True)
    assert forward("aabxbcc", loads=True) == (True, True), "twice, or of a layer without KV of its own"
    assert forward("", None, loads=True) == (False, False), "a graph's replay says nothing of the others"
    assert forward("abc", "pieces", loads=True) == (False, True), "of another kind"
    assert forward("abc", "pieces", loads=True) == (True, True)
    assert forward("ab", "pieces") == (False, False)
    assert forward("abc", "pieces", loads=True) == (False, True), "the last of its kind did not"
    for name in "abc":
        hooks.called(name)  # of a forward that broke off
    assert forward("", loads=True) == (True, False)
    assert (hooks.called("x"), hooks.called("b"), hooks.index("c")) == (None, 1, 2)
    hooks.end()
    for kind in ("eager", "pieces"):
        assert forward("abc", kind) == (False, True)
        assert forward("abc", kind, loads=True) == (False, True), "they failed to come once"
