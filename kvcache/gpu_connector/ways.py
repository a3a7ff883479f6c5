# SPDX-License-Identifier: Apache-2.0
"""Measures the ways across the link on the registered pages and chooses one for each direction.

Runs once, when the pages are registered and nothing uses them. The pages hold what they held, bit for bit:
what is loaded is what was stored a moment before.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from kvcache import _native
from kvcache.gpu_connector.feed import LAST_SLICES, SLICES_IN_FLIGHT
from kvcache.gpu_connector.interface import Completion
from kvcache.gpu_connector.transfer import GROUP_LAYERS, Chunks, PageTransfer, TransferWay, Way

logger = logging.getLogger("vllm.kvcache")

_MEASURED_BYTES = 256 << 20
_CHUNK_TOKENS = 256
_RUNS = 5
_AS_GOOD = 0.99
"""A load that a request waits for is made by the way with the fewest multiprocessors within this share of the
fastest: its rate is the time to the first token."""
_GOOD_ENOUGH = 0.75
"""The same for copies that run beside the model: stores, and loads that wait outside of the batch. There a
multiprocessor is worth more than a quarter of the link: a matrix product of 8,192 beside both directions
loses 6 to 13 % to gathering kernels, 1.7 % to the copy engine alone and 1.5 % to plain copies (H200)."""
_STORE_BLOCKS = 16
"""Of a store's kernels: they hold their multiprocessors for as long as the rows take, not the link. A matrix
product waits for its last tiles, so that few multiprocessors that are held for long cost more than many for a
moment: prompts never seen again, with coded rows, run at 0.992 of the rate without stores with two blocks,
0.994 with four, 0.995 with eight, 0.999 with sixteen and thirty-two (H200)."""
_SHORT_ENOUGH = 0.85
"""Its share of the fastest way's rate below which it is not taken."""
_QUIET_BLOCKS = 4
"""Where the copy engine does not move the blocks themselves, a load beside a model that decodes goes through
the ring and takes at least so many: two, which are enough on an idle GPU, bring 36 GB/s there and four 47."""
_HOPELESS = 0.5
"""A way that reaches less than this share of the link when it is first tried is not tried again."""
BLOCKS = (2, 4, 8, 12)
"""Of the kernels that are tried. Ten read coded rows from host memory as fast as thirty-two (H200)."""
_SHORT_BLOCKS = BLOCKS[-1]
"""Of a kernel that reads host memory, for short loads: it is one launch for a group of layers, where a ring
takes seven operations a slot. For 8,192 tokens of an 8B model that is 0.3 instead of 1.2 ms of vLLM's
thread."""


def choose_ways(transfer: PageTransfer) -> None:
    """Sets `load_way` and `quiet_load_way` to the way that uses the fewest multiprocessors among those that
    are fast enough for it, `store_way` to the copy engine if it is, and `short_load_way` to the one that
    takes the fewest calls.

    Nothing to choose on the CPU.
    """
    if transfer.pages.device < 0:
        return
    chunks, memory = scratch_chunks(transfer.pages)
    with _pages_kept(transfer.pages, chunks):
        _choose(transfer, chunks, memory)


