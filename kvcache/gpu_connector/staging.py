# SPDX-License-Identifier: Apache-2.0
"""Buffers on the pages' device that hold one layer of many tokens for a while."""

from __future__ import annotations

import threading

import torch


class GPUBufferAllocator:
    """Hands out buffers and counts them. Thread-safe.

    On a GPU the memory is torch's: a buffer that is given back is used again when the streams that it is
    freed for have passed.

    Args:
        device: of the buffers.
        limit_bytes: the most that buffers may hold together; None for no limit.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        self._device = device
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._in_use = 0

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the buffers that were not given back."""
        return self._in_use

    def allocate(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A buffer with undefined content.

        Raises:
            MemoryError: it would exceed the limit.
        """
        size = shape.numel() * dtype.itemsize
        with self._lock:
            if self._limit is not None and self._in_use + size > self._limit:
                raise MemoryError(
                    f"a buffer of {size} bytes beside {self._in_use} in use exceeds the limit of "
                    f"{self._limit} bytes"
                )
            self._in_use += size
        try:
            return torch.empty(shape, dtype=dtype, device=self._device)
        except BaseException:
            with self._lock:
                self._in_use -= size
            raise

    def free(self, buffer: torch.Tensor, *streams: torch.cuda.Stream | None) -> None:
        """Takes a buffer back that work queued on `streams` (besides the current one) may still use."""
        for stream in streams:
            if stream is not None:
                buffer.record_stream(stream)
        with self._lock:
            self._in_use -= buffer.nbytes
