# SPDX-License-Identifier: Apache-2.0
"""The bulk connector: all layers of all chunks of a call in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcache import _native
from kvcache.gpu_connector.base import PagedConnector, registered_once
from kvcache.gpu_connector.interface import Completion
from kvcache.gpu_connector.layout import LayerSpec
from kvcache.gpu_connector.transfer_plan import SlotMapping
from kvcache.memory.formats import MemoryFormat
from kvcache.memory.objects import MemoryObj


class BulkConnector(PagedConnector):
    """Pages to and from resident memory objects (KV_LT2D; KV_LTD for MLA and joined rows), all layers at
    once.

    On a GPU copies are queued: stores on `store_stream`, loads on `load_stream`, those beside the model on a
    stream of their own, in the order that `kvcache.gpu_connector.transfer` describes. On the CPU they are
    complete when the call returns.
    """

    @property
    def fmt(self) -> MemoryFormat:
        """Of the memory objects."""
        return MemoryFormat.KV_LTD if self.kv_planes == 1 else MemoryFormat.KV_LT2D

    @property
    def store_stream(self) -> torch.cuda.Stream | None:
        """None on the CPU."""
        return self.transfer.store_stream

    @property
    def load_stream(self) -> torch.cuda.Stream | None:
        """None on the CPU."""
        return self.transfer.load_stream

    def get_shape(self, num_tokens: int) -> torch.Size:
        """`[L, T, 2, D]`, or `[L, T, D]` for MLA and joined rows."""
        return self.fmt.shape(tokens=num_tokens, hidden=self.hidden, layers=self.num_layers)

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> Completion:
        return self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> Completion:
        return self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: torch.Tensor,
        **kwargs: Any,
    ) -> Completion:
        """Loads the objects into the pages of their tokens; what the current stream is given next waits for
        them.

        Args:
            memory_objs: resident objects.
            starts: index into the slot mapping of each object's first token.
            ends: one past its last.
            slot_mapping: int64, -1 for a token whose page is left as it is.
            **kwargs: `kvcaches`, as `initialize_kvcaches_ptr`.

        Raises:
            ValueError: an object that does not fit its tokens, or a slot outside of the pages; nothing was
                written.
        """
        registered_once(self, kwargs)
        chunks = self._chunks(memory_objs, starts, ends, slot_mapping, self.fmt)
        return self.transfer.load(chunks)

    def layers_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: SlotMapping,
    ) -> Completion:
        """As `batched_to_gpu`, but the current stream waits for layers one by one, when it is told to
        (`Completion.order_layer`).
        """
        return self.transfer.load_by_layer(self._chunks(memory_objs, starts, ends, slot_mapping, self.fmt))

    def feed_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: SlotMapping,
        after: _native.Event | None = None,
    ) -> Completion:
        """As `batched_to_gpu`, but beside the model (`PageTransfer.feed`). An object that does not fit its
        tokens raises; whatever else fails is the completion's `error`.
        """
        return self.transfer.feed(self._chunks(memory_objs, starts, ends, slot_mapping, self.fmt), after)

    def close(self) -> None:
        """Ends what `feed_to_gpu` has not handed over yet, with an error."""
        if self._transfer is not None:
            self._transfer.close()

    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: torch.Tensor,
        **kwargs: Any,
    ) -> Completion:
        """Stores the pages of the tokens into the objects. The pages must stay as they are until the
        completion, or until its `order_current_stream` has put their reading before what the current stream
        is given next.

        The arguments and errors are those of `batched_to_gpu`.
        """
        registered_once(self, kwargs)
        chunks = self._chunks(memory_objs, starts, ends, slot_mapping, self.fmt)
        return self.transfer.store(chunks)


class VLLMPagedMemGPUConnectorV2(BulkConnector):
    """vLLM's pages, whatever their layout. See `BulkConnector`.

    Args:
        spec: what vLLM declares about its pages.
    """

    _codes = True

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
