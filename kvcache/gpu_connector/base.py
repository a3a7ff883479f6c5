# SPDX-License-Identifier: Apache-2.0
"""What the connectors over native transfers share: registration of the pages and checks of the memory
objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvcache import _native
from kvcache.gpu_connector.interface import GPUConnectorInterface
from kvcache.gpu_connector.layout import UnknownLayout
from kvcache.gpu_connector.transfer import Chunks, PageTransfer
from kvcache.gpu_connector.transfer_plan import SlotMapping
from kvcache.gpu_connector.ways import choose_ways
from kvcache.memory.formats import MemoryFormat
from kvcache.memory.objects import LayerSlice, MemoryObj


class PagesSpec(Protocol):
    """What an engine declares about its pages (`layout.LayerSpec`, `sglang.PoolSpec`)."""

    @property
    def planes(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def register(self, kvcaches: Sequence[torch.Tensor]) -> _native.Pages:
        """The pages, read off the tensors and verified. Raises UnknownLayout."""


class PagedConnector(GPUConnectorInterface):
    """Base of the connectors that move pages with the native module.

    Args:
        spec: what the engine declares about its pages.
    """

    _codes = False
    """Whether it takes pages whose chunks hold coded rows: it must look which were refused then."""

    def __init__(self, spec: PagesSpec) -> None:
        self._spec = spec
        self._transfer: PageTransfer | None = None
        self._registered: list[int] = []
        self._fitting: tuple[object, ...] | None = None
        """What the last memory object was that fits the pages, whatever its tokens."""

    @property
    def transfer(self) -> PageTransfer:
        """Raises RuntimeError before `initialize_kvcaches_ptr`."""
        if self._transfer is None:
            raise RuntimeError("the KV caches are not registered yet; call initialize_kvcaches_ptr first")
        return self._transfer

    @property
    def num_layers(self) -> int:
        return self.transfer.pages.num_layers

    @property
    def kv_planes(self) -> int:
        return self._spec.planes

    @property
    def hidden(self) -> int:
        """Elements of a row in a chunk: of a coded one its bytes."""
        coded = self._coded
        return self._spec.hidden if coded is None else coded.chunk_row_bytes

    @property
    def dtype(self) -> torch.dtype:
        """Of a chunk's elements."""
        return self._spec.dtype if self._coded is None else torch.uint8

    @property
    def _coded(self) -> _native.Pages | None:
        pages = None if self._transfer is None else self._transfer.pages
        return pages if pages is not None and pages.coded else None

    @property
    def path(self) -> str:
        return "none" if self._transfer is None else self._transfer.path

    def initialize_kvcaches_ptr(self, *, kvcaches: Sequence[torch.Tensor]) -> None:
        """Takes the pages, checks a write and a read of each through the native path, and on a GPU measures
        the ways across the link. Nothing may use the pages meanwhile; they hold afterwards what they held
        before.

        Registering the same tensors again changes nothing.

        Raises:
            UnknownLayout: the tensors cannot be copied safely, or chunks are to hold coded rows, which this
                connector does not take.
            RuntimeError: they are on a GPU that this build does not serve.
        """
        addresses = [tensor.data_ptr() for tensor in kvcaches]
        if self._transfer is not None and addresses == self._registered:
            return
        if kvcaches and kvcaches[0].is_cuda and not _native.cuda_available():
            raise RuntimeError(
                f"the KV caches are on {kvcaches[0].device}, but {_native.cuda_unavailable_reason()}"
            )
        pages = self._spec.register(kvcaches)
        self._check_code(pages)
        transfer = PageTransfer(pages)
        choose_ways(transfer)
        self._take(transfer, addresses)

    def share_pages(self, other: PagedConnector) -> None:
        """Takes the pages, ways and rings of a connector that has registered them.

        Raises:
            UnknownLayout: their chunks hold coded rows, which this connector does not take.
        """
        self._check_code(other.transfer.pages)
        self._take(other.transfer, list(other._registered))

    def _take(self, transfer: PageTransfer, registered: list[int]) -> None:
        self._transfer, self._registered, self._fitting = transfer, registered, None

    def _check_code(self, pages: _native.Pages) -> None:
        if pages.coded and not self._codes:
            raise UnknownLayout(
                f"chunks of these pages hold coded rows; {type(self).__name__} takes plain ones, leave out "
                "`compression`"
            )

    def _chunks(
        self,
        memory_objs: Sequence[MemoryObj | LayerSlice],
        starts: Sequence[int],
        ends: Sequence[int],
        slot_mapping: SlotMapping,
        fmt: MemoryFormat,
    ) -> Chunks:
        """The objects' addresses and tokens, once every object is known to be of `fmt` and to fit its
        tokens.
        """
        _check_counts(len(memory_objs), starts, ends)
        fitting = self._fitting
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            kind = type(obj), obj.kv_shape, fmt
            if kind == fitting and obj.num_tokens == end - start:  # as the one before it, and so mostly all
                continue
            shape = fmt.shape(tokens=max(end - start, 0), hidden=self.hidden, layers=self.num_layers)
            if obj.fmt is not fmt or obj.shape != shape or obj.dtype != self.dtype:
                raise ValueError(
                    f"a memory object {obj.fmt.name} {list(obj.shape)} of {obj.dtype} for the tokens "
                    f"{start} to "
                    f"{end}; {fmt.name} {list(shape)} of {self.dtype} is accepted"
                )
            self._fitting = fitting = kind
        return spans([obj.data_ptr for obj in memory_objs], starts, ends, slot_mapping)


