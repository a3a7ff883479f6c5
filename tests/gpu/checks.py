# SPDX-License-Identifier: Apache-2.0
"""Checks that need a GPU: CUDA against the host twins bit for bit, and the order of streams.

Run by pytest (`test_gpu.py`), or without it: `python -m tests.gpu.checks [--small]`, as under
compute-sanitizer.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from kvcache import _native, lmc_ops
from kvcache.gpu_connector.base import layer_slices
from kvcache.gpu_connector.blend import VLLMBufferLayerwiseGPUConnector
from kvcache.gpu_connector.interface import Completion
from kvcache.gpu_connector.layerwise import VLLMPagedMemLayerwiseGPUConnector
from kvcache.gpu_connector.layout import LayerSpec, describe_layers
from kvcache.gpu_connector.paged import VLLMPagedMemGPUConnectorV2
from kvcache.gpu_connector.rotary import FusedRotary
from kvcache.gpu_connector.sglang import PoolSpec, SGLangGPUConnector, SGLangLayerwiseGPUConnector
from kvcache.gpu_connector.transfer import Chunks, PageTransfer, TransferWay, Way
from kvcache.gpu_connector.xpu import VLLMGPUConnectorXPU
from kvcache.memory.allocator import ChunkAllocator, KVShape
from kvcache.memory.objects import MemoryObj
from kvcache.memory.region import HostRegion
from tests.csrc.layouts import DTYPES, LAYOUTS, PagedKV, axes_of, make_kv, random_slots
from tests.gpu.coded import (
    check_coded_pages_are_kept_while_ways_are_measured,
    check_coded_rows,
    check_coded_transfers,
)
from tests.gpu.tools import GPU, LAYERS, addresses, in_groups_of_layers, pinned, same_pages

# (blocks, block size, heads, head size, tokens): vectors of 16 bytes down to 1.
SHAPES = (
    (23, 16, 2, 64, 333),
    (40, 1, 3, 8, 13),
    (5, 128, 1, 24, 421),
    (37, 7, 4, 5, 111),
    (9, 16, 8, 128, 129),
)


def matrix(small: bool) -> Iterator[tuple[str, torch.dtype, tuple[int, int, int, int, int]]]:
    cases = itertools.product(LAYOUTS, DTYPES, SHAPES)
    if not small:
        yield from cases
        return
    for index, (layout, dtype, shape) in enumerate(cases):
        if index % 17 == 0 and shape[-1] < 200:
            yield layout, dtype, shape


def check_twins(small: bool = False) -> None:
    """Every way, both directions, against the host twin: the chunks and all bytes of the pages.

    With `small` a case takes a third of the ways, each in its turn.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for turn, (layout, dtype, (blocks, block_size, heads, head_size, tokens)) in enumerate(matrix(small)):
        host = make_kv(
            layout,
            layers=LAYERS,
            blocks=blocks,
            block_size=block_size,
            heads=heads,
            head_size=head_size,
            dtype=dtype,
        )
        spec = LayerSpec(**{**vars(host.spec), "axes": axes_of(layout)})
        host_pages = describe_layers(host.tensors, spec)
        token = host_pages.layout.token_bytes
        slots = random_slots(host.slots, tokens, block_size, skip=0.1).numpy()
        cuts = np.unique(np.random.default_rng().integers(0, len(slots) + 1, 7))
        starts, ends = cuts[:-1].astype(np.int64), cuts[1:].astype(np.int64)
        sizes = [LAYERS * int(count) * token for count in ends - starts]
        ways = list(_ways(host_pages.layout, stream))
        for label, run, token_major, where in ways[turn % 3 :: 3] if small else ways:
            for store in (True, False):
                device = host.to(GPU)
                pages = describe_layers(device.tensors, spec)
                chunks = [pinned(size) for size in sizes]
                if where == "device":
                    theirs = [chunk.to(GPU) for chunk in chunks]
                elif where == "pageable":
                    theirs = [torch.empty_like(chunk, pin_memory=False).copy_(chunk) for chunk in chunks]
                else:
                    theirs = [pinned(size).copy_(chunk) for size, chunk in zip(sizes, chunks, strict=True)]
                torch.cuda.synchronize()
                run(pages, addresses(theirs), starts, ends, slots, store)
                torch.cuda.synchronize()
                before = host.storage.clone()
                _native.batched_kv_transfer(
                    host_pages, addresses(chunks), starts, ends, slots, store, token_major=token_major
                )
                case = f"{label}, store={store}, {layout}, {dtype}, {block_size=}, {heads=}, {head_size=}"
                for mine, other in zip(chunks, theirs, strict=True):
                    assert torch.equal(mine, other.cpu()), f"chunks differ: {case}"
                assert same_pages(host, device), f"pages differ: {case}"
                host.storage.copy_(before)


