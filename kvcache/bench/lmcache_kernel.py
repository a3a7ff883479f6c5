# SPDX-License-Identifier: Apache-2.0
"""LMCache's own bulk kernel in the same run, where its package is installed: the figure to beat."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from kvcache.bench.shapes import LLAMA_8B
from kvcache.bench.transfer import Bench

_CHUNK_TOKENS = 256


def lmcache_results(device: torch.device, total_bytes: int = 2 << 30) -> Iterator[dict[str, Any]]:
    """Store and load of the 8B shape through `lmcache.c_ops`; nothing where LMCache is not installed."""
    if importlib.util.find_spec("lmcache") is None:
        return
    ops = importlib.import_module("lmcache.c_ops")
    bench = Bench.of(LLAMA_8B, device, total_bytes)
    shape = bench.shape
    tokens = len(bench.slots) // _CHUNK_TOKENS * _CHUNK_TOKENS
    pointers = torch.tensor([tensor.data_ptr() for tensor in bench.tensors], device=device)
    slots = torch.from_numpy(bench.slots).to(device)
    chunk = [2, shape.layers, _CHUNK_TOKENS, shape.heads * shape.head_size]
    memory = bench.memory[: tokens * shape.token_bytes].view(shape.dtype).view(-1, *chunk)
    page_slots = bench.tensors[0].shape[1] * shape.block_size

    def move(direction: Any) -> None:
        for index, start in enumerate(range(0, tokens, _CHUNK_TOKENS)):
            ops.multi_layer_kv_transfer(
                memory[index],
                pointers,
                slots[start : start + _CHUNK_TOKENS],
                device,
                page_slots,
                direction,
                ops.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS,
                block_size=shape.block_size,
                head_size=shape.head_size,
                skip_prefix_n_tokens=0,
            )

    for store, direction in ((True, ops.TransferDirection.D2H), (False, ops.TransferDirection.H2D)):
        seconds, submit, plain = bench.compare(lambda: move(direction), store)  # noqa: B023 -- called at once
        rate, plain_rate = memory.nbytes / seconds / 1e9, bench.memory.nbytes / plain / 1e9
        yield {
            "direction": "store" if store else "load",
            "rate": rate,
            "plain_rate": plain_rate,
            "ratio": rate / plain_rate,
            "submit_ms": submit * 1e3,
        }
