# SPDX-License-Identifier: Apache-2.0
"""The host twins against plain indexing, over layouts, dtypes, block sizes and odd token counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import _native
from kvcache.gpu_connector.layout import LayerSpec, describe_layers
from tests.csrc.layouts import DTYPES, LAYOUTS, PagedKV, gather, make_kv, random_slots, scatter

# (blocks, block size, heads, head size, tokens)
SHAPES = ((9, 16, 2, 64, 77), (40, 1, 3, 8, 13), (3, 128, 1, 24, 201), (11, 7, 4, 5, 1))


def _kv(layout: str, dtype: torch.dtype, shape: tuple[int, int, int, int, int]) -> PagedKV:
    blocks, block_size, heads, head_size, _ = shape
    return make_kv(
        layout, layers=3, blocks=blocks, block_size=block_size, heads=heads, head_size=head_size, dtype=dtype
    )


def _chunks(tokens: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Spans of a mapping in random order, with a hole between some of them."""
    cuts = np.unique(np.random.default_rng().integers(0, tokens + 1, 2 * count))
    if len(cuts) < 2:
        cuts = np.array([0, tokens])
    starts, ends = cuts[:-1], cuts[1:]
    order = np.random.default_rng().permutation(len(starts))
    order = order[: max(1, len(order) - 1)]
    return starts[order].astype(np.int64), ends[order].astype(np.int64)


def _resident(memory: torch.Tensor, layers: int, planes: int, token_major: bool) -> list[torch.Tensor]:
    """The layers of one chunk's bytes as views [T, planes, row]."""
    if token_major:
        return list(memory.view(layers, -1, planes, memory.shape[-1]))
    by_plane = memory.view(planes, layers, -1, memory.shape[-1])
    return [by_plane[:, layer].transpose(0, 1) for layer in range(layers)]


def copy_engine(*arguments: Any) -> None:
    _native.StagingRing(-1, 1 << 20, 2).strided_dma(*arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("transfer", "token_major"),
    [(_native.batched_kv_transfer, True), (_native.batched_kv_transfer, False), (copy_engine, True)],
    ids=["token_major", "plane_major", "copy engine"],
)
def test_batches_equal_plain_indexing(
    layout: str, dtype: torch.dtype, token_major: bool, transfer: Callable[..., None]
) -> None:
    for shape in SHAPES:
        kv = _kv(layout, dtype, shape)
        pages = describe_layers(kv.tensors, kv.spec)
        planes, row = pages.layout.planes, pages.layout.row_bytes
        slots = random_slots(kv.slots, shape[-1], shape[1], skip=0.1)
        starts, ends = _chunks(len(slots), 4)
        memory = [
            torch.randint(0, 256, (3 * planes * int(end - start), row), dtype=torch.uint8)
            for start, end in zip(starts, ends, strict=True)
        ]
        before, pages_before = [chunk.clone() for chunk in memory], kv.snapshot()
        addresses = np.array([chunk.data_ptr() for chunk in memory], dtype=np.uint64)

        order = {} if token_major else {"token_major": False}
        transfer(pages, addresses, starts, ends, slots.numpy(), True, **order)
        for chunk, poison, start, end in zip(memory, before, starts, ends, strict=True):
            got = _resident(chunk, 3, planes, token_major)
            old = _resident(poison, 3, planes, token_major)
            for layer in range(3):
                assert torch.equal(got[layer], gather(pages_before[layer], slots[start:end], old[layer]))
        assert all(map(torch.equal, kv.snapshot(), pages_before)), "a store wrote pages"

        for chunk in memory:
            chunk.random_(0, 256)
        transfer(pages, addresses, starts, ends, slots.numpy(), False, **order)
        expected = pages_before
        for chunk, start, end in zip(memory, starts, ends, strict=True):
            data = _resident(chunk, 3, planes, token_major)
            expected = [scatter(expected[i], slots[start:end], data[i]) for i in range(3)]
        assert all(map(torch.equal, kv.snapshot(), expected))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3)], ids=str)