def _choose(transfer: PageTransfer, chunks: Chunks, memory: torch.Tensor) -> None:
    device = torch.device("cuda", transfer.pages.device)
    link = {store: _link_rate(memory, store, device) for store in (True, False)}

    def tried(way: TransferWay, store: bool) -> TransferWay:
        run = partial(_run, transfer, chunks, store, way)
        seconds = measure(run, runs=1)
        if memory.nbytes / seconds > _HOPELESS * link[store]:
            seconds = measure(run)
        return TransferWay(way.way, way.blocks, memory.nbytes / seconds, link[store])

    coded = transfer.pages.coded
    transfer.store_way = _best([tried(way, store=True) for way in _store_ways(coded=coded)], _GOOD_ENOUGH)
    # Loads write back what the stores have read.
    loads = [tried(way, store=False) for way in _load_ways(coded=coded)]
    transfer.load_way = _best(loads, _AS_GOOD)
    at_once = next(way for way in loads if way.way is Way.DIRECT and way.blocks == _SHORT_BLOCKS)
    transfer.short_load_way = _best([at_once, transfer.load_way], _SHORT_ENOUGH)
    transfer.quiet_load_way = _best([way for way in loads if _is_quiet(way)], _GOOD_ENOUGH)
    if transfer.pages.expands_in_place and _native.dma_in_batches():
        # Not where a step waits: the copy engine is given a copy for each block and layer.
        in_place = tried(TransferWay(Way.STRIDED_DMA), store=False)
        if _page_rate(in_place, transfer.pages) >= _GOOD_ENOUGH * in_place.link_bytes_per_s:
            transfer.quiet_load_way = in_place
    for what, way in (
        ("stores", transfer.store_way),
        ("loads that a step waits for", transfer.load_way),
        ("short ones of these", transfer.short_load_way),
        ("loads beside the model", transfer.quiet_load_way),
    ):
        logger.info(
            "KV cache: %s go %s, %d multiprocessors, %.1f of %.1f GB/s",
            what,
            way.way.value,
            way.blocks,
            way.bytes_per_s / 1e9,
            way.link_bytes_per_s / 1e9,
        )
    # So many loads at once, slices or groups of layers, take their kernels' tables from memory that is
    # page-locked now, not while requests decode.
    most_at_once = max(SLICES_IN_FLIGHT + LAST_SLICES, -(-transfer.pages.num_layers // GROUP_LAYERS))
    slices = [transfer.load(chunks, way=TransferWay(Way.STAGED, _QUIET_BLOCKS)) for _ in range(most_at_once)]
    for load in slices:
        load.wait()


def scratch_chunks(pages: _native.Pages, limit_bytes: int = _MEASURED_BYTES) -> tuple[Chunks, torch.Tensor]:
    """Page-locked chunks for as many tokens as fit into `limit_bytes`, in blocks of random order."""
    layout = pages.layout
    tokens = max(1, min(layout.num_slots, limit_bytes // (pages.chunk_token_bytes * pages.num_layers)))
    blocks = np.random.default_rng(0).permutation(layout.num_blocks)[: -(-tokens // layout.block_size)]
    slots = (blocks[:, None] * layout.block_size + np.arange(layout.block_size)).reshape(-1)[:tokens]
    return _chunks_of(pages, slots.astype(np.int64))


def _chunks_of(pages: _native.Pages, slots: npt.NDArray[np.int64]) -> tuple[Chunks, torch.Tensor]:
    token_bytes = pages.chunk_token_bytes * pages.num_layers
    starts = np.arange(0, len(slots), _CHUNK_TOKENS, dtype=np.int64)
    memory = torch.empty(len(slots) * token_bytes, dtype=torch.uint8, pin_memory=pages.device >= 0)
    chunks = Chunks(
        addresses=(memory.data_ptr() + starts * token_bytes).astype(np.uint64),
        starts=starts,
        ends=np.minimum(starts + _CHUNK_TOKENS, len(slots)),
        slots=slots,
    )
    return chunks, memory


@contextlib.contextmanager
def _pages_kept(pages: _native.Pages, chunks: Chunks) -> Iterator[None]:
    """Coded rows are measured on numbers such as a model's; then the pages get back what they held."""
    if not pages.coded:
        yield
        return
    plain = pages.uncoded()
    kept, _memory = _chunks_of(plain, chunks.slots)
    numbers, memory = _chunks_of(plain, chunks.slots)
    memory = memory.view(torch.bfloat16)
    memory.copy_(torch.randn(1 << 16).to(torch.bfloat16).repeat(len(memory) // (1 << 16) + 1)[: len(memory)])
    stream = torch.cuda.current_stream(pages.device)
    copy = partial(_native.batched_kv_transfer, plain, *kept.arguments(), stream=stream.cuda_stream)
    copy(store=True)
    _native.batched_kv_transfer(plain, *numbers.arguments(), False, stream=stream.cuda_stream)
    stream.synchronize()
    try:
        yield
    finally:
        torch.cuda.synchronize(pages.device)
        copy(store=False)
        stream.synchronize()


def measure(run: Callable[[], Completion], runs: int = _RUNS) -> float:
    """Seconds from the call to its completion, the median after one run to warm up."""
    seconds = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        run().wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _run(transfer: PageTransfer, chunks: Chunks, store: bool, way: TransferWay) -> Completion:
    return transfer.store(chunks, way=way) if store else transfer.load(chunks, way=way)


def _store_ways(*, coded: bool) -> Iterator[TransferWay]:
    """The copy engine codes nothing."""
    if not coded:
        yield TransferWay(Way.STRIDED_DMA)
    yield TransferWay(Way.STAGED, _STORE_BLOCKS)


def _load_ways(*, coded: bool) -> Iterator[TransferWay]:
    """The fewest multiprocessors first."""
    if not coded:
        yield TransferWay(Way.STRIDED_DMA)
    for blocks in BLOCKS:
        yield TransferWay(Way.STAGED, blocks)
        yield TransferWay(Way.DIRECT, blocks)


def _is_quiet(way: TransferWay) -> bool:
    """May run beside a model that decodes: it leaves the copy engine to others in between, and whoever hands
    it over does not fill a stream with copies."""
    if way.way is Way.STRIDED_DMA:
        return _native.dma_in_batches()
    return way.way is Way.STAGED and way.blocks >= _QUIET_BLOCKS


def _page_rate(way: TransferWay, pages: _native.Pages) -> float:
    """Bytes of pages a second, which is what a request waits for: its rows may be coded on the way."""
    return way.bytes_per_s * pages.layout.token_bytes / pages.chunk_token_bytes


def _link_rate(memory: torch.Tensor, store: bool, device: torch.device) -> float:
    """Bytes a second of one plain page-locked copy."""
    other = torch.empty_like(memory, device=device)
    target, source = (memory, other) if store else (other, memory)
    seconds = []
    for _ in range(_RUNS + 1):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return memory.nbytes / statistics.median(seconds[1:])


def _best(ways: list[TransferWay], share: float) -> TransferWay:
    """The first that reaches `share` of the fastest."""
    fastest = max(way.bytes_per_s for way in ways)
    return next(way for way in ways if way.bytes_per_s >= share * fastest)
