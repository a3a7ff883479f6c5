# SPDX-License-Identifier: Apache-2.0
"""KV of known models in the layouts of their engines, as tensors with random content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvcache.gpu_connector.layout import LayerSpec


@dataclass(frozen=True)
class Shape:
    """The KV of one rank.

    Attributes:
        axes: the order in memory: L layers, B blocks, N tokens of a block, H heads, 2 key and value, D
            elements of a head, C key then value (or the latent of MLA).
    """

    name: str
    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype
    axes: str
    block_size: int = 16
    mla: bool = False
    coded: bool = False
    """Chunks hold coded rows."""

    @property
    def token_bytes(self) -> int:
        """Of all layers, in the pages."""
        planes = 1 if self.mla else 2
        return self.layers * planes * self.heads * self.head_size * self.dtype.itemsize

    def spec(self, blocks: int) -> LayerSpec:
        """What vLLM would declare."""
        return LayerSpec(
            block_size=self.block_size,
            num_kv_heads=self.heads,
            head_size=self.head_size,
            dtype=self.dtype,
            num_blocks=blocks,
            use_mla=self.mla,
            coded=self.coded,
        )

    def tensors(self, blocks: int, device: torch.device) -> list[torch.Tensor]:
        """One tensor a layer, as vLLM registers them."""
        size = {"L": self.layers, "B": blocks, "N": self.block_size, "H": self.heads, "2": 2}
        size["D"] = self.head_size * self.dtype.itemsize
        size["C"] = size["D"] * (1 if self.mla else 2)
        shape = [size[axis] for axis in self.axes]
        if self.coded:  # random bytes have no code, normal numbers do
            shape[-1] //= self.dtype.itemsize
            storage = torch.empty(shape, dtype=self.dtype, device=device).normal_().view(torch.uint8)
        else:
            storage = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        inner = self.axes.replace("L", "")
        logical = inner if "2" in inner else "BHNC" if "H" in inner else "BNC"
        layers = [storage.select(self.axes.index("L"), layer) for layer in range(self.layers)]
        return [layer.permute([inner.index(axis) for axis in logical]).view(self.dtype) for layer in layers]


LLAMA_8B = Shape("8B", 32, 8, 128, torch.bfloat16, "L2BNHD")
LLAMA_70B_TP4 = Shape("70B-TP4", 80, 2, 128, torch.bfloat16, "L2BNHD")
MLA = Shape("MLA", 61, 1, 576, torch.bfloat16, "LBNC", 64, mla=True)
FP8 = torch.float8_e4m3fn

SHAPES: Sequence[Shape] = (
    LLAMA_8B,
    replace(LLAMA_8B, axes="LB2NHD"),
    replace(LLAMA_8B, axes="LBNHC"),
    replace(LLAMA_8B, axes="LBHNC"),
    replace(LLAMA_8B, axes="BLHNC"),
    replace(LLAMA_8B, name="8B-fp8", dtype=FP8),
    replace(LLAMA_8B, name="8B-fp8", dtype=FP8, axes="LBNHC"),
    LLAMA_70B_TP4,
    replace(LLAMA_70B_TP4, axes="LBHNC"),
    MLA,
    replace(MLA, block_size=16),
    replace(LLAMA_8B, coded=True),
    replace(LLAMA_8B, axes="LBHNC", coded=True),
    replace(MLA, coded=True),
)

CPU_SHAPES: Sequence[Shape] = tuple(
    replace(shape, layers=8)
    for shape in (
        *SHAPES[:4],
        replace(LLAMA_8B, name="8B-f32", dtype=torch.float32, axes="LBHNC", block_size=128),
        MLA,
        replace(LLAMA_8B, coded=True),
    )
)
"""The host's copies do not depend on the number of layers, the memory does."""
