# SPDX-License-Identifier: Apache-2.0
"""Loads that no step waits for, handed to the copy stream in slices by a thread of its own.

A CUDA stream takes about a thousand operations that have not run yet; the call that adds one more waits until
there is room, and others that launch something may wait behind it. A staged load has seven operations for
each slot of its ring, 8 MiB, and the copy engine 128 blocks to move for as much, so that whoever hands over
some GiB at once may stand still for most of the copy: were that vLLM's thread, all requests that decode
would. Here a dozen slices at most are under way, and a load that a step does wait for gets in between them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from kvcache.gpu_connector.interface import Completed, Completion
from kvcache.gpu_connector.transfer_plan import Chunks

logger = logging.getLogger("vllm.kvcache")

SLICE_BYTES = 64 << 20
"""Twice the slots of its staging ring: 1.2 ms of a PCIe 5 x16 link, and some 0.1 ms to hand over."""
SLICES_IN_FLIGHT = 4
"""Not done yet: so much that the link does not run dry while the thread waits for its turn (5 ms), so little
that their operations are a tenth of what a stream takes (staged; the copy engine's batches are fewer)."""
LAST_SLICES = 8
"""Of a load, so many more may be under way: 15 ms with those, in which vLLM takes the request of a load whose
copies are all queued into a batch. Some 300 operations a stream."""
_CLOSE_TIMEOUT_S = 5.0


class Feed(Completion):
    """One load. It is complete when no copy of it runs any more, whether all were made or not.

    Args:
        slices: of the load's chunks, in order.
        hand_over: queues the copies of a slice, in the order of the calls.
        settle: called when no slice is left to hand over, and (again) after a call that raised: queues what
            is left to do for those that were, and completes behind all that was queued. Where it raises then,
            no chunk counts as moved. None where nothing is left to do.
    """

    def __init__(
        self,
        slices: Sequence[Chunks],
        hand_over: Callable[[Chunks], Completion],
        settle: Callable[[], Completion] | None = None,
    ) -> None:
        self._slices = deque(slices)
        self._hand_over = hand_over
        self._settle = settle
        self._last: Completion = Completed()
        self._chunks = 0
        self._ended = threading.Event()
        if not self._slices:
            self._ended.set()

    @property
    def slices_left(self) -> int:
        """Not handed over yet."""
        return len(self._slices)

    def advance(self) -> Completion | None:
        """Hands the next slice over; None when there is none, or none any more after an error. One thread."""
        if self._ended.is_set():
            return None
        part = self._slices.popleft()
        try:
            self._last = self._hand_over(part)
            if not self._slices and self._settle is not None:
                self._last = self._settle()
        except Exception as error:
            self.stop(error)
            return None
        self._chunks += len(part.addresses)
        if not self._slices:
            self._ended.set()
        return self._last

    def stop(self, error: Exception) -> None:
        """What was not handed over is not. Of the thread that advances."""
        if self._ended.is_set():
            return
        self.error = error
        # The pages will be written by others: whatever a call queued before it raised must have run.
        if self._settle is not None:
            try:
                self._last = self._settle()
            except Exception as problem:
                self._chunks = 0
                if problem is not error:
                    logger.exception("KV cache: what came of a broken load is not good either")
        self._slices.clear()
        self._ended.set()

    def queued(self) -> bool:
        return self._ended.is_set() and self.error is None

    def moved(self, chunks: int) -> int:
        return min(chunks, self._chunks)

    def done(self) -> bool:
        return self._ended.is_set() and self._last.done()

    def order_current_stream(self) -> None:
        """Waits until all is handed over."""
        self._ended.wait()
        self._last.order_current_stream()


class Feeder:
    """The thread that advances feeds, one after the other in the order of their start.

    Args:
        begin: called by the thread first.
    """

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        self._begin = begin
        self._queue: SimpleQueue[Feed | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, feed: Feed) -> None:
        """Returns at once. After `close` the feed ends with an error."""
        if self._closed:
            feed.stop(RuntimeError("the engine is closed"))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvcache loads", daemon=True)
            self._thread.start()
        self._queue.put(feed)

    def close(self) -> None:
        """No further slice is handed over: the feeds that are left end with an error. Idempotent."""
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        self._begin()
        in_flight: deque[Completion] = deque()
        while (feed := self._queue.get()) is not None:
            try:
                self._feed(feed, in_flight)
            except Exception as error:  # of a wait: the device has failed
                logger.exception("KV cache: a load could not be followed")
                in_flight.clear()
                feed.stop(error)

    def _feed(self, feed: Feed, in_flight: deque[Completion]) -> None:
        while not self._closed and (part := feed.advance()) is not None:
            in_flight.append(part)
            most = SLICES_IN_FLIGHT + (LAST_SLICES if feed.slices_left <= LAST_SLICES else 0)
            while len(in_flight) >= most:
                in_flight.popleft().wait()
        if self._closed:
            feed.stop(RuntimeError("the engine is closing"))


def cut(chunks: Chunks, token_bytes: int, slice_bytes: int = SLICE_BYTES) -> list[Chunks]:
    """Slices of whole chunks, in order, each as small as it can be from `slice_bytes` on.

    Args:
        token_bytes: of a token's KV in all layers.
    """
    slices, first, size = [], 0, 0
    for at, (start, end) in enumerate(zip(chunks.starts, chunks.ends, strict=True), start=1):
        size += int(end - start) * token_bytes
        if size >= slice_bytes or at == len(chunks.starts):
            slices.append(chunks.part(first, at))
            first, size = at, 0
    return slices
