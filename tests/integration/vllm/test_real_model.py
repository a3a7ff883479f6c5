# SPDX-License-Identifier: Apache-2.0
"""The same on a real model: SmolLM2-135M-Instruct, with English text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from tests.conftest import BUILD
from tests.integration.vllm.conftest import StartEngine
from tests.integration.vllm.engines import CHUNK, Reference, Tokens

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_model: Path) -> Iterator[Reference]:
    plain = Reference(smollm2_model)
    yield plain
    plain.close()


@pytest.fixture(scope="module")
def text(smollm2_model: Path) -> Tokens:
    """Of this repository's own documents."""
    documents = [BUILD.parent / name for name in ("CONTRIBUTING.md", "README.md", "LICENSE")]
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_model)
    return list(tokenizer("\n".join(path.read_text() for path in documents)).input_ids)


def test_answers_are_those_of_a_plain_vllm(
    start_engine: StartEngine, smollm2_model: Path, smollm2_reference: Reference, text: Tokens
) -> None:
    shared, question = text[:700], text[-60:]
    prompts = [shared + question, text[: 2 * CHUNK], shared + text[900:970]]
    expected = smollm2_reference.all(prompts)
    engine = start_engine(model=smollm2_model, more={"max_num_batched_tokens": 500, "max_num_seqs": 8})
    assert engine.answer(prompts[0]).tokens == expected[0]
    engine.forget_gpu()
    for _ in range(2):
        answers = engine.answers(prompts)
        assert [answer.tokens for answer in answers] == expected
        cached = [answer.cached_tokens for answer in answers]
        assert cached[:2] == [2 * CHUNK, 2 * CHUNK - 1]
        # It shares more with the first than whole chunks, and vLLM has that from the same batch.
        assert cached[2] >= 2 * CHUNK
        engine.forget_gpu()
    engine.check_clean()
    # The cache has a say in it.
    for chunk in engine.stored():
        chunk.tensor.neg_()
    assert engine.answer(prompts[0]).tokens != expected[0]
