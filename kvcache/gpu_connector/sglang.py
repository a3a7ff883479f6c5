# SPDX-License-Identifier: Apache-2.0
"""Connectors for SGLang's pools: one tensor of keys and one of values a layer, indexed by token.

Attributes of the pools: `[slots, heads, head size]`, or for MLA one pool of latents `[slots, 1, latent]`.
There are no blocks: a slot is an index into the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcache._native import PagedLayout, Pages
from kvcache.gpu_connector.layerwise import LayerwiseConnector
from kvcache.gpu_connector.layout import UnknownLayout, check_declared_dtype, device_index
from kvcache.gpu_connector.paged import BulkConnector


@dataclass(frozen=True)
class PoolSpec:
    """What SGLang declares about its pools.

    Args:
        num_kv_heads: on this rank; 1 for MLA.
        head_size: elements of a head; of the latent for MLA.
        dtype: of an element; fp8 may come as its dtype or as uint8.
        use_mla: one pool of latents a layer in the place of keys and values.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    use_mla: bool = False

    @property
    def planes(self) -> int:
        return 1 if self.use_mla else 2

    @property
    def hidden(self) -> int:
        """Elements of one token's key, or of its latent."""
        return self.num_kv_heads * self.head_size

    def register(self, kvcaches: Sequence[torch.Tensor]) -> Pages:
        """The pages of the pools: the keys of all layers, then the values of all layers; for MLA the latents.

        Raises:
            UnknownLayout: an odd number of pools, or pools that differ or are not as declared.
        """
        if not kvcaches or len(kvcaches) % self.planes:
            raise UnknownLayout(
                f"{len(kvcaches)} pools; as many of keys as of values, and at least one, are accepted"
            )
        first = kvcaches[0]
        for index, pool in enumerate(kvcaches):
            self._check(index, pool, first)
        heads_stride = first.stride(1) if self.num_kv_heads > 1 else self.head_size
        size = first.element_size()
        layout = PagedLayout(
            kv_stride=first.shape[0] * first.stride(0) * size,  # not used: each pool has its own base
            block_stride=first.stride(0) * size,
            token_stride=first.stride(0) * size,
            head_stride=heads_stride * size,
            heads=self.num_kv_heads,
            head_bytes=self.head_size * size,
            block_size=1,
            num_blocks=first.shape[0],
            planes=self.planes,
        )
        bases = np.array([pool.data_ptr() for pool in kvcaches], dtype=np.uint64)
        if len(set(bases.tolist())) < len(bases):
            raise UnknownLayout(
                "two pools share their memory; one of keys and one of values a layer is accepted"
            )
        device = device_index(first.device)
        if self.use_mla:
            return Pages(bases, layout, device)
        layers = len(kvcaches) // 2
        return Pages.unilateral(bases[:layers].copy(), bases[layers:].copy(), layout, device)

    def _check(self, index: int, pool: torch.Tensor, first: torch.Tensor) -> None:
        check_declared_dtype(pool, self.dtype)
        accepted = f"[slots, {self.num_kv_heads}, {self.head_size}]"
        if (
            pool.dim() != 3
            or list(pool.shape[1:]) != [self.num_kv_heads, self.head_size]
            or pool.stride(-1) != 1
            or pool.stride(0) < pool.shape[1] * pool.shape[2]
        ):
            raise UnknownLayout(
                f"pool {index} is {list(pool.shape)}, stride {list(pool.stride())}, {pool.dtype}; "
                f"{accepted} of "
                f"{self.dtype} is accepted"
            )
        if pool.shape != first.shape or pool.stride() != first.stride() or pool.device != first.device:
            raise UnknownLayout(
                f"pool {index} is not like pool 0; pools of one shape on one device are accepted"
            )


class SGLangGPUConnector(BulkConnector):
    """SGLang's pools, all layers at once. `kvcaches` are the key pools of all layers, then the value pools.

    Args:
        spec: what SGLang declares about its pools.
    """

    def __init__(self, spec: PoolSpec) -> None:
        super().__init__(spec)


class SGLangLayerwiseGPUConnector(LayerwiseConnector):
    """SGLang's pools, layer by layer. See `LayerwiseConnector`.

    Args:
        spec: what SGLang declares about its pools.
        use_gpu: as there.
    """

    def __init__(self, spec: PoolSpec, *, use_gpu: bool = True) -> None:
        super().__init__(spec, use_gpu=use_gpu)
