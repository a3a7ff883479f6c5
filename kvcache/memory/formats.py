# SPDX-License-Identifier: Apache-2.0
"""How the KV of some tokens lies in one contiguous tensor, and what that is for one model.

L layers, T tokens, D elements of a row: heads x head size of one token's key (or value), those of its latent
for MLA, or of key and value where these lie side by side head by head (joined rows).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from kvcache.lmc_ops import check_dtype


class MemoryFormat(enum.Enum):
    """Names of the notes, and two of our own for the resident layout (all layers of a chunk in one
    object).
    """

    KV_LT2D = "[L, T, 2, D]"
    """Resident: each layer's slice is contiguous and is KV_T2D."""
    KV_LTD = "[L, T, D]"
    """Resident, MLA and joined rows: each layer's slice is KV_MLA_FMT."""
    KV_T2D = "[T, 2, D]"
    """One layer, key and value side by side per token."""
    KV_2TD = "[2, T, D]"
    """One layer, all keys, then all values."""
    KV_2LTD = "[2, L, T, D]"
    """All keys of all layers, then all values."""
    KV_MLA_FMT = "[T, D]"
    """One layer of MLA latents, or of joined rows."""

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


class ShapedConnector(Protocol):
    """What a GPU connector says about the KV that it moves."""

    @property
    def num_layers(self) -> int: ...
    @property
    def kv_planes(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class KVShape:
    """The KV of one rank's chunk.

    Args:
        num_layers: layers of this rank.
        kv_planes: rows of a token: 2 for its key and its value, 1 for MLA and for joined rows.
        hidden: elements of a row: of one token's key (heads x head size on this rank), of its latent, or of
            its key and value.
        dtype: of an element.
        chunk_tokens: tokens of a full chunk.
    """

    num_layers: int
    kv_planes: int
    hidden: int
    dtype: torch.dtype
    chunk_tokens: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVShape: {name} is {getattr(self, name)}; it must be above 0")
        if self.kv_planes not in (1, 2):
            raise ValueError(
                f"KVShape: kv_planes is {self.kv_planes}; 2 (keys and values) and 1 (one row of both, "
                "MLA) are accepted"
            )
        check_dtype("KVShape", self.dtype)

    @classmethod
    def of(cls, connector: ShapedConnector, chunk_tokens: int) -> KVShape:
        """The shape of what `connector` moves."""
        return cls(connector.num_layers, connector.kv_planes, connector.hidden, connector.dtype, chunk_tokens)

    @property
    def fmt(self) -> MemoryFormat:
        return MemoryFormat.KV_LT2D if self.kv_planes == 2 else MemoryFormat.KV_LTD

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * self.kv_planes * self.hidden * self.dtype.itemsize

    @cached_property
    def _shapes(self) -> list[torch.Size]:
        fmt, layers = self.fmt, self.num_layers
        return [fmt.shape(tokens=n, hidden=self.hidden, layers=layers) for n in range(self.chunk_tokens + 1)]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a full chunk's payload."""
        return self.chunk_tokens * self.token_bytes

    def shape(self, tokens: int) -> torch.Size:
        """The resident shape of at most a chunk's tokens: `[L, T, 2, D]`, or `[L, T, D]` for MLA."""
        return self._shapes[tokens]
