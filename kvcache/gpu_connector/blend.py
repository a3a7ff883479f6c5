# SPDX-License-Identifier: Apache-2.0
"""The connector for blending: chunks whose text stands at other positions than when they were stored.

A layer passes three stages: load (chunks to a buffer, on the load stream), compute (its keys are moved to
their new positions and the tokens between chunks are zeroed, on the current stream) and write (buffer to
pages, on the current stream). Two buffers in turn let a layer load while the one before it is computed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvcache import _native, lmc_ops
from kvcache.gpu_connector.base import PagesSpec, registered_once, spans
from kvcache.gpu_connector.interface import Completed, Completion, EventCompletion, Failed
from kvcache.gpu_connector.layerwise import LayerObjs, LayerwiseConnector
from kvcache.gpu_connector.rotary import FusedRotary
from kvcache.gpu_connector.staging import GPUBufferAllocator
from kvcache.gpu_connector.streams import current_stream, mark
from kvcache.gpu_connector.transfer import Chunks


@dataclass
class _Layer:
    """One layer on its way: its buffer, and what its chunks' keys were rotated for."""

    buffer: torch.Tensor
    old_positions: torch.Tensor
    loaded: Completion


class VLLMBufferLayerwiseGPUConnector(LayerwiseConnector):
    """vLLM's pages for blending. Stores as `LayerwiseConnector`, and notes the tokens' positions with the
    objects.

    Memory objects are KV_T2D (KV_MLA_FMT) like all others of this cache; the notes' KV_2TD is not needed,
    since the rotation takes strided keys.

    Args:
        spec: what vLLM declares about its pages.
        fused_rotary_emb: moves keys; None leaves them as they are.
        buffer_limit_bytes: the most that the buffers may take; None for no limit.

    Raises:
        ValueError: joined rows, of which keys could not be told from values.

    Attributes:
        gpu_buffer_allocator: where the two buffers come from; None before `initialize_kvcaches_ptr`.
    """

    def __init__(
        self,
        spec: PagesSpec,
        fused_rotary_emb: FusedRotary | None = None,
        *,
        buffer_limit_bytes: int | None = None,
    ) -> None:
        if getattr(spec, "joined", False):
            raise ValueError(f"{spec} has joined rows; blending needs keys in rows of their own")
        super().__init__(spec)
        self.fused_rotary_emb = fused_rotary_emb
        self.gpu_buffer_allocator: GPUBufferAllocator | None = None
        self._limit = buffer_limit_bytes

    def initialize_kvcaches_ptr(self, *, kvcaches: Sequence[torch.Tensor]) -> None:
        super().initialize_kvcaches_ptr(kvcaches=kvcaches)
        if self.gpu_buffer_allocator is None:
            self.gpu_buffer_allocator = GPUBufferAllocator(kvcaches[0].device, self._limit)

    def batched_from_gpu(
        self,
        memory_objs: Sequence[LayerObjs],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Generator[Completion, None, None]:
        """As `LayerwiseConnector.batched_from_gpu`.

        Args:
            positions: int64, one a token of the slot mapping: what its key was rotated for; None for its
                index.
        """
        generator = super().batched_from_gpu(memory_objs, starts, ends, slot_mapping=slot_mapping, **kwargs)
        positions = _positions(positions, len(slot_mapping))
        for objs in memory_objs:
            for obj, start, end in zip(objs, starts, ends, strict=True):
                obj.remember_positions(positions[start:end].cpu().clone())
        return generator

    def batched_to_gpu(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: torch.Tensor,
        sync: bool = True,
        positions: torch.Tensor | None = None,
        cache_positions: bool = True,
        **kwargs: Any,
    ) -> Generator[Completion, LayerObjs | None, None]:
        """A generator of layers + 2 yields, used as `LayerwiseConnector.batched_to_gpu`.

        Resumed with layer i it writes layer i - 2, computes layer i - 1 and loads layer i; the last `next`
        does what is left. Tokens from the first chunk's start to the last one's end that no chunk holds
        become zeros in their pages.

        Args:
            sync: without meaning here: what is written to the pages is written on the current stream.
            positions: int64, one a token of the slot mapping: where its key shall be; None for its index.
            cache_positions: move keys to their new positions.

        Raises:
            ValueError: at the call: a mapping that is none, chunks that overlap, or not one position a token.
        """
        registered_once(self, kwargs)
        spans([0] * len(starts), starts, ends, slot_mapping)
        plan = _Plan(self, starts, ends, slot_mapping, positions, cache_positions) if starts else None
        return _blend(self.num_layers, plan)


class _Plan:
    """The stages over one set of chunks."""

    def __init__(
        self,
        connector: VLLMBufferLayerwiseGPUConnector,
        starts: Sequence[int],
        ends: Sequence[int],
        slot_mapping: torch.Tensor,
        positions: torch.Tensor | None,
        cache_positions: bool,
    ) -> None:
        self._connector = connector
        self._transfer = connector.transfer
        self._starts, self._ends, self._slots = starts, ends, slot_mapping
        self._first, self._last = min(starts), max(ends)
        self._gaps = _gaps(starts, ends)
        self._new_positions = _positions(positions, len(slot_mapping))[self._first : self._last]
        self._rotary = connector.fused_rotary_emb if cache_positions else None
        self._buffers: list[torch.Tensor] = []
        self._written: list[_native.Event | None] = [None, None]

    def open(self) -> None:
        allocator = self._connector.gpu_buffer_allocator
        assert allocator is not None  # noqa: S101 -- set by the registration that every call has passed
        shape = self._connector.get_shape(self._last - self._first)
        for _ in range(2):
            self._buffers.append(allocator.allocate(shape, self._connector.dtype))

    def close(self) -> None:
        allocator = self._connector.gpu_buffer_allocator
        while self._buffers and allocator is not None:
            allocator.free(self._buffers.pop(), self._transfer.load_stream)

    def load(self, index: int, objs: LayerObjs | None) -> _Layer:
        """Queues the copies of layer `index` into its buffer, once the layer that lies there is written."""
        if objs is None:
            raise ValueError(f"no memory objects were sent for layer {index}")
        chunks = self._connector._chunks(objs, self._starts, self._ends, self._slots, self._connector.fmt)
        buffer, stream = self._buffers[index % 2], self._transfer.load_stream
        row = buffer.stride(0) * buffer.element_size()
        targets = (buffer.data_ptr() + (chunks.starts - self._first) * row).astype(np.uint64)
        sizes = (chunks.ends - chunks.starts) * row
        old = self._new_positions.clone()
        for obj, start, end in zip(objs, self._starts, self._ends, strict=True):
            if obj.cached_positions is not None:
                old[start - self._first : end - self._first] = obj.cached_positions
        if stream is None:
            _native.copy_spans(targets, chunks.addresses, sizes)
            return _Layer(buffer, old, Completed())
        written = self._written[index % 2]
        if written is not None:
            written.order(stream.cuda_stream)
        else:  # the buffer's memory may have had another user on the current stream
            stream.wait_stream(torch.cuda.current_stream(self._transfer.pages.device))
        _native.copy_spans(targets, chunks.addresses, sizes, self._transfer.pages.device, stream.cuda_stream)
        loaded = mark(self._transfer.pages.device, stream.cuda_stream)
        return _Layer(buffer, old, EventCompletion(loaded))

    def compute(self, layer: _Layer) -> None:
        """Moves the layer's keys and zeroes its gaps, on the current stream."""
        layer.loaded.order_current_stream()
        lmc_ops.zero_tokens(layer.buffer, self._gaps)
        if self._rotary is not None and not torch.equal(layer.old_positions, self._new_positions):
            self._rotary(layer.old_positions, self._new_positions, self._keys(layer.buffer, self._rotary))

    def write(self, index: int, layer: _Layer) -> Completion:
        """Copies the buffer into the pages of its tokens, on the current stream."""
        device = self._transfer.pages.device
        stream = 0 if device < 0 else current_stream(device)
        whole: Chunks = spans([layer.buffer.data_ptr()], [self._first], [self._last], self._slots)
        _native.batched_kv_transfer(
            self._transfer.pages,
            *whole.arguments(),
            False,
            layer_begin=index,
            layer_end=index + 1,
            stream=stream,
        )
        if device < 0:
            return Completed()
        written = mark(device, stream)
        self._written[index % 2] = written
        return EventCompletion(written)

    def _keys(self, buffer: torch.Tensor, rotary: FusedRotary) -> torch.Tensor:
        """The part of the buffer that is rotated: keys as [T, H, D]; of MLA latents their last dimensions."""
        if self._connector.kv_planes == 1:
            return buffer[:, None, buffer.shape[-1] - rotary.rotary_size :]
        layout = self._transfer.pages.layout
        return torch.unflatten(buffer[:, 0], -1, (layout.heads, -1))


def _positions(positions: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """One a token of the slot mapping, on the CPU. Raises ValueError for others."""
    if positions is None:
        return torch.arange(tokens)
    if positions.dtype != torch.int64 or list(positions.shape) != [tokens]:
        raise ValueError(
            f"positions {list(positions.shape)} of {positions.dtype}; [{tokens}] of int64, one a token of "
            "the slot mapping, is accepted"
        )
    return positions.cpu()


def _gaps(starts: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges between chunks, from the first one's start on. Raises ValueError for chunks that overlap."""
    ordered = sorted(zip(starts, ends, strict=True))
    gaps, at = [], ordered[0][0]
    for start, end in ordered:
        if start < at:
            raise ValueError(f"a chunk from token {start} overlaps one that ends at {at}")
        if start > at:
            gaps.append((at - ordered[0][0], start - ordered[0][0]))
        at = end
    return gaps


def _blend(num_layers: int, plan: _Plan | None) -> Generator[Completion, LayerObjs | None, None]:
    """The pipeline. After an error nothing more is copied, and the number of yields is the same."""
    last: Completion = Completed()
    layers: dict[int, _Layer] = {}

    def step(index: int, objs: LayerObjs | None) -> Completion:
        if plan is None or last.error is not None:
            return last
        completion = last
        try:
            if index >= 2:
                completion = plan.write(index - 2, layers.pop(index - 2))
            if 1 <= index <= num_layers:
                plan.compute(layers[index - 1])
            if index < num_layers:
                layers[index] = plan.load(index, objs)
        except Exception as error:
            return Failed(error, completion)
        return completion

    try:
        if plan is not None:
            try:
                plan.open()
            except Exception as error:
                last = Failed(error, last)
        for index in range(num_layers):
            objs = yield last
            last = step(index, objs)
        yield last
        for index in (num_layers, num_layers + 1):
            last = step(index, None)
        yield last
    finally:
        if plan is not None:
            plan.close()
