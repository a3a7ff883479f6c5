# SPDX-License-Identifier: Apache-2.0
"""The bulk connector: all layers of all chunks of a call in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvcache import _native
from kvcache.gpu_connector.interface import Completed, Completion, EventCompletion, GPUConnectorInterface
from kvcache.gpu_connector.layout import LayerSpec, describe_layers, verify_layout
from kvcache.memory.formats import MemoryFormat
from kvcache.memory.objects import MemoryObj

_HIGH_PRIORITY = -1


class VLLMPagedMemGPUConnectorV2(GPUConnectorInterface):
    """vLLM's pages, whatever their layout, to and from resident memory objects (KV_LT2D, KV_LTD for MLA).

    On a GPU copies are queued: stores on `store_stream`, loads on `load_stream`. Both first wait for the
    current stream, which wrote or read the pages; the current stream waits for a load unless told otherwise,
    so that whatever it is given afterwards sees the loaded pages. It does not wait for stores: pages must
    stay as they are until the store's completion is done, or was put before the stream's next work
    (`order_current_stream`). On the CPU copies are complete when the call returns.

    Args:
        spec: what the engine declares about its pages.
    """

    def __init__(self, spec: LayerSpec) -> None:
        self._spec = spec
        self._pages: _native.Pages | None = None
        self._fmt = MemoryFormat.KV_LTD if spec.use_mla else MemoryFormat.KV_LT2D
        self.store_stream: torch.cuda.Stream | None = None
        self.load_stream: torch.cuda.Stream | None = None

    @property
    def pages(self) -> _native.Pages:
        """Raises RuntimeError before `initialize_kvcaches_ptr`."""
        if self._pages is None:
            raise RuntimeError("the KV caches are not registered yet; call initialize_kvcaches_ptr first")
        return self._pages

    @property
    def num_layers(self) -> int:
        return self.pages.num_layers

    @property
    def kv_planes(self) -> int:
        return self._spec.planes

    @property
    def hidden(self) -> int:
        return self._spec.hidden

    @property
    def dtype(self) -> torch.dtype:
        return self._spec.dtype

    @property
    def path(self) -> str:
        if self._pages is None:
            return "none"
        return "host" if self._pages.device < 0 else "cuda"

    def initialize_kvcaches_ptr(self, *, kvcaches: Sequence[torch.Tensor]) -> None:
        """Takes the pages, one tensor a layer, and checks a write and a read of each through the native path.

        Raises:
            UnknownLayout: the tensors cannot be copied safely.
            RuntimeError: they are on a GPU that this build does not serve.
        """
        pages = describe_layers(kvcaches, self._spec)
        device = kvcaches[0].device
        if pages.device >= 0 and not _native.cuda_available():
            raise RuntimeError(f"the KV caches are on {device}, but {_native.cuda_unavailable_reason()}")
        for tensor in kvcaches:
            verify_layout(tensor, self._spec)
        if pages.device >= 0:
            self.store_stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]
            self.load_stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]
        self._pages = pages

    def get_shape(self, num_tokens: int) -> torch.Size:
        """`[L, T, 2, D]`, or `[L, T, D]` for MLA."""
        return self._fmt.shape(tokens=num_tokens, hidden=self.hidden, layers=self.num_layers)

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
        ordered: bool = True,
    ) -> Completion:
        """Loads the objects into the pages of their tokens; `ordered`: the current stream waits for that.

        Raises:
            ValueError: an object that does not fit its tokens, or a slot outside of the pages; nothing was
                written.
        """
        arguments = self._arguments(memory_objs, starts, ends, slot_mapping)
        if self.load_stream is None:
            _native.batched_kv_transfer(self.pages, *arguments, False)
            return Completed()
        current = torch.cuda.current_stream(self.pages.device)
        self.load_stream.wait_stream(current)
        _native.batched_kv_transfer(self.pages, *arguments, False, stream=self.load_stream.cuda_stream)
        event = self.load_stream.record_event()
        if ordered:
            current.wait_event(event)
        return EventCompletion(event)

    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: torch.Tensor,
    ) -> Completion:
        """Stores the pages of the tokens into the objects.

        Raises:
            ValueError: as `batched_to_gpu`.
        """
        arguments = self._arguments(memory_objs, starts, ends, slot_mapping)
        if self.store_stream is None:
            _native.batched_kv_transfer(self.pages, *arguments, True)
            return Completed()
        current = torch.cuda.current_stream(self.pages.device)
        self.store_stream.wait_stream(current)
        _native.batched_kv_transfer(self.pages, *arguments, True, stream=self.store_stream.cuda_stream)
        return EventCompletion(self.store_stream.record_event())

    def _arguments(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        slot_mapping: torch.Tensor,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Addresses, starts, ends and slots, once every object is known to fit its tokens."""
        if not len(memory_objs) == len(starts) == len(ends):
            raise ValueError(
                f"{len(memory_objs)} memory objects, {len(starts)} starts and {len(ends)} ends; as many "
                "are accepted"
            )
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            shape, fmt = obj.metadata.shape, obj.metadata.fmt
            if (
                fmt is not self._fmt
                or shape != self.get_shape(end - start)
                or obj.metadata.dtype != self.dtype
            ):
                raise ValueError(
                    f"a memory object {fmt.name} {list(shape)} of {obj.metadata.dtype} for the tokens "
                    f"{start} to {end}; "
                    f"{self._fmt.name} {list(self.get_shape(max(end - start, 0)))} of {self.dtype} is "
                    "accepted"
                )
        if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1:
            raise ValueError(
                f"a slot mapping of {slot_mapping.dtype} with {slot_mapping.dim()} dimensions; int64 with "
                "one is accepted"
            )
        return (
            np.array([obj.data_ptr for obj in memory_objs], dtype=np.uint64),
            np.array(starts, dtype=np.int64),
            np.array(ends, dtype=np.int64),
            slot_mapping.cpu().contiguous().numpy(),
        )