def test_layers_at_any_distance_move_as_boxes(order: tuple[int, ...]) -> None:
    """Rising, falling and uneven addresses: only rising ones at one distance may share a box."""
    blocks, block_size, heads, head_size = 6, 16, 2, 8
    storage = torch.randint(0, 256, (4, 2, blocks, block_size, heads, head_size), dtype=torch.uint8)
    tensors = [storage[at].view(torch.float8_e4m3fn) for at in order]
    pages = describe_layers(tensors, LayerSpec(block_size, heads, head_size, torch.float8_e4m3fn, blocks))
    slots = random_slots(blocks * block_size, 61, block_size, skip=0.1)
    span = (np.array([0]), np.array([len(slots)]), slots.numpy())
    boxes, reference = torch.randint(
        0, 256, (1, 4, len(slots), 2, heads * head_size), dtype=torch.uint8
    ).repeat(2, 1, 1, 1, 1)
    for transfer, packed in ((copy_engine, boxes), (_native.batched_kv_transfer, reference)):
        transfer(pages, np.array([packed.data_ptr()], dtype=np.uint64), *span, True)
    assert torch.equal(boxes, reference)
    boxes.random_(0, 256)
    before = storage.clone()
    copy_engine(pages, np.array([boxes.data_ptr()], dtype=np.uint64), *span, False)
    loaded = storage.clone()
    storage.copy_(before)
    _native.batched_kv_transfer(pages, np.array([boxes.data_ptr()], dtype=np.uint64), *span, False)
    assert torch.equal(storage, loaded)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_ranges_of_resident_chunks(layout: str) -> None:
    shape = SHAPES[0]
    kv = _kv(layout, torch.bfloat16, shape)
    pages = describe_layers(kv.tensors, kv.spec)
    slots = random_slots(kv.slots, shape[-1], shape[1])
    packed = torch.zeros(2, len(slots), pages.layout.planes, pages.layout.row_bytes, dtype=torch.uint8)
    span = (np.array([0]), np.array([len(slots)]))
    _native.batched_kv_transfer(
        pages,
        np.array([packed.data_ptr()], dtype=np.uint64),
        *span,
        slots.numpy(),
        True,
        layer_begin=1,
        layer_end=3,
    )
    for index, layer in enumerate((1, 2)):
        assert torch.equal(packed[index], kv.rows(layer)[slots])
    single = torch.zeros_like(packed[0])
    _native.single_layer_kv_transfer(pages, 2, single.data_ptr(), slots.numpy(), True)
    assert torch.equal(single, packed[1])


def test_kernel_blocks_are_parts_of_the_managers_blocks() -> None:
    """A tensor of 16-token blocks serves slots that count blocks of 64."""
    kv = make_kv("LBHNC", layers=1, blocks=24, block_size=16, heads=2, head_size=8, dtype=torch.float16)
    spec = type(kv.spec)(block_size=64, num_kv_heads=2, head_size=8, dtype=torch.float16, num_blocks=6)
    pages = describe_layers(kv.tensors, spec)
    assert (pages.layout.block_size, pages.layout.num_blocks) == (16, 24)
    slots = torch.tensor([64 * 5 + 63, 64 * 2 + 17, 0])
    packed = torch.zeros(3, 2, pages.layout.row_bytes, dtype=torch.uint8)
    _native.multi_layer_kv_transfer(pages, packed.data_ptr(), slots.numpy(), True)
    for token, (block, offset) in enumerate(((5 * 4 + 3, 15), (2 * 4 + 1, 1), (0, 0))):
        assert torch.equal(packed[token], kv.views[0][block, offset].reshape(2, -1))


def test_unilateral_pools() -> None:
    keys = [torch.randint(0, 256, (50, 3 * 16), dtype=torch.uint8) for _ in range(2)]
    values = [torch.randint(0, 256, (50, 3 * 16), dtype=torch.uint8) for _ in range(2)]
    layout = _native.PagedLayout(
        kv_stride=48, block_stride=48, token_stride=48, head_stride=16, heads=3, head_bytes=16, block_size=1,
        num_blocks=50, planes=2,
    )  # fmt: skip
    pages = _native.Pages.unilateral(_bases(keys), _bases(values), layout)
    slots = torch.randperm(50)[:21]
    packed = torch.zeros(2, 21, 2, 48, dtype=torch.uint8)
    _native.multi_layer_kv_transfer(pages, packed.data_ptr(), slots.numpy(), True)
    for layer in range(2):
        assert torch.equal(packed[layer, :, 0], keys[layer][slots])
        assert torch.equal(packed[layer, :, 1], values[layer][slots])


def test_offsets_above_two_to_the_31_elements() -> None:
    """Address space only: 6 GiB are mapped, a few pages of them are touched."""
    layout = _native.PagedLayout(
        kv_stride=3 << 30, block_stride=16 * 4096, token_stride=4096, head_stride=256, heads=16,
        head_bytes=256, block_size=16, num_blocks=(3 << 30) // (16 * 4096), planes=2,
    )  # fmt: skip
    region = _native.HostRegion(layout.extent)
    raw = np.frombuffer(memoryview(region), dtype=np.uint8)
    pages = _native.Pages(np.array([region.address], dtype=np.uint64), layout)
    slots = np.array([layout.num_slots - 1, 0, 700_001])
    data = torch.randint(0, 256, (3, 2, 4096), dtype=torch.uint8)
    _native.multi_layer_kv_transfer(pages, data.data_ptr(), slots, False)
    for token, slot in enumerate(slots.tolist()):
        for plane in range(2):
            at = plane * (3 << 30) + slot * 4096
            assert np.array_equal(raw[at : at + 4096], data[token, plane].numpy())
    back = torch.zeros_like(data)
    _native.multi_layer_kv_transfer(pages, back.data_ptr(), slots, True)
    assert torch.equal(back, data)
    del raw
    region.close()


