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

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from kvcache import _native
from kvcache.gpu_connector.feed import Feed, Feeder, cut
from kvcache.gpu_connector.interface import Coded, Completed, Completion, EventCompletion, LayeredCompletion
from kvcache.gpu_connector.streams import current_stream, mark
from kvcache.gpu_connector.transfer_plan import Chunks, TransferWay, Way

__all__ = ["RING_SLOTS", "RING_SLOT_BYTES", "Chunks", "PageTransfer", "TransferWay", "Way"]

_HIGH_PRIORITY = -1
RING_SLOT_BYTES = 16 << 20
"""Large enough that a DMA's start costs nothing, small enough that the ring fills fast."""
RING_SLOTS = 4
GROUP_LAYERS = 4
"""Of a load by layer at least so many come at once: a chunk's piece then costs the link nothing (4 MiB of 256
tokens of an 8B model), and the model runs just behind the copies."""
_GROUP_BYTES = 256 << 20
"""And so much, 5 ms of the link, which the model's start takes anyway: in a short load fewer groups are to be
handed over and waited for."""
_TURN = 8
"""Slots of a load that a step waits for until its DMAs change streams: others get in between every 2.4 ms,
for 0.3 % of the rate. A load beside the model changes after every slot, for what waits then are steps of
requests that decode; a store never does: nobody else moves much that way."""
SHORT_LOAD_S = 0.02
"""A load by layer that is no longer has come before vLLM has launched all its model's kernels (16 to 30 ms of
an 8B model, eager), so that the request waits for vLLM's thread, not for the link."""
_EXPANDED_BYTES = 8 << 30
"""Of pages, of which coded rows are expanded in place at once: a step of a model waits some 5 ms for it."""
_BLOCKS = 4
"""Multiprocessors of a staged copy where nothing was measured."""


def way_by_length(size: int, short: TransferWay, other: TransferWay) -> TransferWay:
    """`short` for so few bytes that it moves them within `SHORT_LOAD_S`."""
    return short if size <= short.bytes_per_s * SHORT_LOAD_S else other


