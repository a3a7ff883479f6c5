# SPDX-License-Identifier: Apache-2.0
"""What every GPU connector offers, and the handle of copies that are still running."""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from typing import Any

import torch

from kvcache import _native
from kvcache.gpu_connector.streams import current_stream

_POLL_S = 50e-6


class Completion(abc.ABC):
    """Copies that were queued. Thread-safe."""

    error: Exception | None = None
    """Why the copies were not made, or not all; None where they were or will be."""
    first_layers: Sequence[int] = ()
    """Of a load whose layers are waited for one by one: those at which `order_layer` is to be called."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether the copies are complete: their memory may be read, or given away."""

    def queued(self) -> bool:
        """Whether all copies are on a stream: `order_current_stream` puts them before what follows."""
        return self.error is None

    def moved(self, chunks: int) -> int:
        """Of the `chunks` chunks that were to be copied, how many were, from the first on."""
        return chunks if self.error is None else 0

    def wait(self, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds (None: without end); whether the copies are complete."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def order_current_stream(self) -> None:  # noqa: B027 - copies that are complete on return need no order
        """On a GPU: whatever the current stream is given from now on finds the pages as the copies leave
        them: it sees what was loaded, and may write again what was stored.
        """

    def order_layer(self, layer: int) -> None:  # noqa: B027 - as above
        """On a GPU, of a load whose layers are waited for one by one: whatever the current stream is given
        from now on sees the pages of this layer and of those before the next of `first_layers`. Others are
        ordered already, or nobody waits for them.
        """


class Completed(Completion):
    """Copies that were complete when the call returned."""

    def done(self) -> bool:
        return True


class Coded(Completion):
    """A store of coded rows. Chunks from the first one on in which a row has no code count as not copied.

    Args:
        copies: its copies.
        refused: int32 [chunks], not 0 where a row had none, once the copies are complete.
    """

    def __init__(self, copies: Completion, refused: torch.Tensor) -> None:
        self._copies = copies
        self._refused = refused

    def done(self) -> bool:
        return self._copies.done()

    def moved(self, chunks: int) -> int:
        refused = self._refused[:chunks].nonzero()
        first = int(refused[0]) if len(refused) else chunks
        return min(first, self._copies.moved(chunks))

    def wait(self, timeout: float | None = None) -> bool:
        return self._copies.wait(timeout)

    def order_current_stream(self) -> None:
        self._copies.order_current_stream()


class Failed(Completion):
    """Copies that were not made.

    Args:
        error: why.
        after: copies of the same call that were started before and may still run.
    """

    def __init__(self, error: Exception, after: Completion | None = None) -> None:
        self.error = error
        self._after = Completed() if after is None else after

    def done(self) -> bool:
        return self._after.done()

    def order_current_stream(self) -> None:
        self._after.order_current_stream()


class EventCompletion(Completion):
    """Complete when a CUDA event has been reached.

    Args:
        event: after the last copy.
        pages_done: after the last access to the pages, where that is earlier.
    """

    def __init__(self, event: _native.Event, pages_done: _native.Event | None = None) -> None:
        self._event = event
        self._pages_done = event if pages_done is None else pages_done

    def done(self) -> bool:
        return self._event.done()

    def order_current_stream(self) -> None:
        self._pages_done.order(current_stream(self._pages_done.device))

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        self._event.wait()
        return True


class LayeredCompletion(EventCompletion):
    """A load whose layers come in groups. Whoever asks for a layer has asked for all before it.

    Args:
        groups: an event after each group, in the order of the layers.
        first_layers: of each group.
    """

    def __init__(self, groups: Sequence[_native.Event], first_layers: Sequence[int]) -> None:
        super().__init__(groups[-1])
        self.first_layers = first_layers
        self._groups = dict(zip(first_layers, groups, strict=True))

    def order_layer(self, layer: int) -> None:
        event = self._groups.get(layer)
        if event is not None:
            event.order(current_stream(event.device))


class GPUConnectorInterface(abc.ABC):
    """Copies between pages and memory objects.

    `starts` and `ends` are token indices into a slot mapping (int64, on the CPU), one pair for each memory
    object; slot = block x block size + offset, and -1 leaves a token out. Before the first copy,
    `initialize_kvcaches_ptr` names the pages.
    """

    @property
    @abc.abstractmethod
    def num_layers(self) -> int: ...

    @property
    @abc.abstractmethod
    def kv_planes(self) -> int:
        """Rows of a token in a memory object: 2 for its key and its value, 1 for MLA and for joined rows."""

    @property
    @abc.abstractmethod
    def hidden(self) -> int:
        """Elements of a row: of one token's key (heads x head size), of its latent, or of key and value."""

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    @abc.abstractmethod
    def path(self) -> str:
        """Which way the bytes go: `cuda`, `host`, or `none` before `initialize_kvcaches_ptr`."""

    @abc.abstractmethod
    def initialize_kvcaches_ptr(self, *, kvcaches: Sequence[torch.Tensor]) -> None:
        """Takes the pages, one tensor a layer in the order of the layers."""

    @abc.abstractmethod
    def get_shape(self, num_tokens: int) -> torch.Size:
        """The shape that a memory object of `num_tokens` tokens must have."""

    @abc.abstractmethod
    def to_gpu(self, memory_obj: Any, start: int, end: int, *args: Any, **kwargs: Any) -> Any:
        """Copies one object into the pages of the tokens `[start, end)`."""

    @abc.abstractmethod
    def from_gpu(self, memory_obj: Any, start: int, end: int, *args: Any, **kwargs: Any) -> Any:
        """Copies the pages of the tokens `[start, end)` into one object."""

    @abc.abstractmethod
    def batched_to_gpu(self, *args: Any, **kwargs: Any) -> Any:
        """Copies many objects into the pages."""

    @abc.abstractmethod
    def batched_from_gpu(self, *args: Any, **kwargs: Any) -> Any:
        """Copies the pages into many objects."""
