# SPDX-License-Identifier: Apache-2.0
"""A random Llama of 1.4 million parameters with a tokenizer, made without a hub.

The initialiser is ten times as wide as usual, so that logits lie apart: a greedy answer then differs as soon
as the KV that it stands on differs, which is what the tests of the cache compare.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 64, 2
MAX_TOKENS = 8192


def made_from() -> str:
    """What the folder depends on: this file and the library that writes it."""
    return (
        f"{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()} transformers {transformers.__version__}"
    )


def make(target: Path) -> None:
    """Writes configuration, weights (bfloat16) and tokenizer into the folder `target`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["a short text about paged attention and the keys and values it caches"], trainer
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    wrapped.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    )
    wrapped.save_pretrained(target)

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    finally:
        torch.random.set_rng_state(state)
    model.save_pretrained(target)
