# SPDX-License-Identifier: Apache-2.0
"""What vLLM's hooks around each layer's attention drive: loads that the model follows layer by layer, and
stores a layer at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Hashable, Sequence

logger = logging.getLogger("vllm.kvcache")

Storer = Generator[None, None, None]
"""`LMCacheEngine.store_layer`: layers + 1 steps."""


class LayerHooks:
    """Which layers' hooks the running forward has called, and whether they may be counted on.

    They may in forwards of a kind of which one has called them all, in order. None come in the replay of a
    full CUDA graph, and those of layers that a second forward of the step runs (drafts) come too late. vLLM
    starts loads before a forward that needs them, and may start those that nobody waits for after it.

    After a forward that was counted on and did not call them all, and may have computed upon unfilled pages,
    none is again: under asynchronous scheduling vLLM may use a token of it before it hears of that.

    Args:
        layer_names: in the order of the model.
    """

    def __init__(self, layer_names: Sequence[str]) -> None:
        self._index = {name: index for index, name in enumerate(layer_names)}
        self._kind: Hashable | None = None
        self._called = 0
        self._proven: set[Hashable] = set()
        self._counted_on = False
        self._broken = False

    def begin(self, kind: Hashable | None) -> None:
        """vLLM starts a step's loads.

        Args:
            kind: of the step's forward; None where it does not run attention layer by layer.
        """
        self._kind = kind

    def count_on(self) -> bool:
        """Whether the hooks of all layers will come from now on, for loads that depend on it."""
        if self._broken or self._kind is None or self._kind not in self._proven:
            return False
        self._counted_on, self._called = True, 0
        return True

    def index(self, layer_name: str) -> int | None:
        """None for a layer without KV of its own."""
        return self._index.get(layer_name)

    def called(self, layer_name: str) -> int | None:
        """The hook before this layer's attention; its index. It may come twice."""
        index = self._index.get(layer_name)
        if index == self._called:
            self._called += 1
        return index

    def end(self) -> bool:
        """The forward is over; whether it called all of them."""
        complete = self._called == len(self._index)
        if self._kind is not None:
            (self._proven.add if complete else self._proven.discard)(self._kind)
        if self._counted_on and not complete:
            self._broken = True
            logger.error(
                "KV cache: a forward (%s) called the hooks of %d layers in order, and has %d; loads are not "
                "followed layer by layer any more",
                self._kind,
                self._called,
                len(self._index),
            )
        self._kind, self._called, self._counted_on = None, 0, False
        return complete


class LayerwiseStores:
    """Generators of the step that runs now.

    Args:
        num_layers: of the rank.
        caught: called with the name of a hook and the error when one request's generator failed.
    """

    def __init__(self, num_layers: int, caught: Callable[[str, Exception], None]) -> None:
        self._num_layers = num_layers
        self._caught = caught
        self.layerwise_storers: list[Storer] = []
        self._stored_layers = 0

    def add(self, storer: Storer) -> None:
        self.layerwise_storers.append(storer)

    def after_layer(self, index: int) -> None:
        """The attention of this layer has written its pages."""
        while self._stored_layers <= index:
            self._stored_layers += 1
            self.layerwise_storers = [storer for storer in self.layerwise_storers if self._step(storer)]

    def finish(self) -> None:
        """The forward is over. What not all layers came for is not stored."""
        complete = self._stored_layers == self._num_layers
        for storer in self.layerwise_storers:
            if complete:
                self._step(storer)
            storer.close()
        self.layerwise_storers = []
        self._stored_layers = 0

    def _step(self, storer: Storer) -> bool:
        try:
            next(storer)
        except Exception as error:
            self._caught("store_layer", error)
            return False
        return True
