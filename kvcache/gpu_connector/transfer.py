# SPDX-License-Identifier: Apache-2.0
"""Copies between registered pages and chunks: streams, staging rings and their order. All connectors go
through here.

On a GPU events keep the order, the host never waits. A copy starts after whatever the current stream was
given before, which wrote or reads the pages. What the current stream is given after a load sees the loaded
pages (`ordered`). Stored pages must stay as they are until the completion, or until
`Completion.order_current_stream` has put their reading before what the stream is given next: a store must not
hold up a model that does not write there. A staged load's DMA starts at once: only its second half, from the
ring to the pages, waits.

All of this is queued by the caller's thread, except a `feed`: a load that nobody on the model's stream waits
for is handed over slice by slice by another thread.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kvcache import _native
from kvcache.gpu_connector.feed import Feed, Feeder, cut
from kvcache.gpu_connector.interface import Completed, Completion, EventCompletion
from kvcache.gpu_connector.transfer_plan import Chunks, TransferWay, Way

__all__ = ["RING_SLOTS", "RING_SLOT_BYTES", "Chunks", "PageTransfer", "TransferWay", "Way"]

_HIGH_PRIORITY = -1
RING_SLOT_BYTES = 16 << 20
"""Large enough that a DMA's start costs nothing, small enough that the ring fills fast."""
RING_SLOTS = 4
_BLOCKS = 4
"""Multiprocessors of a staged copy where nothing was measured."""


class PageTransfer:
    """Stores and loads of one set of pages.

    Args:
        pages: of all layers.
        ring_slot_bytes: of a staging ring's slots (on a GPU: two rings of `RING_SLOTS` in device memory).

    Attributes:
        store_way: the way of stores, `load_way` that of loads, and `quiet_load_way` that of those that no
            stream waits for (`feed`) and that had better leave the model its multiprocessors;
            `ways.choose_ways` measures and sets them.
        store_stream: where stores are queued, None on the CPU; `load_stream` likewise.
    """

    def __init__(self, pages: _native.Pages, *, ring_slot_bytes: int = RING_SLOT_BYTES) -> None:
        self.pages = pages
        self._ring_slot_bytes = ring_slot_bytes
        self._rings: dict[bool, _native.StagingRing] = {}
        self._feeder = Feeder()
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
            way: None for `load_way`.
            ordered: what the current stream is given next waits for the pages; else the caller sees to it
                (`Completion.order_current_stream`).

        Raises:
            ValueError: as `store`.
        """
        way = self._possible(self.load_way if way is None else way, chunks)
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

    def feed(self, chunks: Chunks) -> Feed:
        """Chunks to pages, all layers, beside the model: the call returns before anything is queued, and no
        stream waits for the pages. Copies start after whatever the current stream was given before the call.

        What `load` raises is the `error` of the feed.
        """
        pages_free = None
        if self.load_stream is not None:
            pages_free = torch.cuda.current_stream(self.pages.device).record_event()
        token_bytes = self.pages.layout.token_bytes * self.pages.num_layers
        feed = Feed(cut(chunks, token_bytes), partial(self._feed_slice, pages_free), self._behind_loads)
        self._feeder.start(feed)
        return feed

    def close(self) -> None:
        """Feeds that were not handed over in full end with an error. What is queued still runs."""
        self._feeder.close()

    def _feed_slice(self, pages_free: torch.cuda.Event | None, part: Chunks) -> Completion:
        """On the feeder's thread, which has no stream of its own."""
        way = self._possible(self.quiet_load_way, part)
        stream = self.load_stream
        if stream is None or pages_free is None:
            self._queue(part, False, way, {}, 0)
            return Completed()
        stream.wait_event(pages_free)
        self._queue(part, False, way, {}, stream.cuda_stream)
        return self._behind_loads()

    def _behind_loads(self) -> Completion:
        """All loads that are queued now. Whoever waits for it sleeps instead of asking again and again."""
        if self.load_stream is None:
            return Completed()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.load_stream.record_event(event)
        return EventCompletion(event)

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