def spans(
    addresses: Sequence[int], starts: Sequence[int], ends: Sequence[int], slot_mapping: SlotMapping
) -> Chunks:
    """Chunks over a slot mapping.

    Raises:
        ValueError: a slot mapping that is not int64 with one dimension or does not reach as far as a chunk,
            or not as many addresses, starts and ends.
    """
    _check_counts(len(addresses), starts, ends)
    slots = _array(slot_mapping)
    for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if not 0 <= start <= end <= len(slots):
            raise ValueError(f"chunk {at} spans tokens {start} to {end}; the slot mapping has {len(slots)}")
    return Chunks(
        addresses=np.array(addresses, dtype=np.uint64),
        starts=np.array(starts, dtype=np.int64),
        ends=np.array(ends, dtype=np.int64),
        slots=slots,
    )


def _array(slot_mapping: SlotMapping) -> npt.NDArray[np.int64]:
    """Contiguous."""
    if not isinstance(slot_mapping, np.ndarray | torch.Tensor):
        raise ValueError(
            f"a slot mapping is a {type(slot_mapping).__name__}; a tensor or an array of int64 is accepted"
        )
    is_array = isinstance(slot_mapping, np.ndarray)
    if slot_mapping.dtype != (np.int64 if is_array else torch.int64) or slot_mapping.ndim != 1:
        raise ValueError(
            f"a slot mapping of {slot_mapping.dtype} with {slot_mapping.ndim} dimensions; int64 with one "
            "is accepted"
        )
    if isinstance(slot_mapping, torch.Tensor):
        slot_mapping = slot_mapping.cpu().numpy()
    return np.ascontiguousarray(slot_mapping)


def _check_counts(chunks: int, starts: Sequence[int], ends: Sequence[int]) -> None:
    if not chunks == len(starts) == len(ends):
        raise ValueError(
            f"{chunks} memory objects, {len(starts)} starts and {len(ends)} ends; as many are accepted"
        )


def layer_slices(memory_objs: Sequence[MemoryObj], num_layers: int) -> list[list[LayerSlice]]:
    """Resident objects as the layerwise connectors take them: `[layer][chunk]`, no copy."""
    return [[obj.slice(layer) for obj in memory_objs] for layer in range(num_layers)]


def registered_once(connector: PagedConnector, kwargs: dict[str, Any]) -> None:
    """The notes pass `kvcaches` with every call: takes them where they come."""
    kvcaches = kwargs.pop("kvcaches", None)
    if kvcaches is not None:
        connector.initialize_kvcaches_ptr(kvcaches=kvcaches)
    if kwargs:
        raise TypeError(f"unknown arguments {', '.join(sorted(kwargs))}; kvcaches is accepted")
