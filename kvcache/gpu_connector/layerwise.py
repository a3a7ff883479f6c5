# SPDX-License-Identifier: Apache-2.0
"""Layerwise connectors: generators that move one layer a step, so that copies run beside the layers'
attention.

Both generators yield the same number of times whatever happens: with nothing to do, and after an error, when
the layers that are left yield `Failed` and are not copied. Closing one early stops it after the layer at
hand. Staging lies in the transfer's rings, whose slots come back by events, so that no path can lose one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from kvcache.gpu_connector.base import PagedConnector, registered_once, spans
from kvcache.gpu_connector.interface import Completed, Completion, Failed
from kvcache.gpu_connector.layout import LayerSpec
from kvcache.gpu_connector.transfer import TransferWay, Way
from kvcache.memory.formats import MemoryFormat
from kvcache.memory.objects import LayerSlice, MemoryObj

LayerObjs = Sequence[MemoryObj | LayerSlice]


class LayerwiseConnector(PagedConnector):
    """Pages to and from memory objects of one layer (KV_T2D, KV_MLA_FMT), among them slices of resident
    objects.

    Args:
        spec: what the engine declares about its pages.
        use_gpu: through the staging ring in device memory, one launch for all chunks of a layer; else a
            kernel writes and reads page-locked memory itself.
    """

    def __init__(self, spec: Any, *, use_gpu: bool = True) -> None:
        super().__init__(spec)
        self.use_gpu = use_gpu

    @property
    def fmt(self) -> MemoryFormat:
        """Of the memory objects."""
        return MemoryFormat.KV_MLA_FMT if self.kv_planes == 1 else MemoryFormat.KV_T2D

    def get_shape(self, num_tokens: int) -> torch.Size:
        """`[T, 2, D]`, or `[T, D]` for MLA and joined rows."""
        return self.fmt.shape(tokens=num_tokens, hidden=self.hidden)

    def from_gpu(
        self,
        memory_obj: MemoryObj | LayerSlice,
        start: int,
        end: int,
        *,
        layer: int,
        slot_mapping: torch.Tensor,
    ) -> Completion:
        """Stores one layer's pages of the tokens `[start, end)`."""
        chunks = self._chunks([memory_obj], [start], [end], slot_mapping, self.fmt)
        return self.transfer.store(chunks, layer_begin=layer, layer_end=layer + 1, way=self._way(True))

    def to_gpu(
        self,
        memory_obj: MemoryObj | LayerSlice,
        start: int,
        end: int,
        *,
        layer: int,
        slot_mapping: torch.Tensor,
    ) -> Completion:
        """Loads one layer's pages of the tokens `[start, end)`."""
        chunks = self._chunks([memory_obj], [start], [end], slot_mapping, self.fmt)
        return self.transfer.load(chunks, layer_begin=layer, layer_end=layer + 1, way=self._way(False))

    def batched_from_gpu(
        self,
        memory_objs: Sequence[LayerObjs],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: torch.Tensor,
        sync: bool = False,
        **kwargs: Any,
    ) -> Generator[Completion, None, None]:
        """A generator that stores a layer a step and yields its completion: layers + 1 times, the last time
        that of all.

        Args:
            memory_objs: `[layer][chunk]`.
            starts: index into the slot mapping of each chunk's first token.
            ends: one past its last.
            slot_mapping: int64, -1 for a token that is left out.
            sync: wait on the host for each layer before the next; needless where completions are used.
            **kwargs: `kvcaches`, as `initialize_kvcaches_ptr`.

        Raises:
            ValueError: at the call: objects that do not fit their tokens or a mapping that is none.
        """
        registered_once(self, kwargs)
        if len(memory_objs) != self.num_layers:
            raise ValueError(f"memory objects of {len(memory_objs)} layers; {self.num_layers} are accepted")
        layers = [self._chunks(objs, starts, ends, slot_mapping, self.fmt) for objs in memory_objs]

        def store(layer: int) -> Completion:
            completion = self.transfer.store(
                layers[layer], layer_begin=layer, layer_end=layer + 1, way=self._way(True)
            )
            if sync:
                completion.wait()
            return completion

        return _stores(self.num_layers, store if starts else None)

    def batched_to_gpu(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: torch.Tensor,
        sync: bool = True,
        **kwargs: Any,
    ) -> Generator[Completion, LayerObjs | None, None]:
        """A generator that takes a layer's objects by `send`, loads them and yields layers + 2 times.

        The first `next` makes it ready; each of the `send`s loads a layer and yields its completion; a last
        `next` yields that of all. Resumed for layer i, it first makes the current stream wait for layer i -
        1, so that the attention which follows sees that layer while layer i is on its way.

        Args:
            starts: as `batched_from_gpu`, like `ends`, `slot_mapping` and `kwargs`.
            sync: False leaves the waiting to the caller (`Completion.order_current_stream`).

        Raises:
            ValueError: at the call: a mapping that is none.
        """
        registered_once(self, kwargs)
        spans([0] * len(starts), starts, ends, slot_mapping)

        def load(layer: int, objs: LayerObjs | None) -> Completion:
            if objs is None:
                raise ValueError(f"no memory objects were sent for layer {layer}")
            chunks = self._chunks(objs, starts, ends, slot_mapping, self.fmt)
            return self.transfer.load(
                chunks, layer_begin=layer, layer_end=layer + 1, way=self._way(False), ordered=False
            )

        return _loads(self.num_layers, load if starts else None, order=sync)

    def _way(self, store: bool) -> TransferWay:
        measured = self.transfer.store_way if store else self.transfer.load_way
        if self.use_gpu:
            return TransferWay(Way.STAGED, measured.blocks or _BLOCKS)
        return TransferWay(Way.DIRECT, _BLOCKS)  # held for as long as the link takes


_BLOCKS = 4
"""Multiprocessors where nothing was measured, or where the measured way uses none."""


def _stores(num_layers: int, store: Callable[[int], Completion] | None) -> Generator[Completion, None, None]:
    last: Completion = Completed()
    for layer in range(num_layers):
        if store is not None and last.error is None:
            try:
                last = store(layer)
            except Exception as error:  # the caller's hook must see this number of steps whatever happens
                last = Failed(error, last)
        yield last
    yield last


def _loads(
    num_layers: int, load: Callable[[int, LayerObjs | None], Completion] | None, *, order: bool
) -> Generator[Completion, LayerObjs | None, None]:
    last: Completion = Completed()
    for layer in range(num_layers):
        objs = yield last
        if order:
            last.order_current_stream()
        if load is not None and last.error is None:
            try:
                last = load(layer, objs)
            except Exception as error:
                last = Failed(error, last)
    yield last
    if order:
        last.order_current_stream()
    yield last


class VLLMPagedMemLayerwiseGPUConnector(LayerwiseConnector):
    """vLLM's pages, layer by layer. See `LayerwiseConnector`.

    Args:
        spec: what vLLM declares about its pages.
        use_gpu: as there.
    """

    def __init__(self, spec: LayerSpec, *, use_gpu: bool = True) -> None:
        super().__init__(spec, use_gpu=use_gpu)
