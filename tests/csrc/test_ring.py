# SPDX-License-Identifier: Apache-2.0
"""The staging ring (here in host memory) moves the same bytes as a direct copy, however a batch is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcache import _native
from kvcache.gpu_connector.layout import describe_layers
from tests.csrc.layouts import LAYOUTS, make_kv, random_slots

LAYERS = 3


@pytest.mark.parametrize("skip", [0.0, 0.2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ring_equals_direct(layout: str, skip: float) -> None:
    kv = make_kv(layout, layers=LAYERS, blocks=12, block_size=8, heads=2, head_size=12, dtype=torch.bfloat16)
    pages = describe_layers(kv.tensors, kv.spec)
    token = pages.layout.token_bytes
    slots = random_slots(kv.slots, 70, 8, skip=skip).numpy()
    starts, ends = np.array([0, 16, 32, 48]), np.array([16, 32, 48, 61])
    # A slot of one token, of some tokens of a layer, of a layer or two, of a chunk or two, of all.
    for slot_bytes in (token, 5 * token + 7, 20 * token, 40 * token, 100 * token, 1000 * token):
        ring = _native.StagingRing(-1, slot_bytes, 3)
        chunks = [torch.randint(0, 256, (LAYERS, 16, token), dtype=torch.uint8) for _ in starts]
        twins = [chunk.clone() for chunk in chunks]
        _native.batched_kv_transfer(pages, addresses(chunks), starts, ends, slots, True)
        ring.transfer(pages, addresses(twins), starts, ends, slots, True)
        assert all(map(torch.equal, chunks, twins)), f"store through slots of {slot_bytes}"

        for chunk, twin in zip(chunks, twins, strict=True):
            twin.copy_(chunk.random_(0, 256))
        before = kv.snapshot()
        _native.batched_kv_transfer(pages, addresses(chunks), starts, ends, slots, False)
        expected = kv.snapshot()
        for view, rows in zip(kv.views, before, strict=True):
            view.copy_(rows.view(view.shape[0], view.shape[1], view.shape[2], view.shape[3], -1))
        ring.transfer(pages, addresses(twins), starts, ends, slots, False)
        assert all(map(torch.equal, kv.snapshot(), expected)), f"load through slots of {slot_bytes}"


def test_layer_ranges() -> None:
    kv = make_kv("2BNHD", layers=LAYERS, blocks=12, block_size=8, heads=2, head_size=12, dtype=torch.float32)
    pages = describe_layers(kv.tensors, kv.spec)
    slots = random_slots(kv.slots, 30, 8)
    chunk = torch.zeros(1, 30, 2, pages.layout.row_bytes, dtype=torch.uint8)
    ring = _native.StagingRing(-1, 7 * pages.layout.token_bytes, 2)
    ring.transfer(
        pages,
        addresses([chunk]),
        np.array([0]),
        np.array([30]),
        slots.numpy(),
        True,
        layer_begin=1,
        layer_end=2,
    )
    assert torch.equal(chunk[0], kv.rows(1)[slots])


def test_bad_rings_and_batches_are_refused() -> None:
    kv = make_kv("2BNHD", layers=1, blocks=2, block_size=8, heads=2, head_size=12, dtype=torch.float32)
    spec = kv.spec
    pages = describe_layers(kv.tensors, type(spec)(**{**vars(spec), "axes": "2BNHD"}))
    with pytest.raises(ValueError, match="a ring of 0 slots of 64 bytes"):
        _native.StagingRing(-1, 64, 0)
    with pytest.raises(ValueError, match="a ring of 4 slots of 0 bytes"):
        _native.StagingRing(-1, 0, 4)
    with pytest.raises(ValueError, match="change streams after -1 slots"):
        _native.StagingRing(-1, 64, 4, turn=-1)
    for slot_bytes in (1 << 62, (1 << 64) - 100):
        with pytest.raises(ValueError, match=r"a ring of 4 slots of \d+ bytes; less than 2\^63 bytes"):
            _native.StagingRing(-1, slot_bytes, 4)
    chunk = torch.full((192,), 7, dtype=torch.uint8)
    one, slots = (np.array([0]), np.array([1])), np.array([99])
    ring = _native.StagingRing(-1, 1 << 20, 2)
    with pytest.raises(ValueError, match=r"slot_mapping\[0\] is 99"):
        ring.transfer(pages, addresses([chunk]), *one, slots, True)
    # 8 heads of 64 float32 make a token of 4 KiB, above a slot of 256 bytes.
    wide = make_kv("2BNHD", layers=1, blocks=3, block_size=4, heads=8, head_size=64, dtype=torch.float32)
    with pytest.raises(ValueError, match="a ring slot of 256 bytes holds no token of 4096 bytes"):
        _native.StagingRing(-1, 1, 2).transfer(
            describe_layers(wide.tensors, wide.spec), addresses([chunk]), *one, np.array([0]), True
        )
    assert bool((chunk == 7).all())


def addresses(chunks: list[torch.Tensor]) -> np.ndarray:
    return np.array([chunk.data_ptr() for chunk in chunks], dtype=np.uint64)
