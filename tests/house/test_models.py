# SPDX-License-Identifier: Apache-2.0
"""Making models: folders appear whole or not at all, and the weights mean the same after the conversion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from image.models import smollm2
from image.models.folder import made_once


def test_folder_is_made_once_for_its_inputs(tmp_path: Path) -> None:
    target, calls = tmp_path / "models" / "one", list[Path]()

    def make(folder: Path) -> None:
        calls.append(folder)
        (folder / "weights").write_text(str(len(calls)))

    assert made_once(target, "v1", make)
    assert not made_once(target, "v1", make)
    assert (target / "weights").read_text() == "1"
    assert made_once(target, "v2", make)
    assert (target / "weights").read_text() == "2"
    assert target not in calls
    assert list(target.parent.iterdir()) == [target], "no scratch folder is left"


def test_failed_making_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "one"
    made_once(target, "v1", lambda folder: (folder / "weights").touch())

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        made_once(target, "v2", fail)
    assert sorted(path.name for path in target.iterdir()) == ["made-from.txt", "weights"]
    assert list(tmp_path.iterdir()) == [target]


def test_the_first_of_two_makers_wins(tmp_path: Path) -> None:
    target = tmp_path / "one"

    def make(folder: Path) -> None:
        made_once(target, "v1", lambda other: (other / "first").touch())
        (folder / "second").touch()

    made_once(target, "v1", make)
    assert sorted(path.name for path in target.iterdir()) == ["first", "made-from.txt"]
    assert list(tmp_path.iterdir()) == [target]


def _angles(position: int, head_dim: int) -> torch.Tensor:
    return position / 10_000.0 ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def _rotate_neighbours(x: torch.Tensor, position: int) -> torch.Tensor:
    """Rotary embedding as llama.cpp computes it: the pair (2i, 2i + 1) of each head turns by angle i."""
    turned = torch.empty_like(x)
    for i, angle in enumerate(_angles(position, x.shape[-1])):
        a, b = x[..., 2 * i], x[..., 2 * i + 1]
        turned[..., 2 * i] = a * angle.cos() - b * angle.sin()
        turned[..., 2 * i + 1] = a * angle.sin() + b * angle.cos()
    return turned


def _rotate_halves(x: torch.Tensor, position: int) -> torch.Tensor:
    """Rotary embedding as Hugging Face computes it: the pair (i, i + d / 2) of each head turns by angle i."""
    half = x.shape[-1] // 2
    angles = _angles(position, x.shape[-1])
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)


@settings(deadline=None, max_examples=30)
@given(
    heads=st.integers(1, 5),
    half=st.integers(1, 9),
    hidden=st.integers(1, 7),
    positions=st.tuples(st.integers(0, 9_000), st.integers(0, 9_000)),
    seed=st.integers(0, 2**31),
)
def test_attention_scores_survive_the_order_of_rows(
    heads: int, half: int, hidden: int, positions: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    head_dim = 2 * half
    query, key = torch.randn(2, heads * head_dim, hidden, generator=generator, dtype=torch.float64)
    x, y = torch.randn(2, hidden, generator=generator, dtype=torch.float64)

    def scores(q: torch.Tensor, k: torch.Tensor, halves: bool) -> torch.Tensor:
        rotate = _rotate_halves if halves else _rotate_neighbours
        q_heads, k_heads = (q @ x).view(heads, head_dim), (k @ y).view(heads, head_dim)
        return (rotate(q_heads, positions[0]) * rotate(k_heads, positions[1])).sum(-1)

    converted = scores(smollm2.unpermute_rotary(query, heads), smollm2.unpermute_rotary(key, heads), True)
    torch.testing.assert_close(converted, scores(query, key, False))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.29.ffn_norm.weight", "model.layers.29.post_attention_layernorm.weight"),
    ],
)
def test_tensor_names(name: str, expected: str) -> None:
    assert smollm2.hugging_face_name(name) == expected


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.bias", "blk.x.attn_q.weight", "blk.0.ssm_in.weight", "rope_freqs.weight", ""]
)
def test_unknown_tensors_are_named(name: str) -> None:
    with pytest.raises(smollm2.ModelError, match=f"no Llama has a tensor '{name}'"):
        smollm2.hugging_face_name(name)


def test_the_folder_holds_a_whole_model(smollm2_model: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(smollm2_model)
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (30, 3, 64)
    assert config.max_position_embeddings == 8192
    model = AutoModelForCausalLM.from_pretrained(smollm2_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_model)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
