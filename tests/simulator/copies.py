# SPDX-License-Identifier: Apache-2.0
"""Copies that run beside the model, at the worst time that their streams allow.

A copy is carried out as late as possible: what is written meanwhile to the pages that it reads, or to the
memory that it loads from, is what it copies. Only what orders it before something else in CUDA carries it out
earlier, and its completion is seen later still.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvcache import _native
from kvcache.gpu_connector.feed import Feed, cut
from kvcache.gpu_connector.interface import Completed, Completion
from kvcache.gpu_connector.transfer import Chunks, PageTransfer


class Injected(RuntimeError):  # noqa: N818 -- a fault that the simulator puts in
    pass


class Copy(Completion):
    """Copies that were queued."""

    def __init__(self, carry_out: Callable[[], None], polls: int) -> None:
        self._carry_out: Callable[[], None] | None = carry_out
        self._polls_left = polls

    def done(self) -> bool:
        self._polls_left -= 1
        if self._polls_left < 0:
            self.order_current_stream()
        return self._polls_left < 0

    def wait(self, timeout: float | None = None) -> bool:
        self._polls_left = 0
        return self.done()

    def order_current_stream(self) -> None:
        if self._carry_out is not None:
            carry_out, self._carry_out = self._carry_out, None
            carry_out()


class LayeredCopy(Completion):
    """Copies of one load, a group of layers each, in the order of the layers.

    Args:
        groups: by their first layer, in order.
        before_next_kernel: makes the model's next kernel wait for a copy.
    """

    def __init__(self, groups: dict[int, Copy], before_next_kernel: Callable[[Copy], None]) -> None:
        self.first_layers = list(groups)
        self._groups = groups
        self._before_next_kernel = before_next_kernel

    def done(self) -> bool:
        left = [copy for copy in self._groups.values() if not copy.done()]
        return not left

    def order_current_stream(self) -> None:
        for copy in self._groups.values():
            copy.order_current_stream()

    def order_layer(self, layer: int) -> None:
        if layer in self._groups:
            self._before_next_kernel(self._groups[layer])


@dataclass
class Streams:
    """What the transfers of one rank do.

    Args:
        dice: of the simulation.
        behind: copies run beside the model; else they are done when the call returns.
        fails: whether the next copy cannot be made.
        about_to_write: called with the slots of a load.
    """

    dice: random.Random
    behind: bool
    fails: Callable[[], bool]
    about_to_write: Callable[[Sequence[int]], None]
    _before_next_kernel: list[Copy] = field(default_factory=list)

    def kernel(self) -> None:
        """The model's next kernel starts: what its stream waits for is done."""
        waited_for = self._before_next_kernel[:]
        self._before_next_kernel.clear()
        for copy in waited_for:
            copy.order_current_stream()

    def queue_layers(self, carry_out: Sequence[Callable[[], None]]) -> Completion:
        if self.fails():
            raise Injected("a copy")
        if not self.behind:
            for layer in carry_out:
                layer()
            return Completed()
        group = self.dice.randint(1, len(carry_out))
        copies: dict[int, Copy] = {}
        for first in range(0, len(carry_out), group):
            layers = partial(_in_turn, carry_out[first : first + group])
            before = list(copies.values())
            copies[first] = Copy(partial(_after, before, layers), self.dice.choice((0, 0, 1, 2, 5, 15)))
        return LayeredCopy(copies, self._before_next_kernel.append)

    def queue(self, carry_out: Callable[[], None], *, ordered: bool) -> Completion:
        if self.fails():
            raise Injected("a copy")
        if not self.behind:
            carry_out()
            return Completed()
        copy = Copy(carry_out, self.dice.choice((0, 0, 1, 2, 5, 15)))
        if ordered:
            self._before_next_kernel.append(copy)
        return copy


class SimulatedFeed(Feed):
    """The feeding thread gets its turns when somebody looks whether the load is complete."""

    def __init__(self, turns: Callable[[], int], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turns = turns

    def done(self) -> bool:
        for _ in range(self._turns()):
            self.advance()
        return super().done()


class SimulatedTransfer(PageTransfer):
    """The host's copies under the rules of `Streams`. Without any (while the pages are registered), as is."""

    def __init__(self, pages: _native.Pages, **arguments: Any) -> None:
        super().__init__(pages, **arguments)
        self.streams: Streams | None = None

    def store(self, chunks: Chunks, **how: Any) -> Completion:
        host = super().store
        if self.streams is None:
            return host(chunks, **how)
        return self.streams.queue(lambda: _done(host(chunks, **how)), ordered=False)

    def load(self, chunks: Chunks, *, ordered: bool = True, **how: Any) -> Completion:
        host = super().load
        if self.streams is None:
            return host(chunks, **how)
        self._check(chunks)
        return self.streams.queue(lambda: _done(host(chunks, **how)), ordered=ordered)

    def load_by_layer(self, chunks: Chunks) -> Completion:
        host = super().load
        if self.streams is None:
            return super().load_by_layer(chunks)
        self._check(chunks)

        def carry_out(layer: int) -> None:
            part = chunks.from_layer(layer, self.pages.layout.token_bytes)
            _done(host(part, layer_begin=layer, layer_end=layer + 1))

        return self.streams.queue_layers(
            [partial(carry_out, layer) for layer in range(self.pages.num_layers)]
        )

    def feed(self, chunks: Chunks, after: Any = None) -> Feed:
        host, streams = super().load, self.streams
        if streams is None:
            return super().feed(chunks)
        self._check(chunks)

        before: Completion = Completed()

        def hand_over(part: Chunks) -> Completion:
            nonlocal before
            queued_before = before

            def carry_out() -> None:
                queued_before.order_current_stream()  # a stream keeps its order
                _done(host(part))

            before = streams.queue(carry_out, ordered=False)
            return before

        turns = (0, 1, 1, 2)
        return SimulatedFeed(lambda: streams.dice.choice(turns), cut(chunks, 1, 1), hand_over, lambda: before)

    def _check(self, chunks: Chunks) -> None:
        """A load writes what was promised to it, and nothing else."""
        assert self.streams is not None
        for start, end in zip(chunks.starts, chunks.ends, strict=True):
            slots = chunks.slots[start:end]
            self.streams.about_to_write([int(slot) for slot in slots[slots >= 0]])


def _after(before: Sequence[Copy], carry_out: Callable[[], None]) -> None:
    """A stream keeps its order."""
    for copy in before:
        copy.order_current_stream()
    carry_out()


def _in_turn(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _done(completion: Completion) -> None:
    assert completion.done()
