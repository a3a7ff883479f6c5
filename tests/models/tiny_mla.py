# SPDX-License-Identifier: Apache-2.0
"""A random model of DeepSeek-V2's shape (MLA, all layers dense) with tiny_llama's tokenizer, without a hub.

The latent is as large as vLLM's kernel for CPUs asks for: 512 and 64.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import transformers
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from tests.models import tiny_llama

LAYERS, LATENT = 2, 512 + 64


def made_from() -> str:
    """What the folder depends on."""
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return f"{own} {tiny_llama.made_from()} transformers {transformers.__version__}"


def make(target: Path) -> None:
    """Writes configuration, weights (bfloat16) and tokenizer into the folder `target`."""
    tiny_llama.make(target)
    for weights in target.glob("*.safetensors"):
        weights.unlink()
    config = DeepseekV2Config(
        vocab_size=tiny_llama.VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=LAYERS,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=tiny_llama.MAX_TOKENS,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        model = DeepseekV2ForCausalLM(config).to(torch.bfloat16)
    finally:
        torch.random.set_rng_state(state)
    model.save_pretrained(target)
