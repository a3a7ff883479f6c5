# SPDX-License-Identifier: Apache-2.0
"""Memory objects: the KV of one chunk in host memory, seen as a tensor without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcache.memory.formats import MemoryFormat

if TYPE_CHECKING:
    from kvcache.memory.allocator import ChunkAllocator


@dataclass(slots=True)
class MemoryObjMetadata:
    """What a memory object holds and where."""

    shape: torch.Size
    dtype: torch.dtype
    fmt: MemoryFormat
    address: int
    """Of the first byte, in this process."""
    size: int
    """Bytes of payload: the shape's elements times the dtype's size."""
    cached_positions: torch.Tensor | None = None
    """int64 [tokens]: the positions that the keys were rotated for, where they may be moved (blending)."""


class MemoryObj:
    """One chunk. Made by an allocator and valid until it is given back to it."""

    __slots__ = ("_allocator", "_offset", "_units", "metadata")

    def __init__(
        self, metadata: MemoryObjMetadata, allocator: ChunkAllocator, offset: int, units: int
    ) -> None:
        self.metadata = metadata
        self._allocator: ChunkAllocator | None = allocator
        self._offset = offset
        self._units = units

    @property
    def is_valid(self) -> bool:
        """Whether the object still owns its memory."""
        return self._allocator is not None

    @property
    def tensor(self) -> torch.Tensor:
        """The payload with its shape and dtype; no copy. Must not be used after the object was freed.

        Raises:
            RuntimeError: the object was freed.
        """
        return self._bytes().view(self.metadata.dtype).view(self.metadata.shape)

    def layer(self, index: int) -> torch.Tensor:
        """One layer of a resident object: KV_T2D `[T, 2, D]`, or `[T, D]` for MLA; no copy."""
        return self.tensor[index]

    @property
    def buffer(self) -> memoryview:
        """The payload as writable bytes; no copy."""
        return self._owner().buffer(self._offset, self.metadata.size)

    @property
    def data_ptr(self) -> int:
        """Address of the first byte."""
        self._owner()
        return self.metadata.address

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self.metadata.size

    @property
    def num_tokens(self) -> int:
        return self.metadata.shape[self.metadata.fmt.token_dim]

    def _owner(self) -> ChunkAllocator:
        if self._allocator is None:
            raise RuntimeError("the memory object was freed; its memory may hold another chunk")
        return self._allocator

    def _bytes(self) -> torch.Tensor:
        return self._owner().bytes_at(self._offset, self.metadata.size)