def _ways(
    layout: _native.PagedLayout, stream: torch.cuda.Stream
) -> Iterator[tuple[str, Callable[..., None], bool, str]]:
    """A label, the call, whether chunks are token major, and where they lie."""
    handle = stream.cuda_stream
    direct = partial(_native.batched_kv_transfer, stream=handle)
    for blocks, token_major, group, where in (
        (1, True, 2, "pinned"),
        (3, False, 1, "pinned"),
        (0, True, 0, "device"),
    ):
        run = partial(direct, token_major=token_major, group_layers=group, blocks=blocks)
        yield f"direct {blocks} {where}, {group} layers at once", run, token_major, where
    for slot_bytes, where in (
        (layout.token_bytes * 7, "pinned"),
        (1 << 20, "pinned"),
        (4096 * 64, "pageable"),
    ):
        ring = _native.StagingRing(0, max(slot_bytes, layout.token_bytes), 3)

        def staged(*arguments: object, ring: _native.StagingRing = ring) -> None:
            ring.transfer(*arguments, stream=handle, blocks=2)  # type: ignore[arg-type]
            done = stream.record_event()
            ring.record(done.cuda_event)
            stream.wait_event(done)

        yield f"staged {slot_bytes} {where}", staged, True, where
        for turn in (0, 1):
            past = _native.StagingRing(0, max(slot_bytes, layout.token_bytes), 3, turn=turn)
            run = partial(past.strided_dma, stream=handle)
            yield f"strided dma {slot_bytes} {where}, turns of {turn}", run, True, where


def check_layers_in_allocations_of_their_own(small: bool = False) -> None:
    """The copy engine walks layers that several allocations hold; it must not matter where those lie."""
    blocks = 1024  # 64 MiB a layer: torch gives each an allocation of its own
    tensors = [
        torch.randint(0, 256, (2, blocks, 16, 8, 256), dtype=torch.uint8, device=GPU).view(torch.bfloat16)
        for _ in range(5)
    ]
    transfer = PageTransfer(describe_layers(tensors, LayerSpec(16, 8, 128, torch.bfloat16, blocks)))
    slots = random_slots(blocks * 16, 777, 16, skip=0.05)
    size = 5 * len(slots) * 2 * 2048
    there, back = pinned(size), pinned(size)
    span = (np.array([0]), np.array([len(slots)]), slots.numpy())
    back.copy_(there)
    transfer.store(Chunks(addresses([there]), *span), way=TransferWay(Way.STRIDED_DMA)).wait()
    transfer.store(Chunks(addresses([back]), *span), way=TransferWay(Way.STAGED, 4)).wait()
    assert torch.equal(there, back)
    before = [tensor.view(torch.uint8).clone() for tensor in tensors]
    for tensor in tensors:
        flat = tensor.view(torch.uint8).view(2, blocks * 16, -1)
        flat[:, slots[slots >= 0].to(GPU)] = 0xA5
    transfer.load(Chunks(addresses([there]), *span), way=TransferWay(Way.STRIDED_DMA)).wait()
    assert all(
        torch.equal(tensor.view(torch.uint8), was) for tensor, was in zip(tensors, before, strict=True)
    )