def test_large_batches_take_the_streaming_copy_unharmed() -> None:
    """Above the cache's size stores bypass it; rows that start and end anywhere must survive that."""
    layout = _native.PagedLayout(
        kv_stride=40_000_003, block_stride=16 * 1237, token_stride=1237, head_stride=1237, heads=1,
        head_bytes=1237, block_size=16, num_blocks=1000, planes=2,
    )  # fmt: skip
    raw = torch.randint(0, 256, (layout.extent,), dtype=torch.uint8)
    pages = _native.Pages(_bases([raw]), layout)
    slots = torch.randperm(16000)[:9001]
    packed = torch.zeros(9001, 2, 1237, dtype=torch.uint8)
    _native.multi_layer_kv_transfer(pages, packed.data_ptr(), slots.numpy(), True)
    for plane in range(2):
        rows = raw[plane * 40_000_003 :][: 16000 * 1237].view(16000, 1237)
        assert torch.equal(packed[:, plane], rows[slots])


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        ([0, 144, 3], r"slot_mapping\[1\] is 144; slots from 0 to 143"),
        ([5, 6, -2], r"slot_mapping\[2\] is -2"),
    ],
)
@pytest.mark.parametrize("store", [True, False])
def test_slots_out_of_range_are_named_and_nothing_is_written(
    slots: list[int], text: str, store: bool
) -> None:
    kv = _kv("2BNHD", torch.float32, SHAPES[0])
    pages = describe_layers(kv.tensors, kv.spec)
    packed = torch.full((3, 3, pages.layout.token_bytes), 7, dtype=torch.uint8)
    before = kv.snapshot()
    with pytest.raises(ValueError, match=text):
        _native.multi_layer_kv_transfer(pages, packed.data_ptr(), np.array(slots), store)
    assert bool((packed == 7).all())
    assert all(map(torch.equal, kv.snapshot(), before))


