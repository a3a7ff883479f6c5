# SPDX-License-Identifier: Apache-2.0
"""Loads that start while vLLM still plans their step, in the process of scheduler and worker."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.gpu_connector.interface import Completion
from kvcache.integration.vllm import ahead
from tests.integration.vllm.conftest import MakePrompt, StartEngine
from tests.integration.vllm.engines import CHUNK, Engine, Reference


class _Running(Completion):
    def done(self) -> bool:
        return False


def _watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to a hit, in order."""
    side, seen = engine.side, list[str]()
    retrieve, begin_step = side.engine.retrieve_span, side.begin_step

    def watched_retrieve(*arguments: Any, **more: Any) -> Any:
        seen.append("load")
        return retrieve(*arguments, **more)

    def watched_begin(metadata: Any, **how: Any) -> None:
        if any(request.load_spec is not None for request in metadata.requests):
            seen.append("step")
        begin_step(metadata, **how)

    monkeypatch.setattr(side.engine, "retrieve_span", watched_retrieve)
    monkeypatch.setattr(side, "begin_step", watched_begin)
    return seen


@pytest.mark.vllm
@pytest.mark.parametrize("hindrance", [None, "thread", "step", "stores", "copies", "others"])
def test_a_load_starts_before_its_step_where_nothing_hinders(
    start_engine: StartEngine,
    reference: Reference,
    make_prompt: MakePrompt,
    monkeypatch: pytest.MonkeyPatch,
    hindrance: str | None,
) -> None:
    prompt = make_prompt(4 * CHUNK + 5)
    answer = reference(prompt)
    engine = start_engine({"async_loading": "Never"})
    engine.store(prompt, answer)
    side = engine.side
    match hindrance:
        case "thread":  # the model runs on another one than that which plans
            numbers = iter(range(10**6))
            monkeypatch.setattr("kvcache.integration.vllm.worker.threading.get_ident", numbers.__next__)
        case "step":  # the one before was not given to the model yet
            scheduler = engine.scheduler._scheduler
            assert scheduler is not None
            scheduler._planned_steps += 1
        case "stores":
            monkeypatch.setattr(side.engine, "stores_run", lambda: True)
        case "copies":  # of a load beside the model that is said to be ready
            side._joining.append((0, _Running()))
        case "others":  # another connector beside this one
            monkeypatch.setattr(engine.worker, "_is_alone", lambda: False)
            engine.answer(make_prompt(5))
    seen = _watch(engine, monkeypatch)
    again = engine.answer(prompt)
    assert (again.tokens, again.cached_tokens) == (answer, 4 * CHUNK)
    assert seen == (["step", "load"] if hindrance else ["load", "step"])
    side._joining.clear()
    engine.check_clean()


@pytest.mark.vllm
def test_a_load_whose_step_does_without_it_is_computed(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(4 * CHUNK + 5)
    answer = reference(prompt)
    engine = start_engine({"async_loading": "Never"})
    engine.store(prompt, answer)
    seen = _watch(engine, monkeypatch)
    scheduler, side = engine.scheduler._scheduler, engine.side
    assert scheduler is not None
    ordered: list[int] = []
    monkeypatch.setattr(side.engine, "first_layers", lambda: {8, 0, 4})
    monkeypatch.setattr(side.engine, "order_layer", ordered.append)
    begin_step, fails = scheduler._begin_step, iter([True])

    def fail_once(*arguments: Any) -> None:
        if next(fails, False):
            raise RuntimeError("no plan")
        begin_step(*arguments)

    monkeypatch.setattr(scheduler, "_begin_step", fail_once)
    assert engine.answer(prompt).tokens == answer
    assert ordered == [0, 4, 8], "before the pages are computed"
    assert seen == ["load"]
    assert side._ahead == {}
    assert engine.scheduler_stats.failures == {"RuntimeError": 1}
    engine.check_clean(failures=True)


def test_nobody_is_called_in_another_process_or_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    class Rank:
        calls = 0

        def load_ahead(self, session: str, step: int, request: Any) -> None:
            self.calls += 1

    rank, request = Rank(), Any
    ahead.announce(tmp_path, rank)
    ahead.load_ahead(tmp_path, "session", 1, request)  # type: ignore[arg-type]
    assert rank.calls == 1
    ahead.load_ahead(tmp_path / "other", "session", 1, request)  # type: ignore[arg-type]
    monkeypatch.setattr("kvcache.integration.vllm.ahead.os.getpid", lambda: 1)
    ahead.load_ahead(tmp_path, "session", 1, request)  # type: ignore[arg-type]
    assert rank.calls == 1
