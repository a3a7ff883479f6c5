# SPDX-License-Identifier: Apache-2.0
"""Any layout, data type, block size, token count and cut into chunks, by every way that the host has."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import _native
from kvcache.gpu_connector.layout import describe_layers
from kvcache.gpu_connector.sglang import PoolSpec
from tests.csrc.layouts import DTYPES, LAYOUTS, axes_of, gather, make_kv, random_slots, scatter

POOLS = ("SGLang pools", "SGLang MLA pools")
BLOCK_SIZES = (1, 2, 3, 4, 8, 15, 16, 17, 32, 48, 64, 100, 128)


@dataclass
class Case:
    """Pages, and a slot mapping that is cut into chunks with holes between some of them."""

    pages: _native.Pages
    rows: Callable[[int], torch.Tensor]
    """A layer's bytes as [slots, planes, bytes of a row]."""
    held: list[torch.Tensor]
    """The engine's tensors: the pages are addresses alone."""
    slots: torch.Tensor
    starts: np.ndarray
    ends: np.ndarray

    def snapshot(self) -> list[torch.Tensor]:
        return [self.rows(layer).clone() for layer in range(self.pages.num_layers)]

    def memory(self) -> list[torch.Tensor]:
        """Random bytes for each chunk, [layers, T, planes, row]."""
        layout = self.pages.layout
        return [
            torch.randint(0, 256, (self.pages.num_layers, count, layout.planes, layout.row_bytes)).byte()
            for count in (self.ends - self.starts).tolist()
        ]


@st.composite
def cases(draw: st.DrawFn, layouts: tuple[str, ...]) -> Case:
    layout, dtype = draw(st.sampled_from(layouts)), draw(st.sampled_from(DTYPES))
    block_size = 1 if layout in POOLS else draw(st.sampled_from(BLOCK_SIZES))
    layers, heads, head_size = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 40))
    blocks = draw(st.integers(max(1, 3 // block_size), max(3, 160 // block_size)))
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    if layout in POOLS:
        pages, rows, held = pools(layout, dtype, layers, heads, head_size, slots=blocks)
    else:
        kv = make_kv(
            layout, layers=layers, blocks=blocks, block_size=block_size, heads=heads, head_size=head_size,
            dtype=dtype,
        )  # fmt: skip
        spec = replace(kv.spec, axes=axes_of(layout))
        pages, rows, held = describe_layers(kv.tensors, spec), kv.rows, kv.tensors
    total = blocks * block_size
    tokens = draw(st.integers(1, total))
    slots = random_slots(total, tokens, block_size, skip=draw(st.sampled_from((0.0, 0.2, 1.0))))
    cuts = sorted(draw(st.sets(st.integers(0, len(slots)), max_size=5)) | {0, len(slots)})
    spans = draw(st.permutations(list(itertools.pairwise(cuts))))[: draw(st.integers(1, 6))]
    starts, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T.copy()
    return Case(pages, rows, held, slots, starts, ends)


def pools(
    layout: str, dtype: torch.dtype, layers: int, heads: int, head_size: int, slots: int
) -> tuple[_native.Pages, Callable[[int], torch.Tensor], list[torch.Tensor]]:
    """SGLang's: keys and values apart, each row with a rest that belongs to nobody."""
    mla = layout == "SGLang MLA pools"
    heads, planes = (1, 1) if mla else (heads, 2)
    width = head_size * dtype.itemsize
    whole = torch.randint(0, 256, (planes * layers, slots, heads, width + 2 * dtype.itemsize)).byte()
    views = [pool[..., :width] for pool in whole]
    spec = PoolSpec(heads, head_size, dtype, use_mla=mla)
    held = [view.view(dtype) for view in views]

    def rows(layer: int) -> torch.Tensor:
        of_planes = [views[plane * layers + layer].reshape(slots, -1) for plane in range(planes)]
        return torch.stack(of_planes, dim=1)

    return spec.register(held), rows, held


def by_layer(
    pages: _native.Pages,
    addresses: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    slots: np.ndarray,
    store: bool,
) -> None:
    """Layer for layer, as the layerwise connectors call it."""
    size = (ends - starts) * pages.layout.token_bytes
    for layer in range(pages.num_layers):
        at = addresses + (layer * size).astype(np.uint64)
        _native.batched_kv_transfer(
            pages, at, starts, ends, slots, store, layer_begin=layer, layer_end=layer + 1
        )


def by_ring(slot_tokens: int, pages: _native.Pages, *arguments: Any) -> None:
    """Through a ring whose slots hold `slot_tokens` tokens of one layer."""
    _native.StagingRing(-1, slot_tokens * pages.layout.token_bytes, 2).transfer(pages, *arguments)


def by_copy_engine(slot_tokens: int, pages: _native.Pages, *arguments: Any) -> None:
    """In portions of a ring's slots, which it goes past."""
    _native.StagingRing(-1, slot_tokens * pages.layout.token_bytes, 2).strided_dma(pages, *arguments)


WAYS: dict[str, Callable[..., None]] = {
    "batched": _native.batched_kv_transfer,
    "by layer": by_layer,
    "small ring": partial(by_ring, 1),
    "ring": partial(by_ring, 50),
    "small portions": partial(by_copy_engine, 1),
    "portions": partial(by_copy_engine, 50),
}


@pytest.mark.parametrize("way", WAYS)
@given(case=cases(LAYOUTS + POOLS))
@settings(max_examples=60, deadline=None)
def test_every_way_equals_plain_indexing(way: str, case: Case) -> None:
    move, memory = WAYS[way], case.memory()
    addresses = np.array([chunk.data_ptr() for chunk in memory], dtype=np.uint64)
    arguments = (case.pages, addresses, case.starts, case.ends, case.slots.numpy())
    poison, pages = [chunk.clone() for chunk in memory], case.snapshot()

    move(*arguments, True)
    for chunk, old, start, end in zip(memory, poison, case.starts, case.ends, strict=True):
        for layer, rows in enumerate(pages):
            assert torch.equal(chunk[layer], gather(rows, case.slots[start:end], old[layer]))
    assert all(map(torch.equal, case.snapshot(), pages)), "a store wrote pages"

    for chunk in memory:
        chunk.random_(0, 256)
    kept = [chunk.clone() for chunk in memory]
    move(*arguments, False)
    expected = pages
    for chunk, start, end in zip(memory, case.starts, case.ends, strict=True):
        slots = case.slots[start:end]
        expected = [scatter(rows, slots, chunk[layer]) for layer, rows in enumerate(expected)]
    assert all(map(torch.equal, case.snapshot(), expected))
    assert all(map(torch.equal, memory, kept)), "a load wrote chunks"