def test_slots_of_blocks_are_those_of_their_tokens() -> None:
    generator = np.random.default_rng()
    for block_size in (1, 7, 16):
        blocks = [*generator.integers(0, 5000, 9).tolist(), 2**31 - 1]
        every = (np.array(blocks)[:, None] * block_size + np.arange(block_size)).reshape(-1)
        for tokens in (0, 1, 9 * block_size, 10 * block_size - block_size // 2, 10 * block_size):
            for first, end in ((0, tokens), tuple(generator.integers(0, tokens + 3, 2).tolist())):
                expected = every[:tokens].copy()
                expected[:first] = expected[end:] = -1
                slots = _native.slots_of(blocks, block_size, tokens, first, end)
                assert slots.dtype == np.int64
                assert np.array_equal(slots, expected), (blocks, block_size, tokens, first, end)


def test_blocks_that_are_none_have_no_slots() -> None:
    for blocks, tokens in (([1, 2], 33), ([], 1), ([1], -1)):
        with pytest.raises(ValueError, match="no more than the blocks have are accepted"):
            _native.slots_of(blocks, 16, tokens, 0, tokens)
    for block_size in (0, -1, 2**31):
        with pytest.raises(ValueError, match=f"0 tokens of 1 blocks of {block_size};"):
            _native.slots_of([1], block_size, 0, 0, 0)
    wrong: Any
    for wrong in (-1, 2**31, 2**70, "1", None):
        with pytest.raises(ValueError, match=r"block_ids\[1\] is no block"):
            _native.slots_of([3, wrong], 16, 32, 0, 32)


@pytest.mark.skipif(_native.cuda_available(), reason="there is a GPU")
def test_without_a_gpu_there_are_no_events() -> None:
    with pytest.raises(RuntimeError, match="CUDA"):
        _native.Event(0)


def test_bad_batches_are_refused() -> None:
    kv = _kv("2BNHD", torch.float32, SHAPES[0])
    pages = describe_layers(kv.tensors, kv.spec)
    one, two = np.array([0]), np.array([0, 1])
    address, slots = np.array([64], dtype=np.uint64), np.arange(10)
    cases: list[tuple[tuple[Any, Any, Any, Any], str]] = [
        ((address, one, np.array([11]), slots), r"chunk 0 spans tokens 0 to 11; the slot mapping has 10"),
        ((address, np.array([4]), np.array([3]), slots), "chunk 0 spans tokens 4 to 3"),
        ((address * 0, one, np.array([1]), slots), "chunk 0 has the address 0"),
        ((address, two, two, slots), "addresses, starts and ends have 1, 2 and 2 entries"),
        ((address, one, one, slots.astype(np.int32)), "slot_mapping is an array of int32"),
        ((address, one, one, np.arange(20)[::2]), "slot_mapping is an array of int64"),
        ((address.astype(np.int64), one, one, slots), "addresses is an array of int64"),
    ]
    for arguments, text in cases:
        with pytest.raises(ValueError, match=text):
            _native.batched_kv_transfer(pages, *arguments, True)
    with pytest.raises(ValueError, match="layers 2 to 4 are not within the 3 layers"):
        _native.batched_kv_transfer(pages, address, one, one, slots, True, layer_begin=2, layer_end=4)
    with pytest.raises(ValueError, match="groups of -1 layers"):
        _native.batched_kv_transfer(pages, address, one, one, slots, True, group_layers=-1)
    with pytest.raises(ValueError, match="1 events for 2 groups of layers"):
        _native.batched_kv_transfer(pages, address, one, one, slots, True, group_layers=2, events=[1])
    with pytest.raises(ValueError, match="2 events for 1 groups of layers"):
        _native.batched_kv_transfer(
            pages, address, one, one, slots, True, group_layers=2**63 - 1, events=[1, 1]
        )


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"heads": 0}, "heads is 0"),
        ({"planes": 3}, "planes is 3"),
        ({"token_stride": 15}, "token_stride is 15 bytes, below the 16 that lie within it"),
        ({"token_stride": -16}, "token_stride is -16 bytes"),
        ({"block_stride": 63}, "block_stride is 63 bytes, below the 64 that lie within it"),
        ({"heads": 2, "head_stride": 16}, "16 bytes, below the (32|64|1616) that lie within it"),
        ({"num_blocks": 1 << 30}, r"1073741824 blocks of 4 slots; at most 2\^31-1 slots are accepted"),
        ({"num_blocks": 1 << 33, "block_size": 1 << 33}, r"at most 2\^31-1 slots are accepted"),
        ({"block_stride": 1 << 62}, r"100 times; less than 2\^63 bytes in all are accepted"),
    ],
)
def test_layouts_that_cannot_be(changed: dict[str, int], text: str) -> None:
    good = {
        "kv_stride": 6400, "block_stride": 64, "token_stride": 16, "head_stride": 16, "heads": 1,
        "head_bytes": 16, "block_size": 4, "num_blocks": 100, "planes": 2,
    }  # fmt: skip
    assert _native.PagedLayout(**good).extent == 6400 + 99 * 64 + 3 * 16 + 16
    with pytest.raises(ValueError, match=text):
        _native.PagedLayout(**(good | changed))


def test_pages_that_cannot_be() -> None:
    def layout(**changed: int) -> _native.PagedLayout:
        strides = {"kv_stride": 6400, "block_stride": 64, "token_stride": 16, "head_stride": 16}
        counts = {"heads": 1, "head_bytes": 16, "block_size": 4, "num_blocks": 100, "planes": 2}
        return _native.PagedLayout(**(strides | counts | changed))

    some, none = np.array([4096, 8192], dtype=np.uint64), np.array([4096, 0], dtype=np.uint64)
    with pytest.raises(ValueError, match="layer 1 has the address 0"):
        _native.Pages(none, layout())
    for keys, values in ((some, none), (none, some)):
        with pytest.raises(ValueError, match="layer 1 has the address 0"):
            _native.Pages.unilateral(keys, values, layout())
    with pytest.raises(ValueError, match=r"device is -2; .* -1 \(host memory\) are accepted"):
        _native.Pages(some, layout(), -2)
    values_in_keys = layout(kv_stride=6399)
    with pytest.raises(ValueError, match="kv_stride is 6399 bytes, below the 6400 that lie within it"):
        _native.Pages(some, values_in_keys)
    assert _native.Pages.unilateral(some, some, values_in_keys).num_layers == 2, "each pool has its own base"


def test_spans_at_no_address_are_refused() -> None:
    nowhere, sizes = np.zeros(2, dtype=np.uint64), np.array([0, 5])
    with pytest.raises(ValueError, match=r"targets\[1\] is the address 0"):
        _native.copy_spans(nowhere, nowhere, sizes)
    with pytest.raises(ValueError, match=r"addresses\[1\] is the address 0"):
        _native.zero_spans(nowhere, sizes)
    with pytest.raises(ValueError, match=r"sizes\[0\] is -1"):
        _native.zero_spans(nowhere, np.array([-1, 0]))
    _native.zero_spans(nowhere, np.zeros(2, dtype=np.int64))


def _bases(tensors: list[torch.Tensor]) -> np.ndarray:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
