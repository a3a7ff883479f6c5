# SPDX-License-Identifier: Apache-2.0
"""One step's loads and stores layer by layer, driven by vLLM's hooks around each layer's attention."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch

Loader = Generator[torch.Tensor | None, None, None]
"""`LMCacheEngine.retrieve_layer`: layers + 2 steps, the last of which is the mask of what was loaded."""
Storer = Generator[None, None, None]
"""`LMCacheEngine.store_layer`: layers + 1 steps."""


class LayerwiseStep:
    """Generators of the step that runs now. Layers are told by name, so that a hook that comes twice, or for
    a layer without KV of its own, moves nothing.

    Args:
        layer_names: in the order of the model.
        caught: called with the name of a hook and the error when one request's generator failed.
    """

    def __init__(self, layer_names: Sequence[str], caught: Callable[[str, Exception], None]) -> None:
        self._index = {name: index for index, name in enumerate(layer_names)}
        self._caught = caught
        self.layerwise_retrievers: list[tuple[Loader, Callable[[torch.Tensor | None], None]]] = []
        self.layerwise_storers: list[Storer] = []
        self._loaded_layers = 0
        self._stored_layers = 0

    def __contains__(self, name: object) -> bool:
        """Whether it is one of the layers."""
        return name in self._index

    @property
    def num_layers(self) -> int:
        return len(self._index)

    def add_load(self, loader: Loader, done: Callable[[torch.Tensor | None], None]) -> None:
        """Starts a load: its first layer is on its way when this returns.

        Args:
            loader: not started.
            done: called once with the mask of what was loaded before each layer's attention, or None.
        """
        try:
            next(loader)
            next(loader)
        except Exception as error:
            self._caught("retrieve_layer", error)
            done(None)
            return
        self.layerwise_retrievers.append((loader, done))

    def add_store(self, storer: Storer) -> None:
        self.layerwise_storers.append(storer)

    def before_layer(self, name: str) -> None:
        """The attention of this layer runs next: its pages must be there, and the next layer's copy
        starts."""
        index = self._index.get(name)
        while index is not None and self._loaded_layers <= index:
            self._loaded_layers += 1
            self._advance_loads(last=self._loaded_layers == self.num_layers)

    def after_layer(self, name: str) -> None:
        """The attention of this layer has written its pages."""
        index = self._index.get(name)
        while index is not None and self._stored_layers <= index:
            self._stored_layers += 1
            self._advance_stores()

    def finish(self) -> None:
        """The forward is over. A load that not every layer waited for came too late: the model read pages
        that were not filled.
        """
        for loader, done in self.layerwise_retrievers:
            loader.close()
            done(None)
        complete = self._stored_layers == self.num_layers
        for storer in self.layerwise_storers:
            if complete:
                self._step(storer)
            storer.close()
        self.layerwise_retrievers, self.layerwise_storers = [], []
        self._loaded_layers = self._stored_layers = 0

    def _advance_loads(self, *, last: bool) -> None:
        going = []
        for loader, done in self.layerwise_retrievers:
            try:
                mask = next(loader)
            except Exception as error:
                self._caught("retrieve_layer", error)
                done(None)
                continue
            if last:
                loader.close()
                done(mask)
            else:
                going.append((loader, done))
        self.layerwise_retrievers = going

    def _advance_stores(self) -> None:
        self.layerwise_storers = [storer for storer in self.layerwise_storers if self._step(storer)]

    def _step(self, storer: Storer) -> bool:
        try:
            next(storer)
        except Exception as error:
            self._caught("store_layer", error)
            return False
        return True
