# SPDX-License-Identifier: Apache-2.0
"""vLLM's MultiConnector: ours beside another one, which may have the KV, or fail to bring it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm.conftest import MakePrompt, StartEngine
from tests.integration.vllm.engines import BLOCK, CHUNK, Engine, Reference
from tests.integration.vllm.others import BrokenPromises

pytestmark = pytest.mark.vllm

OURS: dict[str, Any] = {
    "kv_connector": "LMCacheConnectorV1Dynamic",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kvcache.integration.vllm.connector",
    "kv_connector_extra_config": {"chunk_size": CHUNK, "tiers": {"cpu": {"capacity": "64Mi"}}},
}
BROKEN: dict[str, Any] = {
    "kv_connector": "BrokenPromises",
    "kv_role": "kv_both",
    "kv_connector_module_path": "tests.integration.vllm.others",
}


def _multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


@pytest.fixture(autouse=True)
def _no_promises() -> Iterator[None]:
    BrokenPromises.promises, BrokenPromises.broken = [], 0
    yield
    BrokenPromises.promises = []


@pytest.mark.parametrize("first", [0, 1])
def test_beside_vllms_example(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, tmp_path: Path, first: int
) -> None:
    """Both store; the first one that has a prompt loads it."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    children = [OURS, example] if first == 0 else [example, OURS]
    engine = start_engine(more={"kv_transfer_config": _multi(*children)})
    prompts = [make_prompt(4 * CHUNK + 30), make_prompt(900)]
    for _ in range(3):
        answers = engine.answers(prompts)
        assert [answer.tokens for answer in answers] == reference.all(prompts)
        engine.forget_gpu()
    assert all(answer.cached_tokens for answer in answers)
    assert (engine.rank_stats.loaded_tokens > 0) == (first == 0)
    assert engine.side._begun is None, (
        "loads neither start ahead of their step nor are reported before they have ended"
    )
    assert engine.rank_stats.stored_tokens == (4 + 3) * CHUNK
    engine.check_clean(counts=first == 0)


@pytest.mark.parametrize("length", [2 * CHUNK + 50, 5 * CHUNK])
def test_what_another_connector_failed_to_load_is_not_stored(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, length: int
) -> None:
    """The step of a load computes upon its blocks before anybody knows that they were not filled."""
    engine = start_engine(more={"kv_transfer_config": _multi(BROKEN, OURS)})
    prompt = make_prompt(length)
    BrokenPromises.promises = [CHUNK + BLOCK]
    assert engine.answer(prompt).tokens == reference(prompt)
    assert BrokenPromises.broken == 1
    engine.forget_gpu()
    again = engine.answer(prompt)
    assert again.tokens == reference(prompt)
    assert again.cached_tokens == min(length // CHUNK * CHUNK, length - 1)
    engine.check_clean(counts=False)


def test_a_connector_that_is_off_beside_another(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, tmp_path: Path
) -> None:
    off = OURS | {"kv_connector_extra_config": {"chunk_size": 384}}
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    engine = start_engine(more={"kv_transfer_config": _multi(off, example)})
    assert "power of two" in engine.rank_stats.reason
    prompt = make_prompt(4 * CHUNK + 30)
    for _ in range(2):
        answer = engine.answer(prompt)
        assert answer.tokens == reference(prompt)
        engine.forget_gpu()
    assert answer.cached_tokens > 0


def test_statistics_of_both(engine_with_broken: Engine, make_prompt: MakePrompt) -> None:
    engine_with_broken.answer(make_prompt(CHUNK))
    names = {metric.name for metric in engine_with_broken.llm.get_metrics()}
    assert "vllm:kvcache_stored_tokens" in names
    engine_with_broken.check_clean()


@pytest.fixture
def engine_with_broken(start_engine: StartEngine) -> Engine:
    return start_engine(more={"kv_transfer_config": _multi(BROKEN, OURS)})
