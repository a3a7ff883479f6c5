# SPDX-License-Identifier: Apache-2.0
"""Coded rows: the bytes that their description says, and back bit for bit, by every way that the host has."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvcache import _native
from tests.csrc import coded
from tests.csrc.layouts import MLA_LAYOUTS, PLAIN_LAYOUTS, make_kv, random_slots


def by_ring(slot_tokens: int, pages: _native.Pages, *arguments: Any, refused: int) -> None:
    ring = _native.StagingRing(-1, slot_tokens * pages.chunk_token_bytes, 2)
    ring.transfer(pages, *arguments, refused=refused)


WAYS: dict[str, Callable[..., None]] = {
    "batched": _native.batched_kv_transfer,
    "small ring": partial(by_ring, 1),
    "ring": partial(by_ring, 50),
}


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_chunks_hold_what_is_described_and_pages_get_it_back(way: str, data: st.DataObject) -> None:
    heads, head_size = data.draw(
        st.sampled_from([(1, 64), (2, 32), (3, 64), (5, 128), (8, 8), (1, 576), (2, 160)])
    )
    block_size, blocks = data.draw(st.sampled_from([(1, 40), (7, 9), (16, 3)]))
    layout, layers = data.draw(st.sampled_from(PLAIN_LAYOUTS)), data.draw(st.integers(1, 3))
    kv = coded.kv(
        layout, layers=layers, blocks=blocks, block_size=block_size,
        heads=heads, head_size=head_size, seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    assume(kv.views[0].shape[3] * head_size % 64 == 0)  # one head where the layout is of MLA
    pages, before = coded.pages_of(kv), kv.snapshot()
    slots = random_slots(kv.slots, data.draw(st.integers(1, kv.slots)), block_size, skip=0.2)
    cuts = sorted({0, len(slots), *data.draw(st.lists(st.integers(0, len(slots)), max_size=3))})
    starts, ends = np.array(list(itertools.pairwise(cuts)), dtype=np.int64).T.copy()
    planes, row = before[0].shape[1], pages.chunk_row_bytes
    memory = [torch.randint(0, 256, (layers, int(n), planes, row)).byte() for n in ends - starts]
    poison = [chunk.clone() for chunk in memory]
    addresses = np.array([chunk.data_ptr() for chunk in memory], dtype=np.uint64)
    arguments = (pages, addresses, starts, ends, slots.numpy())
    refused = np.zeros(len(starts), dtype=np.int32)

    WAYS[way](*arguments, True, refused=refused.ctypes.data)
    assert not refused.any()
    assert all(map(torch.equal, kv.snapshot(), before)), "a store wrote pages"
    for chunk, old, start, end in zip(memory, poison, starts, ends, strict=True):
        for layer, token, plane in np.ndindex(layers, int(end - start), planes):
            slot, found = int(slots[start + token]), chunk[layer, token, plane]
            if slot < 0:
                assert torch.equal(found, old[layer, token, plane]), "a skipped token was written"
            else:
                bits = before[layer][slot, plane].numpy().view(np.uint16)
                assert found.numpy().tobytes() == coded.encode(bits)

    mine = torch.zeros(kv.slots, dtype=torch.bool)
    for start, end in zip(starts, ends, strict=True):
        chosen = slots[start:end]
        mine[chosen[chosen >= 0]] = True
    loads = [partial(WAYS[way], *arguments, False, refused=0)]
    if pages.expands_in_place:
        loads.append(partial(in_place, data.draw(st.integers(1, 20)) * row, *arguments))
    for load in loads:
        for view in kv.views:
            view.fill_(0xA5)
        load()
        for rows, was in zip(kv.snapshot(), before, strict=True):
            assert torch.equal(rows[mine], was[mine])
            assert bool((rows[~mine] == 0xA5).all()), "a load wrote pages of others"


def in_place(portion: int, pages: _native.Pages, *arguments: Any) -> None:
    """The layers in two calls, as a load by layer makes them."""
    addresses, starts, ends, slots = arguments
    ring = _native.StagingRing(-1, portion, 2)
    half = pages.num_layers // 2
    skipped = (ends - starts).astype(np.uint64) * np.uint64(half * pages.chunk_token_bytes)
    ring.strided_dma(pages, addresses + skipped, starts, ends, slots, False, layer_begin=half)
    if half:
        ring.strided_dma(pages, addresses, starts, ends, slots, False, layer_end=half)
        _native.expand_in_place(pages, *arguments, layer_end=half)
    _native.expand_in_place(pages, *arguments, layer_begin=half)


@pytest.mark.parametrize("layout", PLAIN_LAYOUTS)
def test_rows_expand_in_place_where_a_tokens_fill_all_bytes_up_to_the_next(layout: str) -> None:
    fills = layout in ("LBNHC", "BLNHC", "BNHC", *MLA_LAYOUTS)
    kv = coded.kv(layout, layers=2, blocks=3, block_size=4, heads=3, head_size=64, seed=0)
    assert coded.pages_of(kv).expands_in_place == fills


def test_each_of_the_65_536_elements_comes_back() -> None:
    """Beside others that are larger, smaller and zero: by a code, and as one that escapes."""
    everything = np.arange(1 << 16, dtype=np.uint16)
    seen, smaller = np.zeros((2, 1 << 16), dtype=bool), 0
    for neighbour in (everything & 0x7F80, 0x0000, 0x0480, 0x3F80, 0x7F00):
        rows = np.full((64, 1 << 16), neighbour, dtype=np.uint16).T.copy()
        rows[:, 5:8] = everything[:, None]
        found = coded.escapes(rows)
        fits = found.sum(axis=1) <= coded.capacity(64)
        check_rows(rows[fits])
        # Larger than the others by more than a code says, and by less than the bases that are tried.
        above = [at for at in np.flatnonzero(~fits)[::97] if coded.encode(rows[at]) is not None]
        smaller += len(above)
        if above:
            check_rows(rows[above])
        seen[0] |= fits & ~found[:, 5]
        seen[1] |= fits & found[:, 5]
    assert smaller > 0
    exponents = everything >> 7 & 255
    assert seen[0][exponents < 255].all()
    assert seen[1][(exponents < 240) | (exponents == 255)].all()


def check_rows(rows: np.ndarray) -> None:
    count, elements = rows.shape
    kv = make_kv(
        "2BNHD", layers=1, blocks=count, block_size=1, heads=1, head_size=elements, dtype=torch.bfloat16
    )
    for plane in range(2):
        kv.views[0][:, 0, plane, 0].copy_(torch.from_numpy(rows.view(np.uint8)))
    pages = coded.pages_of(kv)
    memory = np.zeros((count, 2, pages.chunk_row_bytes), dtype=np.uint8)
    refused = np.zeros(1, dtype=np.int32)
    arguments = (
        pages,
        np.array([memory.ctypes.data], dtype=np.uint64),
        np.array([0]),
        np.array([count]),
        np.arange(count),
    )
    _native.batched_kv_transfer(*arguments, True, refused=refused.ctypes.data)
    assert refused[0] == 0
    for index in np.random.default_rng(0).integers(0, count, 200):
        assert memory[index, 1].tobytes() == coded.encode(rows[index])
    kv.storage.fill_(0xA5)
    _native.batched_kv_transfer(*arguments, False)
    for plane in range(2):
        assert np.array_equal(kv.views[0][:, 0, plane, 0].numpy().view(np.uint16), rows)


@pytest.mark.parametrize("elements", [64, 256, 320, 1024])
def test_a_chunk_with_a_row_of_which_one_too_many_escape_is_refused(elements: int) -> None:
    starts, ends = np.array([4, 0, 2]), np.array([6, 2, 4])
    for beyond, expected in ((0, 0), (1, 1)):
        row = np.full(elements, 0x4000, dtype=np.uint16)
        row[-coded.capacity(elements) - beyond :] = 0x0080  # 2^-126 beside 2
        assert (coded.encode(row) is None) == bool(expected)
        kv = make_kv(
            "2BNHD", layers=2, blocks=3, block_size=2, heads=1, head_size=elements, dtype=torch.bfloat16
        )
        kv.storage.zero_()
        kv.views[1][1, 1, 1, 0].copy_(torch.from_numpy(row.view(np.uint8)))
        pages, refused = coded.pages_of(kv), np.zeros(3, dtype=np.int32)
        memory = np.zeros((3, 2 * 2 * pages.chunk_token_bytes), dtype=np.uint8)
        at = np.array([chunk.ctypes.data for chunk in memory], dtype=np.uint64)
        for way in WAYS.values():
            refused[:] = 0
            way(pages, at, starts, ends, np.arange(6), True, refused=refused.ctypes.data)
            assert refused.tolist() == [0, 0, expected]


def test_a_row_with_a_few_large_elements_has_a_smaller_base() -> None:
    """As keys have whose channels differ: over the largest exponent too many others would escape."""
    generator = np.random.default_rng()
    values = generator.normal(size=(64, 256)).astype(np.float32)
    values[:, :3] *= 2.0**13
    rows = (values.view(np.uint32) >> 16).astype(np.uint16)
    over_the_largest = coded.escapes(rows).sum(axis=1) <= coded.capacity(256)
    assert not over_the_largest.all(), "none of these rows needs another base"
    check_rows(rows)


def test_what_cannot_be_coded_is_refused_before_anything_is_written() -> None:
    kv = make_kv("2BNHD", layers=1, blocks=2, block_size=4, heads=1, head_size=64, dtype=torch.bfloat16)
    pages = coded.pages_of(kv)
    assert (pages.coded, pages.uncoded().coded) == (True, False)
    assert pages.chunk_row_bytes == _native.coded_row_bytes(64) == 64 + 32 + 16
    memory = np.full(8 * pages.chunk_token_bytes, 7, dtype=np.uint8)
    arguments = (
        pages,
        np.array([memory.ctypes.data], dtype=np.uint64),
        np.array([0]),
        np.array([8]),
        np.arange(8),
    )
    with pytest.raises(ValueError, match="without the address of numbers"):
        _native.batched_kv_transfer(*arguments, True)
    with pytest.raises(ValueError, match="token-major chunks are accepted"):
        _native.batched_kv_transfer(*arguments, True, token_major=False, refused=memory.ctypes.data)
    with pytest.raises(ValueError, match="into pages whose tokens lie side by side"):
        _native.StagingRing(-1, 1 << 20, 2).strided_dma(*arguments, False)
    with pytest.raises(ValueError, match="do not expand in place"):
        _native.expand_in_place(*arguments)
    assert (memory == 7).all()
    short = make_kv("2BNHD", layers=1, blocks=2, block_size=4, heads=1, head_size=48, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="rows of 1 heads of 96 bytes"):
        coded.pages_of(short)
