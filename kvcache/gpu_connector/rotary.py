# SPDX-License-Identifier: Apache-2.0
"""Moves keys to other positions, so that a chunk's KV serves where its text stands elsewhere in a prompt."""

from __future__ import annotations

import torch

from kvcache import lmc_ops


class FusedRotary:
    """`fused_rotary_emb(old_positions, new_positions, keys)` for one model.

    Args:
        cos_sin_cache: the model's own table `[positions, R]`, cosines then sines, with whatever scaling its
            rotary embedding has (vLLM's `rotary_emb.cos_sin_cache`).
        is_neox: pairs `(i, i + R/2)`, else `(2i, 2i + 1)`.
    """

    def __init__(self, cos_sin_cache: torch.Tensor, *, is_neox: bool = True) -> None:
        self._tables = {cos_sin_cache.device: cos_sin_cache.contiguous()}
        self._first = cos_sin_cache.contiguous()
        self._is_neox = is_neox

    @property
    def rotary_size(self) -> int:
        """Elements of a head that are rotated."""
        return int(self._first.shape[1])

    def __call__(self, old_positions: torch.Tensor, new_positions: torch.Tensor, keys: torch.Tensor) -> None:
        """Moves `keys` `[T, H, D]` in place; positions are int64 [T]. Raises ValueError as the kernel
        does.
        """
        if keys.device not in self._tables:
            self._tables[keys.device] = self._first.to(keys.device)
        table = self._tables[keys.device]
        lmc_ops.rotary_embedding_k_fused(
            old_positions, new_positions, keys, keys.shape[-1], table, self._is_neox
        )