def check_offsets_above_two_to_the_31_elements(small: bool = False) -> None:
    """2.6e9 elements of bf16 in a layer."""
    blocks, row = 80_000, 8 * 128
    tensor = torch.zeros(2, blocks, 16, 8, 128, dtype=torch.bfloat16, device=GPU)
    spec = LayerSpec(16, 8, 128, torch.bfloat16, blocks)
    transfer = PageTransfer(describe_layers([tensor], spec))
    slots = torch.tensor([blocks * 16 - 1, 0, 70_001 * 16 + 3])
    data = torch.randn(3, 2, row, dtype=torch.bfloat16).pin_memory()
    for way in (TransferWay(Way.DIRECT, 2), TransferWay(Way.STAGED, 2), TransferWay(Way.STRIDED_DMA)):
        tensor.zero_()
        chunks = Chunks(addresses([data]), np.array([0]), np.array([3]), slots.numpy())
        transfer.load(chunks, way=way).wait()
        flat = tensor.view(2, blocks * 16, row)
        for plane in range(2):
            assert torch.equal(flat[plane][slots.to(GPU)].cpu(), data[:, plane])
        assert int((flat != 0).sum()) == int((data != 0).sum())
        back = torch.zeros_like(data).pin_memory()
        transfer.store(Chunks(addresses([back]), np.array([0]), np.array([3]), slots.numpy()), way=way).wait()
        assert torch.equal(back, data)


def check_rotary(small: bool = False) -> None:
    """Bit for bit, NaN included, over dtypes, pairings, partial rotation and table dtypes."""
    dtypes = (*DTYPES, torch.float8_e5m2)
    tables = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, table_dtype, neox in itertools.product(dtypes, tables, (True, False)):
        for head_size, rotary_size, heads, tokens in ((64, 64, 3, 97), (80, 32, 2, 33), (128, 128, 8, 300)):
            bits = torch.randint(0, 256, (tokens, heads, head_size * dtype.itemsize), dtype=torch.uint8)
            keys = bits.view(dtype)
            angle = torch.rand(512, rotary_size // 2) * 100
            table = torch.cat((angle.cos(), angle.sin()), dim=-1).to(table_dtype)
            was, now = torch.randint(0, 512, (2, tokens))
            there = keys.to(GPU)
            lmc_ops.rotary_embedding_k_fused(was, now, there, head_size, table.to(GPU), neox)
            lmc_ops.rotary_embedding_k_fused(was, now, keys, head_size, table, neox)
            mine, other = keys.view(torch.uint8), there.cpu().view(torch.uint8)
            if not torch.equal(mine, other):
                # A NaN made in float32 has no prescribed sign: that it is one is what must agree.
                nan = keys.float().isnan()
                assert torch.equal(nan, there.cpu().float().isnan()), f"{dtype}, {table_dtype}, {neox}"
                width = dtype.itemsize
                differ = (mine != other).view(tokens, heads, head_size, width).any(dim=-1)
                assert not bool((differ & ~nan).any()), f"{dtype}, {table_dtype}, {neox}"


def check_zero_and_copy(small: bool = False) -> None:
    buffer = torch.randint(1, 255, (300, 2, 7), dtype=torch.uint8)
    there = buffer.to(GPU)
    gaps = [(0, 3), (100, 100), (297, 300)]
    for tensor in (buffer, there):
        lmc_ops.zero_tokens(tensor, gaps)
    assert torch.equal(buffer, there.cpu())
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for source in (pinned(1 << 16), torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)):
        target = torch.zeros(1 << 16, dtype=torch.uint8, device=GPU)
        torch.cuda.synchronize()
        cuts = np.array([0, 1, 4099, 30_000], dtype=np.int64)
        sizes = np.diff(np.append(cuts, 1 << 16)).astype(np.int64)
        at = [(tensor.data_ptr() + cuts).astype(np.uint64) for tensor in (target, source)]
        _native.copy_spans(at[0], at[1], sizes, 0, stream.cuda_stream)
        stream.synchronize()
        assert torch.equal(target.cpu(), source)


