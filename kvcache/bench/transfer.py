# SPDX-License-Identifier: Apache-2.0
"""How fast KV crosses between pages and chunks, each figure beside a plain copy of the same run."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvcache.bench.shapes import CPU_SHAPES, LLAMA_8B, SHAPES, Shape
from kvcache.gpu_connector.interface import Completion
from kvcache.gpu_connector.layout import joined_where_pages_are
from kvcache.gpu_connector.transfer import RING_SLOT_BYTES, Chunks, PageTransfer, TransferWay, Way
from kvcache.gpu_connector.ways import BLOCKS

_RUNS = {"cpu": 9, "cuda": 5}
_CHUNK_TOKENS = 256


@dataclass(frozen=True)
class Result:
    """One shape, way and direction. Rates in GB/s (1e9 bytes), times in ms."""

    shape: str
    axes: str
    dtype: str
    block_size: int
    chunk_tokens: int
    direction: str
    way: str
    blocks: int
    bytes: int
    rate: float
    plain_rate: float
    """Of a plain copy (page-locked on a GPU, memcpy on the CPU) in the same run."""
    submit_ms: float
    """Until the call returned."""
    coded: bool = False
    """Chunks held coded rows: `bytes` and `rate` are of the pages."""

    @property
    def ratio(self) -> float:
        return self.rate / self.plain_rate


@dataclass
class Bench:
    """Pages of one shape and chunks for some of their tokens, in random order."""

    shape: Shape
    transfer: PageTransfer
    tensors: list[torch.Tensor]
    memory: torch.Tensor
    plain: torch.Tensor
    device: torch.device
    slots: np.ndarray

    @classmethod
    def of(
        cls, shape: Shape, device: torch.device, total_bytes: int, ring_slot_bytes: int = RING_SLOT_BYTES
    ) -> Bench:
        """About `total_bytes` of chunks, twice as many pages."""
        blocks = max(1, total_bytes // (shape.token_bytes * shape.block_size))
        tensors = shape.tensors(2 * blocks, device)
        spec = joined_where_pages_are(shape.spec(2 * blocks), tensors[0])
        transfer = PageTransfer(spec.register(tensors), ring_slot_bytes=ring_slot_bytes)
        order = np.random.default_rng().permutation(2 * blocks)[:blocks]
        slots = (order[:, None] * shape.block_size + np.arange(shape.block_size)).reshape(-1).astype(np.int64)
        size = len(slots) * shape.token_bytes
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        plain = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
        memory.copy_(plain)
        bench = cls(shape, transfer, tensors, memory, plain, device, slots)
        if shape.coded:  # a load takes its time for what random bytes stand for
            transfer.store(bench.chunks(_CHUNK_TOKENS)).wait()
            plain.copy_(memory)
        return bench

    def chunks(self, chunk_tokens: int) -> Chunks:
        starts = np.arange(0, len(self.slots), chunk_tokens, dtype=np.int64)
        return Chunks(
            addresses=(self.memory.data_ptr() + starts * self.shape.token_bytes).astype(np.uint64),
            starts=starts,
            ends=np.minimum(starts + chunk_tokens, len(self.slots)),
            slots=self.slots,
        )

    def copy_engine_moves(self, store: bool) -> bool:
        """Whether it can by itself: of coded rows it brings some into pages where they expand."""
        pages = self.transfer.pages
        return not pages.coded or (pages.expands_in_place and not store)

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def plain_copy(self, store: bool) -> None:
        """One copy of all bytes, as the link makes it, or memcpy on one core."""
        if self.device.type == "cpu":
            np.copyto(self.memory.numpy(), self.plain.numpy())
            return
        target, source = (self.memory, self.plain) if store else (self.plain, self.memory)
        target.copy_(source, non_blocking=True)

    def compare(self, run: Callable[[], object], store: bool) -> tuple[float, float, float]:
        """Median seconds of `run` until all is done, of its submission, and of the plain copy beside it."""
        seconds, submits, plains = [], [], []
        for _ in range(_RUNS[self.device.type] + 1):
            self.sync()
            start = time.perf_counter()
            run()
            submits.append(time.perf_counter() - start)
            self.sync()
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
            self.plain_copy(store)
            self.sync()
            plains.append(time.perf_counter() - start)
        return statistics.median(seconds[1:]), statistics.median(submits[1:]), statistics.median(plains[1:])

    def move(self, chunks: Chunks, store: bool, way: TransferWay) -> Completion:
        if store:
            return self.transfer.store(chunks, way=way)
        return self.transfer.load(chunks, way=way)

    def layers(self, chunks: Chunks, store: bool, way: TransferWay) -> None:
        """The same bytes layer by layer, one call each, as the layerwise connectors make them."""
        tokens = chunks.ends - chunks.starts
        slice_bytes = (tokens * (self.shape.token_bytes // self.shape.layers)).astype(np.uint64)
        for layer in range(self.shape.layers):
            part = Chunks(
                chunks.addresses + slice_bytes * np.uint64(layer), chunks.starts, chunks.ends, chunks.slots
            )
            move = self.transfer.store if store else self.transfer.load
            move(part, way=way, layer_begin=layer, layer_end=layer + 1)

    def result(
        self, chunk_tokens: int, store: bool, label: str, blocks: int, run: Callable[[], object]
    ) -> Result:
        seconds, submit, plain = self.compare(run, store)
        shape, size = self.shape, self.memory.nbytes
        return Result(
            shape=shape.name,
            axes=shape.axes,
            dtype=str(shape.dtype).removeprefix("torch."),
            block_size=shape.block_size,
            chunk_tokens=chunk_tokens,
            direction="store" if store else "load",
            way=label,
            blocks=blocks,
            bytes=size,
            rate=size / seconds / 1e9,
            plain_rate=size / plain / 1e9,
            submit_ms=submit * 1e3,
            coded=shape.coded,
        )


def transfer_results(
    device: torch.device,
    *,
    shapes: Sequence[Shape] | None = None,
    total_bytes: int = 0,
    ring_slot_bytes: int = RING_SLOT_BYTES,
) -> Iterator[Result]:
    """Every shape and way of the device; 256 and 64 tokens a chunk on a GPU, 256 on the CPU.

    Args:
        device: `cpu` or a CUDA device.
        shapes: None for the shapes of the device.
        total_bytes: bytes a measurement moves; 0 for 2 GiB on a GPU, 128 MiB on the CPU.
        ring_slot_bytes: of the staging rings.
    """
    gpu = device.type == "cuda"
    for shape in shapes if shapes is not None else SHAPES if gpu else CPU_SHAPES:
        bench = Bench.of(shape, device, total_bytes or (2 << 30 if gpu else 128 << 20), ring_slot_bytes)
        for chunk_tokens, store in itertools.product(
            (_CHUNK_TOKENS, 64) if gpu else (_CHUNK_TOKENS,), (True, False)
        ):
            yield from _results(bench, chunk_tokens, store)


def _results(bench: Bench, chunk_tokens: int, store: bool) -> Iterator[Result]:
    chunks = bench.chunks(chunk_tokens)
    if bench.device.type != "cuda":
        ways, layerwise = [TransferWay(Way.HOST)], []
    else:
        ways = [way for way in _ways() if way.way is not Way.STRIDED_DMA or bench.copy_engine_moves(store)]
        layerwise = [TransferWay(Way.STAGED, blocks) for blocks in BLOCKS] + [TransferWay(Way.DIRECT, 8)]
    run: Callable[[], object]
    for way in ways:
        run = partial(bench.move, chunks, store, way)
        yield bench.result(chunk_tokens, store, way.way.value, way.blocks, run)
    for way in layerwise if chunk_tokens == _CHUNK_TOKENS and not bench.shape.coded else ():
        run = partial(bench.layers, chunks, store, way)
        yield bench.result(chunk_tokens, store, f"layerwise {way.way.value}", way.blocks, run)


def _ways() -> Iterator[TransferWay]:
    for blocks in BLOCKS:
        yield TransferWay(Way.STAGED, blocks)
    yield TransferWay(Way.DIRECT, 8)
    yield TransferWay(Way.STRIDED_DMA)


@dataclass(frozen=True)
class Overlap:
    """What copies and other work do to each other. Rates in GB/s, times in ms."""

    way: str
    blocks: int
    both_rate: float
    """Store and load at once, the sum."""
    plain_both_rate: float
    """Two plain page-locked copies at once, the sum."""
    matmul_ms: float
    """A bf16 matrix product of 8,192, alone."""
    matmul_busy_ms: float
    """The same beside a saturated store and load."""
    matmul_loss: float
    """Share of its time, each run beside the copies against those before and after it alone: a GPU's clock
    drifts more than the copies cost."""
    both_rate_beside: float
    """Store and load beside the matrix product, the sum."""


def overlap_results(device: torch.device, total_bytes: int = 2 << 30) -> Iterator[Overlap]:
    """Both directions at once, and a matrix product beside them, for each number of multiprocessors."""
    duplex = _Duplex(device, total_bytes)
    short = _Duplex(device, total_bytes // 16)  # its rounds are counted while a few products run
    operands = [torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2)]
    for way in (TransferWay(Way.STRIDED_DMA), *(TransferWay(Way.STAGED, blocks) for blocks in BLOCKS)):
        ours: list[float] = []
        plain: list[float] = []
        for _ in range(_RUNS["cuda"] + 1):
            ours.append(duplex.seconds(partial(duplex.both, way)))
            plain.append(duplex.seconds(duplex.plain_both))
        alone = [_matmul_ms(operands) for _ in range(3)][2:]
        busy: list[float] = []
        beside: list[float] = []
        for _ in range(_RUNS["cuda"]):
            with short.saturated(way) as rounds:
                first, start = rounds[0], time.perf_counter()
                busy.append(_matmul_ms(operands))
                beside.append((rounds[0] - first) / (time.perf_counter() - start))
            alone.append(_matmul_ms(operands))
        size = 2 * duplex.stored.memory.nbytes
        yield Overlap(
            way=way.way.value,
            blocks=way.blocks,
            both_rate=size / statistics.median(ours[1:]) / 1e9,
            plain_both_rate=size / statistics.median(plain[1:]) / 1e9,
            matmul_ms=statistics.median(alone),
            matmul_busy_ms=statistics.median(busy),
            matmul_loss=statistics.median(
                2 * one / (before + after) - 1
                for one, before, after in zip(busy, alone, alone[1:], strict=False)
            ),
            both_rate_beside=2 * short.stored.memory.nbytes * statistics.median(beside) / 1e9,
        )


class _Duplex:
    """A store of one set of pages and a load of another, at once."""

    def __init__(self, device: torch.device, total_bytes: int) -> None:
        self.stored, self.loaded = (Bench.of(LLAMA_8B, device, total_bytes) for _ in range(2))
        self._chunks = self.stored.chunks(_CHUNK_TOKENS), self.loaded.chunks(_CHUNK_TOKENS)
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]

    def both(self, way: TransferWay) -> list[Completion]:
        store = self.stored.transfer.store(self._chunks[0], way=way)
        return [store, self.loaded.transfer.load(self._chunks[1], way=way, ordered=False)]

    def plain_both(self) -> None:
        for stream, bench, store in zip(
            self._streams, (self.stored, self.loaded), (True, False), strict=True
        ):
            with torch.cuda.stream(stream):
                bench.plain_copy(store)

    def seconds(self, run: Callable[[], object]) -> float:
        self.stored.sync()
        start = time.perf_counter()
        run()
        self.stored.sync()
        return time.perf_counter() - start

    @contextlib.contextmanager
    def saturated(self, way: TransferWay) -> Iterator[list[int]]:
        """Keeps both directions busy from another thread, on streams of their own, while the body runs.
        Yields the number of rounds that are done, which goes on growing.
        """
        stop, rounds = threading.Event(), [0]

        def work() -> None:
            with torch.cuda.stream(self._streams[0]):
                running = self.both(way)
                while not stop.is_set():
                    following = self.both(way)
                    for completion in running:
                        completion.wait()
                    rounds[0] += 1
                    running = following

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.05)
        try:
            yield rounds
        finally:
            stop.set()
            thread.join()
            self.stored.sync()


def _matmul_ms(operands: list[torch.Tensor], products: int = 150) -> float:
    """Milliseconds of one bf16 matrix product, by events around many."""
    torch.mm(*operands)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    events[0].record()
    for _ in range(products):
        torch.mm(*operands)
    events[1].record()
    events[1].synchronize()
    return float(events[0].elapsed_time(events[1])) / products
