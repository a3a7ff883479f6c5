# SPDX-License-Identifier: Apache-2.0
"""What one vLLM has stored on a disk, another one gives back: after a restart, and beside it by `kv_role`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm.conftest import MakePrompt, StartEngine
from tests.integration.vllm.engines import CHUNK, Engine, Reference
from tests.integration.vllm.servers import Server, eventually, snapshot_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def _on(folder: Path, **more: Any) -> dict[str, Any]:
    disk = {"directories": [str(folder)], "capacity": "64Mi"}
    return {"tiers": {"cpu": {"capacity": "64Mi"}, "disk": disk}, **more}


def _on_disk(engine: Engine) -> int:
    return next(tier.objects for tier in engine.rank_stats.tiers if tier.name == "disk")


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_restart(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, tmp_path: Path, layerwise: bool
) -> None:
    prompts = [make_prompt(4 * CHUNK + 30), make_prompt(3 * CHUNK)]
    extra = _on(tmp_path, use_layerwise=layerwise)
    engine = start_engine(extra)
    for prompt in prompts:
        assert engine.answer(prompt).tokens == reference(prompt)
    assert eventually(lambda: _on_disk(engine) == 7)
    engine.check_clean()
    engine.close()

    again = start_engine(extra)
    for prompt, hit in zip(prompts, (4 * CHUNK, 3 * CHUNK - 1), strict=True):
        answer = again.answer(prompt)
        assert (answer.tokens, answer.cached_tokens) == (reference(prompt), hit)
    assert again.scheduler_stats.hit_cache_tokens["disk"] == 7 * CHUNK - 1
    again.check_clean()


def test_a_producer_and_a_consumer_share_a_disk(
    tiny_model: Path,
    start_engine: StartEngine,
    reference: Reference,
    make_prompt: MakePrompt,
    socket_dir: Path,
    tmp_path: Path,
) -> None:
    """Two vLLM at the same time: the one stores what the other, which never stores, gives back."""
    folder = tmp_path / "shared"
    folder.mkdir()
    prompt, other = make_prompt(3 * CHUNK + 9), make_prompt(2 * CHUNK)
    consumer = start_engine(_on(folder), role="kv_consumer")
    producer = Server(tiny_model, socket_dir, tmp_path / "log", role="kv_producer", extra=_on(folder))
    try:
        producer.wait_until_ready(400)
        assert producer.complete(prompt) == reference(prompt)

        def written() -> int:
            stats = snapshot_of(socket_dir).ranks[0]
            return next(tier.objects for tier in stats.tiers if tier.name == "disk")

        assert eventually(lambda: written() == 3)
        answer = consumer.answer(prompt)
        assert (answer.tokens, answer.cached_tokens) == (reference(prompt), 3 * CHUNK)
        assert consumer.answer(other).tokens == reference(other)
        assert consumer.rank_stats.stored_tokens == 0
        assert written() == 3
        assert producer.external_hits() == 0
        # A producer gives back too what is there.
        producer.forget_gpu()
        assert producer.complete(prompt) == reference(prompt)
        assert producer.external_hits() == 3 * CHUNK
    finally:
        producer.stop()
    consumer.check_clean()
