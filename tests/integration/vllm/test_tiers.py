# SPDX-License-Identifier: Apache-2.0
"""A real vLLM over tiers below host memory: restarts, evictions, and tiers that hang."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvcache import manager
from kvcache.storage.lane import Lane
from tests.integration.vllm.conftest import MakePrompt, StartEngine
from tests.integration.vllm.engines import CHUNK, Engine, Reference
from tests.storage.doubles import DoubleTier

pytestmark = pytest.mark.vllm


def disk(folder: Path, cpu: str = "64Mi") -> dict[str, Any]:
    return {"tiers": {"cpu": {"capacity": cpu}, "disk": {"directories": [str(folder)], "capacity": "1Gi"}}}


def written(engine: Engine, objects: int) -> None:
    """Waits until the tier below has so many objects."""
    deadline = time.monotonic() + 60
    while engine.rank_stats.tiers[1].objects < objects:
        assert time.monotonic() < deadline, engine.rank_stats.tiers[1]
        time.sleep(0.01)


def test_a_restarted_vllm_hits_what_was_stored_before(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, tmp_path: Path
) -> None:
    prompts = [make_prompt(2 * CHUNK + 70), make_prompt(3 * CHUNK + 1)]
    first = start_engine(disk(tmp_path))
    for prompt in prompts:
        assert first.answer(prompt).tokens == reference(prompt)
    written(first, 5)
    first.check_clean()
    first.close()

    second = start_engine(disk(tmp_path))
    for prompt in prompts:
        answer = second.answer(prompt)
        assert answer.tokens == reference(prompt)
        assert answer.cached_tokens == len(prompt) // CHUNK * CHUNK
    assert second.scheduler_stats.hit_cache_tokens == {"cpu": 0, "disk": 5 * CHUNK}
    assert [tier.hit_tokens for tier in second.rank_stats.tiers] == [0, 5 * CHUNK]
    if hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources"):  # from vLLM 0.32 on
        assert second.metric("vllm:prompt_tokens_cached_by_source", "disk") == 5 * CHUNK
    # Now they are in host memory.
    second.forget_gpu()
    assert second.answers(prompts)[1].cached_tokens == 3 * CHUNK
    assert second.scheduler_stats.hit_cache_tokens == {"cpu": 5 * CHUNK, "disk": 5 * CHUNK}
    second.check_clean()
    # What vLLM has itself is not read from anywhere.
    before = second.rank_stats.tiers[1].read_bytes
    assert second.answer(prompts[0]).tokens == reference(prompts[0])
    assert second.rank_stats.tiers[1].read_bytes == before
    # New weights: nothing of the old ones is left anywhere.
    second.forget_all()
    assert [tier.objects for tier in second.rank_stats.tiers] == [0, 0]
    assert second.answer(prompts[0]).cached_tokens == 0


def test_what_host_memory_gave_up_comes_back_from_disk(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, tmp_path: Path
) -> None:
    engine = start_engine(disk(tmp_path, cpu="4Mi"))
    room = engine.rank_stats.tiers[0].capacity_bytes // (CHUNK * 1024)
    prompts = [make_prompt(2 * CHUNK + 9) for _ in range(room)]
    for number, prompt in enumerate(prompts, start=1):
        engine.answer(prompt)
        written(engine, 2 * number)
    assert engine.rank_stats.tiers[0].evictions > 0
    engine.forget_gpu()
    # One after the other: together they would hold all of host memory, and some stores find no room.
    assert [engine.answer(prompt).tokens for prompt in prompts] == reference.all(prompts)
    assert engine.scheduler_stats.hit_cache_tokens["disk"] > 0
    engine.check_clean()


def test_with_write_back_the_end_of_vllm_writes_what_only_host_memory_has(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, tmp_path: Path
) -> None:
    config = disk(tmp_path)
    config["tiers"]["disk"]["write"] = "Back"
    prompts = [make_prompt(3 * CHUNK + 70), make_prompt(CHUNK + 3)]
    first = start_engine(config)
    assert [answer.tokens for answer in first.answers(prompts)] == reference.all(prompts)
    assert first.rank_stats.tiers[1].objects == 0
    first.check_clean()
    first.close()
    second = start_engine(config)
    answers = second.answers(prompts)
    assert [answer.tokens for answer in answers] == reference.all(prompts)
    assert [answer.cached_tokens for answer in answers] == [3 * CHUNK, CHUNK]
    assert second.scheduler_stats.hit_cache_tokens == {"cpu": 0, "disk": 4 * CHUNK}
    second.check_clean()


@pytest.mark.parametrize("indexed", [True, False])
def test_a_tier_that_hangs_costs_one_deadline_and_no_answer(
    start_engine: StartEngine,
    reference: Reference,
    make_prompt: MakePrompt,
    monkeypatch: pytest.MonkeyPatch,
    indexed: bool,
) -> None:
    tier = DoubleTier("remote", indexed=indexed)
    monkeypatch.setattr(manager, "open_lanes", lambda config, context: [Lane(0, tier, deadline_s=0.3)])
    engine = start_engine()
    known, prompt = make_prompt(2 * CHUNK + 5), make_prompt(2 * CHUNK + 5)
    engine.answer(known)
    tier.answer_all("head")
    deadline = time.monotonic() + 30
    while len(tier.objects) < 2:
        assert time.monotonic() < deadline
        tier.answer_all("put")
        time.sleep(0.01)
    side = engine.worker._worker
    assert side is not None
    for key in list(side.engine.storage.cpu._index):
        side.engine.storage.cpu._room.remove(key)
    engine.forget_gpu()
    # It says, or may say, that it has the first one, and does not give it.
    assert [answer.tokens for answer in engine.answers([known, prompt])] == reference.all([known, prompt])
    assert engine.scheduler_stats.lookup_waits_expired > 0
    assert engine.rank_stats.tiers[1].state == "Stalled"
    waits = engine.scheduler_stats.lookup_waits
    engine.forget_gpu()
    assert engine.answer(make_prompt(2 * CHUNK)).cached_tokens == 0
    assert engine.scheduler_stats.lookup_waits == waits, "nobody waits for it any more"
    tier.answer_all()
    assert engine.rank_stats.tiers[1].state == "Ready"
    tier.prompt = True
    engine.check_clean()
