# SPDX-License-Identifier: Apache-2.0
"""Copies between registered pages and chunks: streams, staging rings and their order. All connectors go
through here.

On a GPU events keep the order, the host never waits. A copy starts after whatever the current stream was
given before, which wrote or reads the pages. What the current stream is given after a load sees the loaded
pages (`ordered`). Stored pages must stay as they are until the completion, or until
`Completion.order_current_stream` has put their reading before what the stream is given next: a store must not
hold up a model that does not write there. A staged load's DMA starts at once: only its second half, from the
ring to the pages, waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache import _native
from kvcache.gpu_connector.interface import Completed, Completion, EventCompletion

_HIGH_PRIORITY = -1
RING_SLOT_BYTES = 16 << 20
"""Large enough that a DMA's start costs nothing, small enough that the ring fills fast."""
RING_SLOTS = 4
_BLOCKS = 4
"""Multiprocessors of a staged copy where nothing was measured."""


class Way(Enum):
    """How bytes cross the link."""

    HOST = "host"
    """Both sides are host memory."""
    STAGED = "staged"
    """Gathered on a few multiprocessors into a ring in device memory, then one DMA; the other way round to
    load.
    """
    DIRECT = "direct"
    """A kernel reads or writes page-locked host memory itself."""
    STRIDED_DMA = "strided_dma"
    """The copy engine walks pages and chunks by itself; no multiprocessor is used."""


@dataclass(frozen=True)
class TransferWay:
    """The way of one direction, and what it reached when it was measured.

    Attributes:
        blocks: thread blocks of a launch: the multiprocessors in use; 0 where no kernel runs.
        bytes_per_s: measured at start-up; 0.0 where nothing was measured.
        link_bytes_per_s: a plain page-locked copy in the same run.
    """

    way: Way
    blocks: int = 0
    bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Chunks:
    """Chunks of memory and their tokens.

    Attributes:
        addresses: uint64, of each chunk.
        starts: int64, each chunk's first index into `slots`.
        ends: int64, one past its last.
        slots: int64, -1 for a token that is left out.
    """

    addresses: npt.NDArray[np.uint64]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]

    def arguments(self) -> tuple[Any, Any, Any, Any]:
        return self.addresses, self.starts, self.ends, self.slots


class PageTransfer:
    """Stores and loads of one set of pages.

    Args:
        pages: of all layers.
        ring_slot_bytes: of a staging ring's slots (on a GPU: two rings of `RING_SLOTS` in device memory).

    Attributes:
        store_way: the way of stores, `load_way` that of loads, and `quiet_load_way` that of loads that no
            stream waits for, which had better leave the model its multiprocessors; `ways.choose_ways`
            measures and sets them.
        store_stream: where stores are queued, None on the CPU; `load_stream` likewise.
    """

    def __init__(self, pages: _native.Pages, *, ring_slot_bytes: int = RING_SLOT_BYTES) -> None:
        self.pages = pages
        self._ring_slot_bytes = ring_slot_bytes
        self._rings: dict[bool, _native.StagingRing] = {}
        self.store_stream: torch.cuda.Stream | None = None
        self.load_stream: torch.cuda.Stream | None = None
        if pages.device < 0:
            self.store_way = self.load_way = self.quiet_load_way = TransferWay(Way.HOST)
            return
        device = torch.device("cuda", pages.device)
        self.store_stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]
        self.load_stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]
        self.store_way = self.load_way = self.quiet_load_way = TransferWay(Way.STAGED, blocks=_BLOCKS)
        for store in (True, False):
            self._ring(store)

    @property
    def path(self) -> str:
        """`cuda` or `host`."""
        return "host" if self.pages.device < 0 else "cuda"

    def store(
        self,
        chunks: Chunks,
        *,
        layer_begin: int = 0,
        layer_end: int | None = None,
        way: TransferWay | None = None,
    ) -> Completion:
        """Pages to chunks.

        Args:
            chunks: where to, resident layout.
            layer_begin: the first layer that the chunks hold.
            layer_end: one past the last, all if None.
            way: None for `store_way`.

        Raises:
            ValueError: chunks outside of the mapping or slots outside of the pages; nothing was written.
        """
        way = self._possible(self.store_way if way is None else way, chunks)
        layers = {"layer_begin": layer_begin, "layer_end": layer_end}
        stream = self.store_stream
        if stream is None:
            self._queue(chunks, True, way, layers, 0)
            return Completed()
        stream.wait_stream(torch.cuda.current_stream(self.pages.device))
        self._queue(chunks, True, way, layers, stream.cuda_stream)
        pages_done = stream.record_event()
        if way.way is not Way.STAGED:
            return EventCompletion(pages_done)
        copied = stream.record_event()
        self._ring(True).record(copied.cuda_event)  # once more, behind the DMAs
        return EventCompletion(copied, pages_done)

    def load(
        self,
        chunks: Chunks,
        *,
        layer_begin: int = 0,
        layer_end: int | None = None,
        way: TransferWay | None = None,
        ordered: bool = True,
    ) -> Completion:
        """Chunks to pages.

        Args:
            chunks: where from, resident layout.
            layer_begin: the first layer that the chunks hold.
            layer_end: one past the last, all if None.
            way: None for `load_way`, or for `quiet_load_way` where not `ordered`.
            ordered: what the current stream is given next waits for the pages; else the caller sees to it
                (`Completion.order_current_stream`).

        Raises:
            ValueError: as `store`.
        """
        measured = self.load_way if ordered else self.quiet_load_way
        way = self._possible(measured if way is None else way, chunks)
        layers = {"layer_begin": layer_begin, "layer_end": layer_end}
        stream = self.load_stream
        if stream is None:
            self._queue(chunks, False, way, layers, 0)
            return Completed()
        stream.wait_stream(torch.cuda.current_stream(self.pages.device))
        self._queue(chunks, False, way, layers, stream.cuda_stream)
        completion = EventCompletion(stream.record_event())
        if ordered:
            completion.order_current_stream()
        return completion

    def _possible(self, way: TransferWay, chunks: Chunks) -> TransferWay:
        """The way, or staging where the chunks are in memory that is not page-locked (yet), which only the
        copy engine reaches. On the CPU all ways but staging are one.
        """
        if way.way is Way.STAGED:
            return way
        if self.pages.device < 0:
            return TransferWay(Way.HOST)
        if _native.device_reaches(chunks.addresses):
            return way
        return TransferWay(Way.STAGED, blocks=_BLOCKS)

    def _queue(
        self, chunks: Chunks, store: bool, way: TransferWay, layers: dict[str, Any], stream: int
    ) -> None:
        arguments = (self.pages, *chunks.arguments(), store)
        if way.way is Way.STAGED:
            self._ring(store).transfer(*arguments, **layers, stream=stream, blocks=way.blocks)
        elif way.way is Way.STRIDED_DMA:
            _native.strided_dma_transfer(*arguments, **layers, stream=stream)
        else:
            _native.batched_kv_transfer(*arguments, **layers, stream=stream, blocks=way.blocks)

    def _ring(self, store: bool) -> _native.StagingRing:
        """One ring a direction, so that a load never queues behind a store. On the CPU made when first asked
        for.
        """
        if store not in self._rings:
            self._rings[store] = _native.StagingRing(self.pages.device, self._ring_slot_bytes, RING_SLOTS)
        return self._rings[store]
