# SPDX-License-Identifier: Apache-2.0
"""The bulk connector in device-neutral torch operations: for Intel GPUs, and for any device that torch
knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcache.gpu_connector.base import spans
from kvcache.gpu_connector.interface import Completed, Completion, GPUConnectorInterface
from kvcache.gpu_connector.layout import LayerSpec, UnknownLayout, describe_layer, token_view
from kvcache.gpu_connector.transfer_plan import SlotMapping
from kvcache.memory.formats import MemoryFormat
from kvcache.memory.objects import MemoryObj


class VLLMGPUConnectorXPU(GPUConnectorInterface):
    """vLLM's pages to and from resident memory objects by indexing alone. Copies are complete when a call
    returns.

    Args:
        spec: what vLLM declares about its pages.
    """

    def __init__(self, spec: LayerSpec) -> None:
        self._spec = spec
        self._views: list[torch.Tensor] = []  # uint8 [B, N, planes, H, head bytes], one a layer

    @property
    def num_layers(self) -> int:
        return len(self._registered())

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
        """`torch`, or `none` before `initialize_kvcaches_ptr`."""
        return "torch" if self._views else "none"

    @property
    def fmt(self) -> MemoryFormat:
        """Of the memory objects."""
        return MemoryFormat.KV_LTD if self.kv_planes == 1 else MemoryFormat.KV_LT2D

    def initialize_kvcaches_ptr(self, *, kvcaches: Sequence[torch.Tensor]) -> None:
        """Takes the pages. Raises UnknownLayout for tensors that are not as declared, or none."""
        if self._spec.coded:
            raise UnknownLayout("this connector moves plain rows; leave out `compression`")
        if not kvcaches:
            raise UnknownLayout("no KV tensors were given; one a layer is accepted")
        for tensor in kvcaches:
            describe_layer(tensor, self._spec)
        self._views = [token_view(tensor, self._spec) for tensor in kvcaches]

    def get_shape(self, num_tokens: int) -> torch.Size:
        """`[L, T, 2, D]`, or `[L, T, D]` for MLA."""
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
        slot_mapping: SlotMapping,
        ordered: bool = True,
    ) -> Completion:
        """Loads the objects into the pages of their tokens. `ordered` has no meaning: the copies are done on
        return.

        Raises:
            ValueError: an object that does not fit its tokens, or a slot outside of the pages; nothing was
                written.
        """
        for obj, slots in self._checked(memory_objs, starts, ends, slot_mapping):
            tokens, blocks, offsets = self._places(slots)
            for layer, view in enumerate(self._views):
                rows = self._rows(obj, layer)[tokens].to(view.device)
                view[blocks, offsets] = rows.view(len(tokens), *view.shape[2:])
        return Completed()

    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        slot_mapping: SlotMapping,
    ) -> Completion:
        """Stores the pages of the tokens into the objects. Raises as `batched_to_gpu`."""
        for obj, slots in self._checked(memory_objs, starts, ends, slot_mapping):
            tokens, blocks, offsets = self._places(slots)
            for layer, view in enumerate(self._views):
                rows = self._rows(obj, layer)
                rows[tokens] = view[blocks, offsets].reshape(len(tokens), -1).to(rows.device)
        return Completed()

    def _registered(self) -> list[torch.Tensor]:
        if not self._views:
            raise RuntimeError("the KV caches are not registered yet; call initialize_kvcaches_ptr first")
        return self._views

    def _checked(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        slot_mapping: SlotMapping,
    ) -> list[tuple[MemoryObj, torch.Tensor]]:
        """Each object with its slots, once all are known to be good."""
        view = self._registered()[0]
        limit = view.shape[0] * view.shape[1]
        spans([0] * len(memory_objs), starts, ends, slot_mapping)
        checked = []
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            slots = torch.as_tensor(slot_mapping)[start:end].cpu()
            shape = self.get_shape(end - start)
            if obj.shape != shape or obj.dtype != self.dtype:
                raise ValueError(
                    f"a memory object {list(obj.shape)} of {obj.dtype} for the tokens {start} to {end}; "
                    f"{list(shape)} of {self.dtype} is accepted"
                )
            bad = ((slots < -1) | (slots >= limit)).nonzero()
            if len(bad):
                at = int(bad[0])
                raise ValueError(
                    f"slot_mapping[{start + at}] is {int(slots[at])}; slots from 0 to {limit - 1} and -1 "
                    "(skip) are "
                    "accepted"
                )
            checked.append((obj, slots))
        return checked

    def _places(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Indices of the tokens that have a slot, their blocks and their offsets in those."""
        view = self._views[0]
        tokens = (slots >= 0).nonzero().flatten()
        kept = slots[tokens]
        return tokens, (kept // view.shape[1]).to(view.device), (kept % view.shape[1]).to(view.device)

    @staticmethod
    def _rows(obj: MemoryObj, layer: int) -> torch.Tensor:
        """uint8 [T, bytes of a token] of one layer; no copy."""
        return obj.layer(layer).view(torch.uint8).view(obj.num_tokens, -1)
