# SPDX-License-Identifier: Apache-2.0
"""`compression: Lossless` on a real vLLM in bfloat16: fewer bytes, and pages that come back bit for bit.

Answers in bfloat16 may depend on how many tokens are computed at once, so pages are compared, and answers
with those of other hits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache import _native
from kvcache.gpu_connector.interface import Coded
from kvcache.gpu_connector.transfer import PageTransfer
from kvcache.integration.vllm.adapter import LMCacheConnectorV1Impl
from tests.integration.vllm.conftest import Log, MakePrompt, StartEngine
from tests.integration.vllm.engines import BLOCK, CHUNK, Engine, Reference, Tokens
from tests.integration.vllm.servers import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LAYERS, ROW = 2, 2 * 64
"""Layers and elements of a row of the tiny model."""
LOSSLESS = {"compression": "Lossless"}
BFLOAT16 = {"dtype": "bfloat16"}


def on_disk(folder: Path, **more: Any) -> dict[str, Any]:
    disk = {"directories": [str(folder)], "capacity": "64Mi"}
    return {"tiers": {"cpu": {"capacity": "64Mi"}, "disk": disk}, **more}


def writes(engine: Engine, objects: int) -> bool:
    """Whether so many objects lie on the disk, soon."""

    def written() -> int:
        return next(tier.objects for tier in engine.rank_stats.tiers if tier.name == "disk")

    return eventually(lambda: written() == objects)


class Pages:
    """vLLM's, as it registers them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers: list[torch.Tensor] = []
        register = LMCacheConnectorV1Impl.register_kv_caches

        def watched(impl: LMCacheConnectorV1Impl, kv_caches: dict[str, torch.Tensor]) -> None:
            self.layers = list(kv_caches.values())
            register(impl, kv_caches)

        monkeypatch.setattr(LMCacheConnectorV1Impl, "register_kv_caches", watched)

    def of(self, engine: Engine, prompt: Tokens) -> tuple[list[set[bytes]], int]:
        """By layer the blocks that the prompt's first token needs, and how many tokens were cached."""
        for layer in self.layers:
            layer.fill_(-3.0)
        untouched = bytes(self.layers[0][0].contiguous().view(torch.uint8).numpy())
        cached = engine.answer(prompt, 1).cached_tokens
        found = [
            {bytes(block.contiguous().view(torch.uint8).numpy()) for block in layer} for layer in self.layers
        ]
        return [blocks - {untouched} for blocks in found], cached


def test_pages_come_back_from_memory_and_from_a_disk_after_a_restart(
    start_engine: StartEngine, make_prompt: MakePrompt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, prompt = Pages(monkeypatch), make_prompt(3 * CHUNK + 1)
    engine = start_engine(on_disk(tmp_path, **LOSSLESS), more=BFLOAT16)
    cold, cached = pages.of(engine, prompt)
    assert cached == 0
    assert writes(engine, 3)
    assert {obj.nbytes for obj in engine.stored()} == {CHUNK * LAYERS * 2 * _native.coded_row_bytes(ROW)}
    assert _native.coded_row_bytes(ROW) < 0.82 * ROW * 2
    engine.forget_gpu()
    whole = 3 * CHUNK // BLOCK
    hit, cached = pages.of(engine, prompt)
    assert cached == 3 * CHUNK
    assert all(len(one & two) >= whole for one, two in zip(cold, hit, strict=True))
    engine.forget_gpu()
    answer = engine.answer(prompt)
    engine.check_clean()
    engine.close()

    again = start_engine(on_disk(tmp_path, **LOSSLESS), more=BFLOAT16)
    hit, cached = pages.of(again, prompt)
    assert cached == 3 * CHUNK
    assert all(len(one & two) >= whole for one, two in zip(cold, hit, strict=True))
    again.forget_gpu()
    assert again.answer(prompt).tokens == answer.tokens
    again.check_clean()


def test_chunks_with_and_without_are_not_mixed_up(
    start_engine: StartEngine, make_prompt: MakePrompt, tmp_path: Path
) -> None:
    prompt = make_prompt(2 * CHUNK)
    for extra, objects in ((LOSSLESS, 2), ({}, 4)):
        engine = start_engine(on_disk(tmp_path, **extra), more=BFLOAT16)
        assert engine.answer(prompt).cached_tokens == 0
        assert writes(engine, objects)
        engine.check_clean()
        engine.close()


def test_what_has_no_code_is_computed_again(
    start_engine: StartEngine, make_prompt: MakePrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PageTransfer.store
    stores: list[int] = []

    def refusing(self: PageTransfer, *args: Any, **kwargs: Any) -> Any:
        """Of the first store the second chunk, of the second store the first one, of the third none."""
        copies = store(self, *args, **kwargs)
        assert isinstance(copies, Coded)
        stores.append(len(copies._refused))
        if len(stores) < 3:
            copies._refused[2 - len(stores)] = 1
        return copies

    monkeypatch.setattr(PageTransfer, "store", refusing)
    engine = start_engine(LOSSLESS, more=BFLOAT16)
    prompts = [make_prompt(2 * CHUNK + 5) for _ in range(3)]
    answers = [engine.answer(prompt) for prompt in prompts]
    assert stores == [2, 2, 2]
    assert (len(engine.stored()), engine.rank_stats.failures) == (3, {"StoreNotCoded": 2})
    engine.forget_gpu()
    again = [engine.answer(prompt) for prompt in prompts]
    assert [answer.cached_tokens for answer in again] == [CHUNK, 0, 2 * CHUNK]
    assert again[1].tokens == answers[1].tokens
    engine.forget_gpu()
    # What was missing was stored now.
    assert [engine.answer(prompt).cached_tokens for prompt in prompts] == [2 * CHUNK] * 3
    engine.check_clean(failures=True)


def test_kv_of_another_type_is_stored_as_it_is(
    start_engine: StartEngine, reference: Reference, make_prompt: MakePrompt, log: Log
) -> None:
    engine = start_engine(LOSSLESS)
    assert "KV of torch.float32 with 128 elements a row is stored as it is" in log.text
    prompt = make_prompt(2 * CHUNK + 5)
    engine.store(prompt, reference(prompt))
    answer = engine.answer(prompt)
    assert (answer.tokens, answer.cached_tokens) == (reference(prompt), 2 * CHUNK)
    engine.check_clean()