class Pair:
    """The same pages on the CPU and on the GPU, and chunks for both that start with the same bytes."""

    def __init__(self, host: PagedKV) -> None:
        self.host, self.device = host, host.to(GPU)
        spec = LayerSpec(**{**vars(host.spec), "axes": axes_of(host.layout)})
        self.spec = spec
        shape = KVShape(LAYERS, spec.planes, spec.hidden, spec.dtype, 32)
        self.host_memory = ChunkAllocator(HostRegion(4 << 20, pin="Disabled"), shape)
        region = HostRegion(4 << 20, pin="Required")
        self.device_memory = ChunkAllocator(region, shape)
        deadline = time.monotonic() + 60
        while region.state == "Pinning":
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert (region.state, region.reason) == ("Pinned", ""), region.reason
        assert _native.is_pinned(region.address, region.capacity_bytes)

    def objects(self, *tokens: int) -> tuple[list[MemoryObj], list[MemoryObj]]:
        mine, theirs = [], []
        for count in tokens:
            one, other = self.host_memory.allocate(count), self.device_memory.allocate(count)
            assert one is not None
            assert other is not None
            one.tensor.view(torch.uint8).random_(0, 256)
            other.tensor.view(torch.uint8).copy_(one.tensor.view(torch.uint8))
            mine.append(one)
            theirs.append(other)
        return mine, theirs

    def equal(self, mine: list[MemoryObj], theirs: list[MemoryObj], case: str) -> None:
        torch.cuda.synchronize()
        for one, other in zip(mine, theirs, strict=True):
            assert bytes(one.buffer) == bytes(other.buffer), f"objects differ: {case}"
        assert torch.equal(self.host.storage, self.device.storage.cpu()), f"pages differ: {case}"

    def close(self) -> None:
        torch.cuda.synchronize()
        self.host_memory.close()
        self.device_memory.close()


def _pair(layout: str, dtype: torch.dtype = torch.bfloat16, head_size: int = 64) -> Pair:
    return Pair(
        make_kv(layout, layers=LAYERS, blocks=25, block_size=16, heads=2, head_size=head_size, dtype=dtype)
    )


SPANS = ([0, 32, 70], [32, 64, 83])
COUNTS = (32, 32, 13)


def check_bulk_connectors(small: bool = False) -> None:
    """V2 with the way that it chose itself, and the torch-only connector on the GPU."""
    for layout in LAYOUTS[:: 4 if small else 1]:
        pair = _pair(layout)
        for make in (VLLMPagedMemGPUConnectorV2, VLLMGPUConnectorXPU):
            host, device = make(pair.spec), make(pair.spec)
            host.initialize_kvcaches_ptr(kvcaches=pair.host.tensors)
            device.initialize_kvcaches_ptr(kvcaches=pair.device.tensors)
            assert same_pages(pair.host, pair.device), f"registration changed pages: {layout}"
            slots = random_slots(pair.host.slots, 90, 16, skip=0.05)
            mine, theirs = pair.objects(*COUNTS)
            host.batched_from_gpu(mine, *SPANS, slot_mapping=slots)
            device.batched_from_gpu(theirs, *SPANS, slot_mapping=slots).wait()
            pair.equal(mine, theirs, f"{make.__name__} store {layout}")
            mine, theirs = pair.objects(*COUNTS)
            host.batched_to_gpu(mine, *SPANS, slot_mapping=slots)
            device.batched_to_gpu(theirs, *SPANS, slot_mapping=slots)
            pair.equal(mine, theirs, f"{make.__name__} load {layout}")
        pair.close()


def check_layerwise_connectors(small: bool = False) -> None:
    for layout, use_gpu in itertools.product(LAYOUTS[:: 4 if small else 1], (True, False)):
        pair = _pair(layout)
        host, device = (VLLMPagedMemLayerwiseGPUConnector(pair.spec, use_gpu=use_gpu) for _ in range(2))
        host.initialize_kvcaches_ptr(kvcaches=pair.host.tensors)
        device.initialize_kvcaches_ptr(kvcaches=pair.device.tensors)
        _drive_layerwise(pair, host, device, f"layerwise {use_gpu=} {layout}")
        pair.close()


