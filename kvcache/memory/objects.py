# SPDX-License-Identifier: Apache-2.0
"""Memory objects: the KV of one chunk in host memory, seen as a tensor without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcache.memory.formats import KVShape, MemoryFormat

if TYPE_CHECKING:
    from kvcache.memory.allocator import ChunkAllocator


@dataclass(frozen=True, slots=True)
class MemoryObjMetadata:
    """What a memory object holds and where."""

    shape: torch.Size
    dtype: torch.dtype
    fmt: MemoryFormat
    address: int
    """Of the first byte, in this process."""
    size: int
    """Bytes of payload: the shape's elements times the dtype's size."""
    cached_positions: torch.Tensor | None
    """int64 [tokens]: the positions that the keys were rotated for, where they may be moved (blending)."""


class MemoryObj:
    """One chunk. Made by an allocator and valid until it is given back to it.

    Holds no more than it must, since there is one for each chunk of a tier: the rest is derived.
    """

    __slots__ = ("_allocator", "_offset", "_units", "cached_positions", "num_tokens")

    def __init__(self, allocator: ChunkAllocator, offset: int, units: int, num_tokens: int) -> None:
        self._allocator: ChunkAllocator | None = allocator
        self._offset = offset
        self._units = units
        self.num_tokens = num_tokens
        self.cached_positions: torch.Tensor | None = None

    @property
    def is_valid(self) -> bool:
        """Whether the object still owns its memory. Where it does not, the properties below raise
        RuntimeError.
        """
        return self._allocator is not None

    @property
    def kv_shape(self) -> KVShape:
        """What all chunks of the allocator are made of."""
        return self._owner().shape

    @property
    def shape(self) -> torch.Size:
        """`[L, T, 2, D]`, or `[L, T, D]` for MLA."""
        return self._owner().shape.shape(self.num_tokens)

    @property
    def dtype(self) -> torch.dtype:
        return self._owner().shape.dtype

    @property
    def fmt(self) -> MemoryFormat:
        return self._owner().shape.fmt

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self.num_tokens * self._owner().shape.token_bytes

    @property
    def data_ptr(self) -> int:
        """Address of the first byte."""
        return self._owner().address + self._offset

    @property
    def metadata(self) -> MemoryObjMetadata:
        """All of the above at this moment."""
        return MemoryObjMetadata(
            self.shape, self.dtype, self.fmt, self.data_ptr, self.nbytes, self.cached_positions
        )

    @property
    def tensor(self) -> torch.Tensor:
        """The payload with its shape and dtype; no copy. Must not be used after the object was freed."""
        return self._owner().bytes_at(self._offset, self.nbytes).view(self.dtype).view(self.shape)

    @property
    def buffer(self) -> memoryview:
        """The payload as writable bytes; no copy."""
        return self._owner().buffer(self._offset, self.nbytes)

    def layer(self, index: int) -> torch.Tensor:
        """One layer: KV_T2D `[T, 2, D]`, or `[T, D]` for MLA; no copy."""
        return self.tensor[index]

    def slice(self, index: int) -> LayerSlice:
        """One layer as an object of its own format; no copy, and nothing to free."""
        return LayerSlice(self, index)

    def remember_positions(self, positions: torch.Tensor) -> None:
        """Notes the positions (int64 [tokens]) that the object's keys were rotated for.

        Raises:
            ValueError: not one position a token.
        """
        if positions.dtype != torch.int64 or list(positions.shape) != [self.num_tokens]:
            raise ValueError(
                f"positions {list(positions.shape)} of {positions.dtype} for a memory object of "
                f"{self.num_tokens} tokens; [{self.num_tokens}] of int64 is accepted"
            )
        self.cached_positions = positions

    def _owner(self) -> ChunkAllocator:
        if self._allocator is None:
            raise RuntimeError("the memory object was freed; its memory may hold another chunk")
        return self._allocator


class LayerSlice:
    """One layer of a resident memory object: KV_T2D, or KV_MLA_FMT. Valid as long as the whole object.

    Raises:
        ValueError: the object has no such layer.
    """

    __slots__ = ("_index", "_whole", "num_tokens")

    def __init__(self, whole: MemoryObj, index: int) -> None:
        if not 0 <= index < whole.shape[0]:
            raise ValueError(f"no layer {index} of a memory object {whole.fmt.name} {list(whole.shape)}")
        self._whole = whole
        self._index = index
        self.num_tokens = whole.num_tokens

    @property
    def kv_shape(self) -> KVShape:
        """Of the whole object."""
        return self._whole.kv_shape

    @property
    def shape(self) -> torch.Size:
        """`[T, 2, D]`, or `[T, D]` for MLA."""
        return self._whole.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self._whole.dtype

    @property
    def fmt(self) -> MemoryFormat:
        return MemoryFormat.KV_T2D if self._whole.fmt is MemoryFormat.KV_LT2D else MemoryFormat.KV_MLA_FMT

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self._whole.nbytes // self._whole.shape[0]

    @property
    def data_ptr(self) -> int:
        """Address of the first byte."""
        return self._whole.data_ptr + self._index * self.nbytes

    @property
    def cached_positions(self) -> torch.Tensor | None:
        """Those of the whole object: all layers share them."""
        return self._whole.cached_positions

    @property
    def metadata(self) -> MemoryObjMetadata:
        """All of the above at this moment."""
        return MemoryObjMetadata(
            self.shape, self.dtype, self.fmt, self.data_ptr, self.nbytes, self.cached_positions
        )

    @property
    def tensor(self) -> torch.Tensor:
        """The layer's payload; no copy."""
        return self._whole.tensor[self._index]

    def remember_positions(self, positions: torch.Tensor) -> None:
        """As for the whole object."""
        self._whole.remember_positions(positions)
