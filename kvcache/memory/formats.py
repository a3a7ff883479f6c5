# SPDX-License-Identifier: Apache-2.0
"""How the KV of some tokens lies in one contiguous tensor.

L layers, T tokens, D = heads x head size elements of one token's key (or value), or the latent's elements for
MLA.
"""

from __future__ import annotations

import enum

import torch


class MemoryFormat(enum.Enum):
    """Names of the notes, and two of our own for the resident layout (all layers of a chunk in one
    object).
    """

    KV_LT2D = "[L, T, 2, D]"
    """Resident: each layer's slice is contiguous and is KV_T2D."""
    KV_LTD = "[L, T, D]"
    """Resident, MLA: each layer's slice is KV_MLA_FMT."""
    KV_T2D = "[T, 2, D]"
    """One layer, key and value side by side per token."""
    KV_2TD = "[2, T, D]"
    """One layer, all keys, then all values."""
    KV_2LTD = "[2, L, T, D]"
    """All keys of all layers, then all values."""
    KV_MLA_FMT = "[T, D]"
    """One layer of MLA latents."""

    @property
    def token_dim(self) -> int:
        """The dimension that counts tokens."""
        return _DIMS[self].index("T")

    @property
    def num_dims(self) -> int:
        return len(_DIMS[self])

    @property
    def token_major(self) -> bool:
        """Whether a token's key and value lie side by side (else keys and values are apart)."""
        return _DIMS[self][0] != "2"

    def shape(self, *, tokens: int, hidden: int, layers: int = 1) -> torch.Size:
        """The tensor's shape for `tokens` tokens of `hidden` elements."""
        sizes = {"L": layers, "T": tokens, "2": 2, "D": hidden}
        return torch.Size([sizes[dim] for dim in _DIMS[self]])

    def num_tokens(self, shape: torch.Size) -> int:
        """Tokens in a tensor of this format.

        Raises:
            ValueError: the shape has another number of dimensions, or no 2 where keys and values are told
                apart.
        """
        dims = _DIMS[self]
        if len(shape) != len(dims) or any(
            dim == "2" and size != 2 for dim, size in zip(dims, shape, strict=True)
        ):
            raise ValueError(f"shape {list(shape)} is no {self.name}; {self.value} is accepted")
        return shape[self.token_dim]


_DIMS = {fmt: tuple(fmt.value.strip("[]").split(", ")) for fmt in MemoryFormat}
