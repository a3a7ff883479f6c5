# SPDX-License-Identifier: Apache-2.0
"""KV tensors in every layout that engines use, and a plain reference of copies by torch's indexing alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcache.gpu_connector.layout import LayerSpec

KV_LAYOUTS = (
    "2BNHD",
    "B2NHD",
    "2BHND",
    "B2HND",
    # vLLM's axes over memory in another order, as VLLM_KV_CACHE_LAYOUT=HND makes it up to 0.25.
    "2BNHD over 2BHND",
    "B2NHD over B2HND",
    # Logical [B, H, N, 2D] in the memory orders of vLLM's KVCacheLayout, and the same with tokens before
    # heads.
    "LBHNC",
    "LBNHC",
    "LHBNC",
    "BLHNC",
    "BLNHC",
    "BHLNC",
    "BNHC",
)
MLA_LAYOUTS = ("MLA BNC", "MLA B1NC", "MLA BLNC")
PLAIN_LAYOUTS = KV_LAYOUTS + MLA_LAYOUTS
JOINED_LAYOUTS = ("joined LBNHC", "joined BLNHC", "joined LBHNC")
"""Whose chunks have a key and its value side by side."""
LAYOUTS = PLAIN_LAYOUTS + JOINED_LAYOUTS
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@dataclass
class PagedKV:
    """The KV tensors of some layers, full of random bytes.

    Attributes:
        tensors: as the engine registers them, one a layer.
        views: uint8 [B, N, planes, H, head bytes], the same memory, one a layer.
    """

    layout: str
    spec: LayerSpec
    storage: torch.Tensor
    tensors: list[torch.Tensor]
    views: list[torch.Tensor]

    def to(self, device: str) -> PagedKV:
        """A copy with the same bytes and strides on a device."""
        return _over(self.layout, self.spec, self.storage.to(device, copy=True))

    @property
    def slots(self) -> int:
        return self.views[0].shape[0] * self.views[0].shape[1]

    @property
    def token_bytes(self) -> int:
        return self.views[0][0, 0].numel()

    def rows(self, layer: int) -> torch.Tensor:
        """A copy of the layer's bytes as [slots, planes, bytes of a row]."""
        view = self.views[layer]
        return view.reshape(self.slots, view.shape[2], -1)

    def snapshot(self) -> list[torch.Tensor]:
        return [self.rows(layer).clone() for layer in range(len(self.views))]


def make_kv(
    layout: str,
    *,
    layers: int,
    blocks: int,
    block_size: int,
    heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> PagedKV:
    """KV tensors of the layout with random content."""
    mla = layout.startswith("MLA")
    heads = 1 if mla else heads
    name = layout.removeprefix("MLA ").removeprefix("joined ")
    size = {"L": layers, "B": blocks, "N": block_size, "H": heads, "1": 1, "2": 2}
    size["D"] = head_size * dtype.itemsize
    size["C"] = size["D"] * (1 if mla else 2)
    shape = [size[axis] for axis in _physical(name)]
    storage = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    spec = LayerSpec(
        block_size=block_size,
        num_kv_heads=heads,
        head_size=head_size,
        dtype=dtype,
        num_blocks=blocks,
        use_mla=mla,
        joined=layout in JOINED_LAYOUTS,
    )
    return _over(layout, spec, storage)


def axes_of(layout: str) -> str:
    """As a specification declares them: some shapes fit several."""
    if layout.startswith("MLA"):
        return "BHNC" if "1" in layout else "BNC"
    return "BHNC" if "L" in layout else layout.split()[0]


def _physical(name: str) -> str:
    name = name.split()[-1]
    return name if "L" in name else "L" + name


def _over(layout: str, spec: LayerSpec, storage: torch.Tensor) -> PagedKV:
    """The layers' tensors over storage whose dimensions are the layout's."""
    name = layout.removeprefix("MLA ").removeprefix("joined ")
    physical = _physical(name)
    axes = physical.replace("L", "")
    at = physical.index("L")
    per_layer = [storage.select(at, layer) for layer in range(storage.shape[at])]
    # vLLM names the axes B, H, N, C whatever their order in memory is.
    logical = name.split()[0] if "over" in name else axes
    if "L" in name and not spec.use_mla:
        logical = "BHNC"
    elif name == "BLNC":
        logical = "BNC"
    per_layer = [layer.permute([axes.index(axis) for axis in logical]) for layer in per_layer]
    content = (spec.content if spec.joined else spec.head_size) * spec.dtype.itemsize
    views = [_as_tokens(layer, logical, spec.planes, content) for layer in per_layer]
    return PagedKV(layout, spec, storage, [layer.view(spec.dtype) for layer in per_layer], views)


def _as_tokens(layer: torch.Tensor, axes: str, planes: int, content: int) -> torch.Tensor:
    """uint8 [B, N, planes, H, head bytes] of a layer whose axes are named."""
    if axes.endswith("C"):
        shape = (*layer.shape[:-1], planes, content)
        strides = (*layer.stride()[:-1], content, 1)
        layer = torch.as_strided(layer, shape, strides, layer.storage_offset())
        axes = axes[:-1] + "2D"
    if "H" not in axes and "1" not in axes:
        layer, axes = layer.unsqueeze(1), axes[0] + "H" + axes[1:]
    return layer.permute([axes.replace("1", "H").index(axis) for axis in "BN2HD"])


def gather(rows: torch.Tensor, slots: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """What a store of one layer must leave in `into` [T, planes, row]: skipped tokens stay as they are."""
    result = into.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            result[token] = rows[slot]
    return result


def scatter(rows: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """What a load of one layer must leave in the pages [slots, planes, row]: other slots stay as they are."""
    result = rows.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            result[slot] = packed[token]
    return result


def random_slots(total: int, tokens: int, block_size: int, *, skip: float = 0.0) -> torch.Tensor:
    """`tokens` distinct slots: blocks in random order, first and last one partial, some tokens left out."""
    blocks = torch.randperm(total // block_size)
    order = (blocks[:, None] * block_size + torch.arange(block_size)).reshape(-1)
    start = int(torch.randint(0, max(1, min(block_size, total - tokens + 1)), (1,)))
    slots = order[start : start + tokens].clone()
    if skip:
        slots[torch.rand(len(slots)) < skip] = -1
    return slots