def _drive_layerwise(pair: Pair, host: Any, device: Any, case: str) -> None:
    slots = random_slots(pair.host.slots, 90, 16, skip=0.05)
    mine, theirs = pair.objects(*COUNTS)
    for connector, objs in ((host, mine), (device, theirs)):
        steps = list(connector.batched_from_gpu(layer_slices(objs, LAYERS), *SPANS, slot_mapping=slots))
        assert len(steps) == LAYERS + 1
        assert steps[-1].error is None, steps[-1].error
        assert steps[-1].wait(30)
    pair.equal(mine, theirs, f"{case} store")
    mine, theirs = pair.objects(*COUNTS)
    for connector, objs in ((host, mine), (device, theirs)):
        loads = connector.batched_to_gpu(*SPANS, slot_mapping=slots)
        next(loads)
        for layer in range(LAYERS):
            loads.send([obj.slice(layer) for obj in objs])
        last: Completion = next(loads)
        assert last.error is None, last.error
        assert next(loads, None) is None
    pair.equal(mine, theirs, f"{case} load")


def check_blending(small: bool = False) -> None:
    angle = torch.rand(512, 32) * 100
    table = torch.cat((angle.cos(), angle.sin()), dim=-1)
    for layout, neox in itertools.product(("LBNHC", "2BNHD", "MLA BNC"), (True, False)):
        pair = _pair(layout, head_size=96)
        host, device = (
            VLLMBufferLayerwiseGPUConnector(pair.spec, FusedRotary(table, is_neox=neox)) for _ in range(2)
        )
        host.initialize_kvcaches_ptr(kvcaches=pair.host.tensors)
        device.initialize_kvcaches_ptr(kvcaches=pair.device.tensors)
        slots = random_slots(pair.host.slots, 200, 16)
        mine, theirs = pair.objects(*COUNTS)
        for one, other in zip(mine, theirs, strict=True):
            one.tensor.normal_()
            other.tensor.copy_(one.tensor)
            for obj in (one, other):
                obj.remember_positions(torch.arange(300, 300 + obj.num_tokens))
        for connector, objs in ((host, mine), (device, theirs)):
            loads = connector.batched_to_gpu([100, 5, 60], [132, 37, 73], slot_mapping=slots)
            seen = [next(loads)]
            seen += [loads.send([obj.slice(layer) for obj in objs]) for layer in range(LAYERS)]
            seen.append(next(loads))
            assert [step.error for step in seen] == [None] * (LAYERS + 2)
            assert next(loads, None) is None
            assert connector.gpu_buffer_allocator is not None
            assert connector.gpu_buffer_allocator.in_use_bytes == 0
        pair.equal(mine, theirs, f"blend {layout} {neox=}")
        pair.close()


