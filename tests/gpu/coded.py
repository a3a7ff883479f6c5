# SPDX-License-Identifier: Apache-2.0
"""Coded rows on a GPU, against the host twin. Run by `checks`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from kvcache import _native
from kvcache.gpu_connector.interface import Completion
from kvcache.gpu_connector.layout import LayerSpec
from kvcache.gpu_connector.paged import VLLMPagedMemGPUConnectorV2
from kvcache.gpu_connector.transfer import Chunks, PageTransfer, TransferWay, Way
from tests.csrc import coded
from tests.csrc.layouts import PLAIN_LAYOUTS, random_slots
from tests.gpu.tools import GPU, LAYERS, addresses, in_groups_of_layers, pinned, same_pages


def check_coded_rows(small: bool = False) -> None:
    """Chunks, pages and what is refused, against the host twin, by each way that codes."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    shapes = ((23, 16, 2, 64, 333), (40, 1, 3, 64, 13), (5, 128, 8, 128, 421), (37, 7, 1, 576, 111))
    for layout, (blocks, block_size, heads, head_size, tokens) in itertools.product(
        PLAIN_LAYOUTS[:: 5 if small else 1], shapes[: 2 if small else 4]
    ):
        host = coded.kv(
            layout, layers=LAYERS, blocks=blocks, block_size=block_size, heads=heads, head_size=head_size
        )
        host_pages = coded.pages_of(host)
        slots = random_slots(host.slots, tokens, block_size, skip=0.1).numpy()
        cuts = np.unique(np.random.default_rng().integers(0, len(slots) + 1, 7))
        starts, ends = cuts[:-1].astype(np.int64), cuts[1:].astype(np.int64)
        sizes = [LAYERS * int(count) * host_pages.chunk_token_bytes for count in ends - starts]
        for label, run, where in _coding_ways(host_pages.chunk_token_bytes, stream):
            for beyond in (False, True):
                case = f"{label}, {layout}, {blocks=}, {block_size=}, {heads=}, {head_size=}, {beyond=}"
                device = host.to(GPU)
                if beyond:  # a row of random bytes
                    at = int(slots[starts[0] : ends[0]].max())
                    if at < 0:
                        continue
                    row = device.views[1][at // block_size, at % block_size, 0]
                    row.copy_(torch.randint(0, 256, row.shape, dtype=torch.uint8))
                pages = coded.pages_of(device)
                mine = [pinned(size) for size in sizes]
                theirs = [
                    chunk.to(GPU) if where == "device" else pinned(len(chunk)).copy_(chunk) for chunk in mine
                ]
                if where == "pageable":
                    theirs = [torch.empty_like(chunk, pin_memory=False).copy_(chunk) for chunk in mine]
                refused = torch.zeros(len(starts), dtype=torch.int32, pin_memory=True)
                torch.cuda.synchronize()
                run(pages, addresses(theirs), starts, ends, slots, True, refused=refused.data_ptr())
                torch.cuda.synchronize()
                assert refused.tolist() == [int(beyond), *[0] * (len(starts) - 1)], f"{refused}: {case}"
                if beyond:
                    continue
                flag = np.zeros(len(starts), dtype=np.int32)
                _native.batched_kv_transfer(
                    host_pages, addresses(mine), starts, ends, slots, True, refused=flag.ctypes.data
                )
                for one, other in zip(mine, theirs, strict=True):
                    assert torch.equal(one, other.cpu()), f"chunks differ: {case}"
                device.storage.fill_(0xA5)
                loaded = host.to("cpu")
                loaded.storage.fill_(0xA5)
                torch.cuda.synchronize()
                run(pages, addresses(theirs), starts, ends, slots, False, refused=0)
                torch.cuda.synchronize()
                _native.batched_kv_transfer(
                    coded.pages_of(loaded), addresses(mine), starts, ends, slots, False
                )
                assert same_pages(loaded, device), f"pages differ: {case}"
                if not pages.expands_in_place or where != "pinned":
                    continue
                for turn, portion in ((0, 1), (1, 1), (1, 1 << 20)):  # bytes, of one run at least
                    device.storage.fill_(0xA5)
                    torch.cuda.synchronize()
                    ring = _native.StagingRing(0, portion, 3, turn=turn)
                    batch, handle = (addresses(theirs), starts, ends, slots), stream.cuda_stream
                    ring.strided_dma(pages, *batch, False, stream=handle)
                    _native.expand_in_place(pages, *batch, stream=handle)
                    torch.cuda.synchronize()
                    assert same_pages(loaded, device), f"pages expanded in place differ: {turn=}, {case}"


def _coding_ways(
    token_bytes: int, stream: torch.cuda.Stream
) -> Iterator[tuple[str, Callable[..., None], str]]:
    """A label, the call, and where chunks lie."""
    handle = stream.cuda_stream
    for blocks, where in ((1, "pinned"), (0, "device")):
        run = partial(_native.batched_kv_transfer, stream=handle, blocks=blocks)
        yield f"direct {blocks} {where}", run, where
    for slot_bytes, where in ((7 * token_bytes, "pinned"), (1 << 20, "pageable")):
        ring = _native.StagingRing(0, max(slot_bytes, token_bytes), 3, turn=1)

        def staged(*arguments: Any, refused: int, ring: _native.StagingRing = ring) -> None:
            ring.transfer(*arguments, stream=handle, blocks=2, refused=refused)
            done = stream.record_event()
            ring.record(done.cuda_event)
            stream.wait_event(done)

        yield f"staged {slot_bytes} {where}", staged, where


def check_coded_transfers(small: bool = False) -> None:
    """As the connector makes them: of several stores under way the right chunks are refused, and loads in
    bulk, by layer and beside the model fill the pages."""
    kv = coded.kv("LBNHC", layers=9, blocks=256, block_size=16, heads=8, head_size=128).to(GPU)
    transfer = PageTransfer(coded.pages_of(kv))
    assert transfer.pages.expands_in_place
    slots = random_slots(kv.slots, 2048, 16).numpy()
    starts = np.arange(0, len(slots), 256, dtype=np.int64)
    ends = np.minimum(starts + 256, len(slots))
    bad = int(slots[3 * 256 + 7])
    good_row = kv.views[4][bad // 16, bad % 16, 1].clone()
    bad_row = torch.randint(0, 256, good_row.shape, dtype=torch.uint8).to(GPU)
    size = 9 * 256 * transfer.pages.chunk_token_bytes
    for way in (TransferWay(Way.STAGED, 2), TransferWay(Way.DIRECT, 4)):
        memory = [[pinned(size) for _ in starts] for _ in range(3)]
        chunks = [Chunks(addresses(held), starts, ends, slots) for held in memory]
        stores = []
        for number in range(3):
            kv.views[4][bad // 16, bad % 16, 1] = bad_row if number == 1 else good_row
            stores.append(transfer.store(chunks[number], way=way))
            stores[-1].order_current_stream()
        assert all(store.wait(30) for store in stores)
        moved = [store.moved(len(starts)) for store in stores]
        assert moved == [len(starts), 3, len(starts)], f"{moved} chunks were stored by {way}"
        assert all(map(torch.equal, memory[0], memory[2])), f"two stores of equal pages differ: {way}"
        before = kv.snapshot()
        transfer.load_way = way
        transfer.quiet_load_way = TransferWay(Way.STRIDED_DMA) if way.way is Way.DIRECT else way

        held = torch.from_numpy(slots).to(GPU)
        loads: dict[str, Callable[[Chunks], Completion]] = {
            "in bulk": transfer.load,
            "by layer": transfer.load_by_layer,
            "by groups of layers": partial(in_groups_of_layers, transfer),
            "beside": transfer.feed,
        }
        for name, load in loads.items():
            kv.storage.fill_(0x5A)
            loading = load(chunks[2])
            for layer in range(9):
                loading.order_layer(layer)
            assert loading.wait(30)
            torch.cuda.synchronize()
            for rows, was in zip(kv.snapshot(), before, strict=True):
                assert torch.equal(rows[held], was[held]), f"a load {name} gave other pages: {way}"


def check_coded_pages_are_kept_while_ways_are_measured(small: bool = False) -> None:
    """Also where they hold what has no code."""
    spec = LayerSpec(16, 8, 128, torch.bfloat16, 512, coded=True)
    pages = [
        torch.randint(0, 256, (2, 512, 16, 8, 256), dtype=torch.uint8, device=GPU).view(torch.bfloat16)
        for _ in range(4)
    ]
    before = [page.clone() for page in pages]
    connector = VLLMPagedMemGPUConnectorV2(spec)
    connector.initialize_kvcaches_ptr(kvcaches=pages)
    for page, was in zip(pages, before, strict=True):
        assert torch.equal(page.view(torch.uint8), was.view(torch.uint8))
    assert connector.transfer.load_way.way is not Way.STRIDED_DMA
    assert connector.dtype == torch.uint8