def group_layers(tokens: Sequence[int], token_bytes: int, slot_bytes: int, num_layers: int) -> int:
    """Layers that a load by layer brings at once: about as many as `GROUP_LAYERS` and `_GROUP_BYTES` ask for,
    and such that their pieces of a chunk fill a ring's slot.

    Args:
        tokens: of each chunk.
        token_bytes: of a token's KV of one layer in a chunk.
        slot_bytes: of the ring.
        num_layers: in all.
    """
    wanted = max(GROUP_LAYERS, -(-_GROUP_BYTES // max(1, sum(tokens) * token_bytes)))
    least, most = max(GROUP_LAYERS, wanted - wanted // 4), wanted + wanted // 4
    if least >= num_layers:  # a short load's: there is nothing to choose
        return num_layers
    fitting = slot_bytes // max(1, max(tokens, default=0) * token_bytes)
    if wanted >= fitting:  # a slot holds less of a chunk anyway
        return min(wanted, num_layers)
    best = max(range(least, most + 1), key=lambda n: (fitting // n * n, -abs(n - wanted)))
    return min(best, num_layers)


class _Lane:
    """Where copies of one kind queue: a stream, and a staging ring with streams for its DMAs.

    Args:
        device: CUDA's number of it, -1 for host memory.
        slot_bytes: of the ring's `RING_SLOTS` slots, in device memory; on the CPU made when first asked for.
        turn: slots until the ring's DMAs change streams, 0 for never.

    Attributes:
        stream: None on the CPU; `handle` is 0 there.
    """

    def __init__(self, device: int, slot_bytes: int, turn: int) -> None:
        self._make_ring = partial(_native.StagingRing, device, slot_bytes, RING_SLOTS, turn)
        self._ring: _native.StagingRing | None = None
        self.stream: torch.cuda.Stream | None = None
        self.handle = 0
        self._device = device
        if device >= 0:
            place = torch.device("cuda", device)
            self.stream = torch.cuda.Stream(place, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]
            self.handle = int(self.stream.cuda_stream)
            self._ring = self._make_ring()

    @property
    def ring(self) -> _native.StagingRing:
        if self._ring is None:
            self._ring = self._make_ring()
        return self._ring

    def follow_current_stream(self) -> None:
        """On a GPU: what the stream is given next starts after whatever the current one was given so far."""
        mark(self._device, current_stream(self._device)).order(self.handle)


class PageTransfer:
    """Stores and loads of one set of pages.

    Args:
        pages: of all layers.
        ring_slot_bytes: of a staging ring's slots (on a GPU: three rings of `RING_SLOTS` in device memory; in
            that of loads beside the model they are half as large).

    Attributes:
        store_way: the way of stores, `load_way` that of loads, and `quiet_load_way` that of those that no
            stream waits for (`feed`) and that had better leave the model its multiprocessors,
            `short_load_way` that of loads by layer of less than `SHORT_LOAD_S`; `ways.choose_ways` measures
            and sets them.
        store_stream: where stores are queued, None on the CPU; `load_stream` likewise.
    """

    def __init__(self, pages: _native.Pages, *, ring_slot_bytes: int = RING_SLOT_BYTES) -> None:
        self.pages = pages
        self._slot_bytes = ring_slot_bytes
        self._feeder = Feeder(partial(_native.use_device, max(0, pages.device)))
        # One a kind, so that a load queues neither behind a store nor behind a long load beside the model.
        self._stores = _Lane(pages.device, ring_slot_bytes, turn=0)
        self._loads = _Lane(pages.device, ring_slot_bytes, _TURN)
        # The inputs of a model that decodes wait for one slot at most: smaller ones.
        self._quiet_loads = _Lane(pages.device, ring_slot_bytes // 2, turn=1)
        self._coding: deque[tuple[Completion, torch.Tensor]] = deque()
        way = TransferWay(Way.HOST) if pages.device < 0 else TransferWay(Way.STAGED, blocks=_BLOCKS)
        self.store_way = self.load_way = self.short_load_way = self.quiet_load_way = way

    @property
    def store_stream(self) -> torch.cuda.Stream | None:
        return self._stores.stream

    @property
    def load_stream(self) -> torch.cuda.Stream | None:
        return self._loads.stream

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
        if not self.pages.coded:
            return self._store(chunks, way, layers)
        refused = torch.zeros(len(chunks.addresses), dtype=torch.int32, pin_memory=self.pages.device >= 0)
        copies = self._store(chunks, way, {**layers, "refused": refused.data_ptr()})
        # Kernels write there: it lives as long as they run, whoever keeps the completion.
        while self._coding and self._coding[0][0].done():
            self._coding.popleft()
        self._coding.append((copies, refused))
        return Coded(copies, refused)

    def _store(self, chunks: Chunks, way: TransferWay, options: dict[str, Any]) -> Completion:
        lane = self._stores
        if lane.stream is None:
            self._queue(lane, chunks, True, way, options)
            return Completed()
        pages_done, copied = (_native.Event(self.pages.device) for _ in range(2))
        lane.follow_current_stream()
        with self._nothing_runs_after_errors():
            self._queue(lane, chunks, True, way, options)
            pages_done.record(lane.handle)
            if way.way is not Way.STAGED:
                return EventCompletion(pages_done)
            lane.ring.record(copied.handle)  # behind the DMAs
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
        lane = self._loads
        if lane.stream is None:
            self._queue(lane, chunks, False, way, layers)
            return Completed()
        done = _native.Event(self.pages.device)
        lane.follow_current_stream()
        with self._nothing_runs_after_errors():
            self._queue(lane, chunks, False, way, layers)
            done.record(lane.handle)
        completion = EventCompletion(done)
        if ordered:
            completion.order_current_stream()
        return completion

    def load_by_layer(self, chunks: Chunks) -> Completion:
        """Chunks to pages, all layers in their order. What the current stream is given next waits for the
        layers that it is told to (`Completion.order_layer`), so that a model runs while later ones come.

        Raises:
            ValueError: as `load`.
        """
        lane = self._loads
        if lane.stream is None:
            return self.load(chunks)
        token_bytes, num_layers = self.pages.chunk_token_bytes, self.pages.num_layers
        tokens = (chunks.ends - chunks.starts).tolist()
        size = sum(tokens) * token_bytes * num_layers
        way = self._possible(way_by_length(size, self.short_load_way, self.load_way), chunks)
        group = group_layers(tokens, token_bytes, self._slot_bytes, num_layers)
        begins = range(0, num_layers, group)
        events = [_native.Event(self.pages.device) for _ in begins]
        lane.follow_current_stream()
        if way.way is Way.DIRECT:
            # One call, for vLLM's thread waits for it.
            options = {"group_layers": group, "events": [event.handle for event in events]}
            self._queue(lane, chunks, False, way, options)
            return LayeredCompletion(events, begins)
        with self._nothing_runs_after_errors():
            for begin, event in zip(begins, events, strict=True):
                layers = {"layer_begin": begin, "layer_end": min(begin + group, num_layers)}
                self._queue(lane, chunks.from_layer(begin, token_bytes), False, way, layers)
                event.record(lane.handle)
        return LayeredCompletion(events, begins)

    def now(self) -> _native.Event | None:
        """Whatever the current stream was given so far; None on the CPU, where it has run."""
        device = self.pages.device
        return None if device < 0 else mark(device, current_stream(device))

    def feed(self, chunks: Chunks, after: _native.Event | None = None) -> Feed:
        """Chunks to pages, all layers, beside the model: the call returns before anything is queued, and no
        stream waits for the pages.

        What `load` raises is the `error` of the feed.

        Args:
            after: the copies start behind it; `now` if None.
        """
        pages_free = self.now() if after is None else after
        token_bytes = self.pages.chunk_token_bytes * self.pages.num_layers
        slices = _Slices(self, pages_free)
        feed = Feed(cut(chunks, token_bytes), slices.hand_over, slices.settle)
        self._feeder.start(feed)
        return feed

    def close(self) -> None:
        """Feeds that were not handed over in full end with an error. What is queued still runs."""
        self._feeder.close()

    def _behind_feeds(self) -> Completion:
        """All that feeds have queued. Whoever waits for it sleeps instead of asking again and again."""
        if self._quiet_loads.stream is None:
            return Completed()
        with self._nothing_runs_after_errors():
            event = _native.Event(self.pages.device, sleeping=True)
            event.record(self._quiet_loads.handle)
        return EventCompletion(event)

    def _possible(self, way: TransferWay, chunks: Chunks) -> TransferWay:
        """The way, or staging where the chunks are in memory that is not page-locked (yet), which only the
        copy engine reaches. On the CPU a kernel's host twin is in the place of kernels.
        """
        if way.way is Way.STAGED:
            return way
        if self.pages.device < 0:
            return way if way.way is Way.STRIDED_DMA else TransferWay(Way.HOST)
        if _native.device_reaches(chunks.addresses):
            return way
        return TransferWay(Way.STAGED, blocks=_BLOCKS)

    def _queue(
        self, lane: _Lane, chunks: Chunks, store: bool, way: TransferWay, options: dict[str, Any]
    ) -> None:
        self._queue_copies(lane, chunks, store, way, options)
        if way.way is Way.STRIDED_DMA and self.pages.coded:
            self._queue_expansion(lane, chunks, options)

    def _queue_copies(
        self, lane: _Lane, chunks: Chunks, store: bool, way: TransferWay, options: dict[str, Any]
    ) -> None:
        """Of coded rows that the copy engine loads an expansion must follow."""
        arguments = (self.pages, *chunks.arguments(), store)
        with self._nothing_runs_after_errors():
            if way.way is Way.STAGED:
                lane.ring.transfer(*arguments, **options, stream=lane.handle, blocks=way.blocks)
            elif way.way is Way.STRIDED_DMA:
                lane.ring.strided_dma(*arguments, **options, stream=lane.handle)
            else:
                _native.batched_kv_transfer(*arguments, **options, stream=lane.handle, blocks=way.blocks)

    def _queue_expansion(self, lane: _Lane, chunks: Chunks, options: dict[str, Any]) -> None:
        with self._nothing_runs_after_errors():
            _native.expand_in_place(self.pages, *chunks.arguments(), **options, stream=lane.handle)

    @contextlib.contextmanager
    def _nothing_runs_after_errors(self) -> Iterator[None]:
        """The caller gives chunks and pages away then: what was queued, a ring's DMAs too, must have run."""
        try:
            yield
        except Exception:
            if self.pages.device >= 0:
                # A device that cannot even be waited for does nothing any more.
                with contextlib.suppress(Exception):
                    torch.cuda.synchronize(self.pages.device)
            raise


class _Slices:
    """A feed's: their copies, and the expansion of rows that the copy engine has brought in coded. That is
    made when all have come (or `_EXPANDED_BYTES`), by all multiprocessors, since it holds up the step of a
    model that it falls into, and better one than each.

    Args:
        transfer: whose pages are loaded.
        pages_free: the copies start behind it, None for at once.
    """

    def __init__(self, transfer: PageTransfer, pages_free: _native.Event | None) -> None:
        self._transfer = transfer
        self._pages_free = pages_free
        self._coded: list[Chunks] = []
        self._tokens = 0
        self._failed: Exception | None = None

    def hand_over(self, part: Chunks) -> Completion:
        """On the feeder's thread, which has no stream of its own."""
        transfer = self._transfer
        lane, way = transfer._quiet_loads, transfer._possible(transfer.quiet_load_way, part)
        comes_coded = way.way is Way.STRIDED_DMA and transfer.pages.coded
        if not comes_coded:  # its rows must not come between codes
            self._expand()
        if lane.stream is not None and self._pages_free is not None:
            self._pages_free.order(lane.handle)
        transfer._queue_copies(lane, part, False, way, {})
        if comes_coded:
            self._coded.append(part)
            self._tokens += len(part.slots)
        if self._tokens * transfer.pages.layout.token_bytes * transfer.pages.num_layers >= _EXPANDED_BYTES:
            self._expand()
        return transfer._behind_feeds()

    def settle(self) -> Completion:
        """Raises what an expansion raised, however often: none of the feed's chunks counts as loaded then."""
        if self._failed is not None:
            raise self._failed
        self._expand()
        return self._transfer._behind_feeds()

    def _expand(self) -> None:
        # Once, whatever comes of it: elements that were expanded are no codes any more.
        coded, self._coded, self._tokens = self._coded, [], 0
        if not coded:
            return
        try:
            self._transfer._queue_expansion(self._transfer._quiet_loads, Chunks.joined(coded), {})
        except Exception as error:
            self._failed = error
            raise