def check_sglang(small: bool = False) -> None:
    spec = PoolSpec(num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    pools = [torch.randint(0, 256, (400, 2, 128), dtype=torch.uint8) for _ in range(2 * LAYERS)]
    shape = KVShape(LAYERS, 2, 128, torch.bfloat16, 32)
    allocator = ChunkAllocator(HostRegion(4 << 20, pin="Disabled"), shape)
    for make in (SGLangGPUConnector, SGLangLayerwiseGPUConnector):
        slots = torch.randperm(400)[:90]
        stored = []
        for device in ("cpu", GPU):
            connector: Any = make(spec)
            tensors = [pool.to(device, copy=True).view(torch.bfloat16) for pool in pools]
            connector.initialize_kvcaches_ptr(kvcaches=tensors)
            objs = [obj for count in COUNTS if (obj := allocator.allocate(count)) is not None]
            for obj in objs:
                obj.tensor.zero_()
            if make is SGLangGPUConnector:
                connector.batched_from_gpu(objs, *SPANS, slot_mapping=slots).wait()
            else:
                steps = connector.batched_from_gpu(layer_slices(objs, LAYERS), *SPANS, slot_mapping=slots)
                assert list(steps)[-1].wait(30)
            stored.append([bytes(obj.buffer) for obj in objs])
            for obj in objs:
                allocator.free(obj)
        assert stored[0] == stored[1], make.__name__
        assert any(any(data) for data in stored[0])
    allocator.close()


def check_stream_order(small: bool = False) -> None:
    """Copies see what was queued before them, and what is queued after them sees their effect; nothing else
    waits.

    Pages are overwritten right after a store was put in order, and read by a slow kernel right before a load.
    """
    blocks, block_size, hidden = 512, 16, 1024
    layers = 9
    tensors = [
        torch.zeros(2, blocks, block_size, 8, 128, dtype=torch.bfloat16, device=GPU) for _ in range(layers)
    ]
    spec = LayerSpec(block_size, 8, 128, torch.bfloat16, blocks)
    transfer = PageTransfer(describe_layers(tensors, spec))
    tokens = 4096
    slots = random_slots(blocks * block_size, tokens, block_size)
    tokens = len(slots)
    memory = torch.empty(layers, tokens, 2, hidden, dtype=torch.bfloat16, pin_memory=True)
    chunks = Chunks(addresses([memory]), np.array([0]), np.array([tokens]), slots.numpy())
    slow = torch.randn(4096, 4096, device=GPU)
    ways = TransferWay(Way.STAGED, 2), TransferWay(Way.DIRECT, 4), TransferWay(Way.STRIDED_DMA)
    for turn, way in itertools.product(range(3 if small else 25), ways):
        for tensor in tensors:
            _delay(slow)
            tensor.fill_(turn + 1)
        completion = transfer.store(chunks, way=way)
        completion.order_current_stream()
        for tensor in tensors:
            tensor.fill_(-1)
        assert completion.wait(30)
        assert bool((memory == turn + 1).all()), f"a store raced with its neighbours: {way}"

        memory.fill_(turn + 100)
        for tensor in tensors:
            tensor.fill_(7)
        _delay(slow)
        seen = [tensor.double().sum() for tensor in tensors]
        transfer.load(chunks, way=way)
        after = [tensor.double().sum() for tensor in tensors]
        per_layer = tensors[0].numel()
        moved = tokens * 2 * hidden
        for before, later in zip(seen, after, strict=True):
            assert float(before) == 7.0 * per_layer, f"a load wrote pages that a kernel still read: {way}"
            expected = 7.0 * (per_layer - moved) + float(turn + 100) * moved
            assert abs(float(later) / expected - 1) < 1e-3, f"a kernel did not see the load before it: {way}"

        memory.fill_(turn + 150)
        for tensor in tensors:
            tensor.fill_(7)
        _delay(slow)
        seen = [tensor.double().sum() for tensor in tensors]
        transfer.load_way = way
        load = in_groups_of_layers(transfer, chunks) if turn % 2 else transfer.load_by_layer(chunks)
        after = []
        for layer, tensor in enumerate(tensors):
            load.order_layer(layer)
            after.append(tensor.double().sum())
        for before, later in zip(seen, after, strict=True):
            assert float(before) == 7.0 * per_layer, (
                f"a load by layer wrote pages that were still read: {way}"
            )
            expected = 7.0 * (per_layer - moved) + float(turn + 150) * moved
            assert abs(float(later) / expected - 1) < 1e-3, f"a kernel did not see its layer: {way}"

        memory.fill_(turn + 200)
        for tensor in tensors:
            tensor.fill_(7)
        _delay(slow)
        seen = [tensor.double().sum() for tensor in tensors]
        transfer.quiet_load_way = way
        feed = transfer.feed(chunks)
        assert feed.wait(30)
        assert feed.error is None, f"{feed.error}"
        for before, tensor in zip(seen, tensors, strict=True):
            assert float(before) == 7.0 * per_layer, f"a fed load wrote pages that were still read: {way}"
            expected = 7.0 * (per_layer - moved) + float(turn + 200) * moved
            found = float(tensor.double().sum())
            assert abs(found / expected - 1) < 1e-3, f"a fed load ended before its pages were filled: {way}"

        memory.fill_(turn + 220)
        for tensor in tensors:
            tensor.fill_(7)
        _delay(slow)
        seen = [tensor.double().sum() for tensor in tensors]
        feed = transfer.feed(chunks, transfer.now())
        while not feed.queued():
            assert feed.error is None, f"{feed.error}"
        feed.order_current_stream()
        after = [tensor.double().sum() for tensor in tensors]
        for before, later in zip(seen, after, strict=True):
            assert float(before) == 7.0 * per_layer, f"a fed load did not wait for its event: {way}"
            expected = 7.0 * (per_layer - moved) + float(turn + 220) * moved
            assert abs(float(later) / expected - 1) < 1e-3, f"a kernel came before a queued load's end: {way}"
        assert feed.wait(30)


def check_events(small: bool = False) -> None:
    """They keep streams in order, also where the object is gone, or used again, before the streams are
    there."""
    slow = torch.randn(4096, 4096, device=GPU)
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    numbers = torch.zeros(1 << 20, device=GPU)
    torch.cuda.synchronize()
    handles: set[int] = set()
    for turn, sleeping in itertools.product(range(3 if small else 25), (False, True)):
        with torch.cuda.stream(streams[0]):
            _delay(slow)
            numbers.fill_(turn + 1)
        event = _native.Event(0, sleeping)
        event.record(streams[0].cuda_stream)
        late = _native.Event(0, sleeping)
        assert late.handle != event.handle
        late.record(streams[0].cuda_stream)
        event.order(streams[1].cuda_stream)
        handles.add(event.handle)
        del event
        again = _native.Event(0, sleeping)  # of the pool, while the stream still waits
        again.record(streams[1].cuda_stream)
        with torch.cuda.stream(streams[1]):
            seen = numbers.sum()
        late.wait()
        assert late.done()
        again.wait()
        assert float(seen) == float(turn + 1) * len(numbers), "a stream did not wait for its event"
        torch.cuda.synchronize()
    assert len(handles) <= 4, "events are not used again"
    default = _native.Event(0)
    for _ in range(50):
        _delay(slow)
    default.record(torch.cuda.default_stream().cuda_stream)
    assert not default.done()
    default.wait()


def check_pinning_beside_a_capture(small: bool = False) -> None:
    """Page-locking in the background neither breaks the capture of a graph nor is it broken by it."""
    region = HostRegion((64 if small else 1024) << 20, pin="Required", hold=True)
    region.prepare(4096)
    numbers = torch.arange(1000, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = numbers * 2
        region.start_pinning()
        while region.state == "Pinning":
            time.sleep(0.001)
        result += 1
    assert region.state == "Pinned", region.reason
    numbers += 5
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, numbers * 2 + 1)
    region.close()


def _delay(matrix: torch.Tensor) -> None:
    """Some milliseconds of work on the current stream."""
    for _ in range(4):
        torch.mm(matrix, matrix)


CHECKS: tuple[Callable[[bool], None], ...] = (
    check_twins,
    check_layers_in_allocations_of_their_own,
    check_offsets_above_two_to_the_31_elements,
    check_coded_rows,
    check_coded_transfers,
    check_coded_pages_are_kept_while_ways_are_measured,
    check_rotary,
    check_zero_and_copy,
    check_bulk_connectors,
    check_layerwise_connectors,
    check_blending,
    check_sglang,
    check_stream_order,
    check_events,
    check_pinning_beside_a_capture,
)


def main(arguments: list[str]) -> int:
    torch.set_num_threads(4)  # the tensors are small
    small = "--small" in arguments
    names = [name for name in arguments if not name.startswith("--")]
    failed = 0
    for check in CHECKS:
        if names and check.__name__ not in names:
            continue
        start = time.monotonic()
        try:
            check(small)
            verdict = "ok"
        except Exception as error:
            failed += 1
            verdict = f"FAILED: {type(error).__name__}: {error}"
        print(f"{check.__name__}: {verdict} ({time.monotonic() - start:.1f} s)", flush=True)  # noqa: T201
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
