# SPDX-License-Identifier: Apache-2.0
"""What a load without end costs the products of matrices that a decoding step consists of.

Unlike a large product these read each weight once for a few requests, so that they are bound by the same
memory that a load writes to.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvcache.bench.shapes import LLAMA_8B
from kvcache.bench.transfer import Bench
from kvcache.gpu_connector.transfer import TransferWay, Way
from kvcache.gpu_connector.ways import BLOCKS

_REQUESTS = 16
_STEPS = 120
_WARM_UP_S = 0.15
"""So long a load runs before anything is measured."""
_WEIGHTS = {"cuda": (32, 4096, 14336), "cpu": (2, 128, 448)}
"""Layers, hidden and intermediate size: Llama-3.1-8B's, and something small to try the bench itself."""


@dataclass(frozen=True)
class BesideDecoding:
    """One way. Rates in GB/s (1e9 bytes), times in ms."""

    coded: bool
    """Chunks held coded rows: the rate is of the pages."""
    way: str
    blocks: int
    load_rate: float
    """Of the loads meanwhile."""
    step_ms: float
    """All products of a step, alone: the mean of before and after."""
    busy_ms: float
    """The same beside the loads."""
    loss: float
    """How much longer they take, as a share."""


def decoding_results(device: torch.device, total_bytes: int = 512 << 20) -> Iterator[BesideDecoding]:
    """Plain copies to the device, then loads as the connector makes them beside a model: of chunks that are
    as vLLM's pages, and of coded rows."""
    step = _step(device)
    for coded in (False, True):
        shape = replace(LLAMA_8B, axes="LBNHC", coded=coded)
        yield from _beside(step, Bench.of(shape, device, total_bytes))


def _beside(step: Callable[[], object], bench: Bench) -> Iterator[BesideDecoding]:
    device, coded, chunks = bench.device, bench.shape.coded, bench.chunks(256)
    ways = [TransferWay(Way.HOST)]
    if device.type == "cuda":
        ways = [TransferWay(Way.STAGED, blocks) for blocks in BLOCKS] + [TransferWay(Way.DIRECT, 4)]
        ways.append(TransferWay(Way.STRIDED_DMA))
    bench.transfer.store(chunks).wait()

    def fed(way: TransferWay) -> None:
        bench.transfer.quiet_load_way = way
        bench.transfer.feed(chunks).wait()

    loads: list[tuple[str, int, Callable[[], None]]] = []
    if not coded:
        loads.append(("plain", 0, partial(_plain, bench)))
    loads += [(way.way.value, way.blocks, partial(fed, way)) for way in ways]
    before = _step_ms(step, device)
    for name, blocks, load in loads:
        with _without_end(load, device) as rounds:
            first, start = rounds[0], time.perf_counter()
            busy = _step_ms(step, device)
            while rounds[0] == first:  # one round at least
                time.sleep(0.001)
            rate = (rounds[0] - first) * bench.memory.nbytes / (time.perf_counter() - start)
        after = _step_ms(step, device)
        alone = (before + after) / 2
        yield BesideDecoding(
            coded=coded,
            way=name,
            blocks=blocks,
            load_rate=rate / 1e9,
            step_ms=alone,
            busy_ms=busy,
            loss=busy / alone - 1,
        )
        before = after


def _plain(bench: Bench) -> None:
    if bench.device.type == "cpu":
        bench.plain_copy(store=False)
        return
    bench.plain_copy(store=False)
    torch.cuda.current_stream(bench.device).synchronize()


def _step(device: torch.device) -> Callable[[], object]:
    """The products of one step in all layers; on a GPU one graph, as vLLM replays it."""
    layers, hidden, between = _WEIGHTS[device.type]
    shapes = ((hidden * 3 // 2, hidden), (hidden, hidden), (2 * between, hidden), (hidden, between))
    weights = [
        torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(layers) for shape in shapes
    ]
    inputs = {
        size: torch.randn(_REQUESTS, size, device=device, dtype=torch.bfloat16) for size in (hidden, between)
    }

    def products() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    if device.type == "cpu":
        return products
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        products()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    return _Replay(graph, (weights, inputs))


@dataclass(frozen=True)
class _Replay:
    graph: torch.cuda.CUDAGraph
    operands: object
    """What the graph reads: it does not keep that alive."""

    def __call__(self) -> None:
        self.graph.replay()


def _step_ms(step: Callable[[], object], device: torch.device) -> float:
    """Milliseconds from the end of one step to the end of the next, median."""
    if device.type == "cpu":
        times = [time.perf_counter()]
        for _ in range(_STEPS):
            step()
            times.append(time.perf_counter())
        return 1e3 * statistics.median(b - a for a, b in itertools.pairwise(times))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_STEPS)]  # type: ignore[no-untyped-call]
    for event in events:
        step()
        event.record()
    events[-1].synchronize()
    return float(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)))


@contextlib.contextmanager
def _without_end(load: Callable[[], None], device: torch.device) -> Iterator[list[int]]:
    """Calls `load` in another thread again and again while the body runs. Yields the number of calls that are
    done, which goes on growing."""
    stop, rounds = threading.Event(), [0]

    def work() -> None:
        own = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(own):  # a load starts behind what the current stream was given: not the steps
            while not stop.is_set():
                load()
                rounds[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(_WARM_UP_S)
    try:
        yield rounds
    finally:
        stop.set()
        thread.join()
