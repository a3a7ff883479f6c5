# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from kvcache.gpu_connector import layout as module
from kvcache.gpu_connector.layout import (
    LayerSpec,
    UnknownLayout,
    describe_layer,
    describe_layers,
    joined_where_pages_are,
    verify_code,
    verify_layout,
)
from tests.csrc.layouts import DTYPES, KV_LAYOUTS, LAYOUTS, PLAIN_LAYOUTS, axes_of, make_kv

sized = partial(make_kv, layers=3, blocks=6, block_size=4, heads=5, head_size=8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_off_and_verified(layout: str, dtype: torch.dtype) -> None:
    kv = sized(layout, dtype=dtype)
    pages = describe_layers(kv.tensors, kv.spec)
    got = pages.layout
    assert (got.block_size, got.num_blocks, got.planes) == (4, 6, kv.spec.planes)
    assert got.planes == (1 if layout.startswith(("MLA", "joined")) else 2)
    assert got.heads * got.head_bytes == kv.spec.hidden * dtype.itemsize
    before = kv.snapshot()
    for tensor, view in zip(kv.tensors, kv.views, strict=True):
        at = got.block_stride * 5 + got.token_stride * 3 + got.head_stride * (got.heads - 1)
        at += got.kv_stride * (got.planes - 1)
        assert tensor.data_ptr() + at == view[5, 3, -1, -1].data_ptr()
        verify_layout(tensor, kv.spec)
    assert all(map(torch.equal, kv.snapshot(), before)), "verification left other bytes"


def test_fp8_may_come_as_bytes() -> None:
    kv = sized("2BNHD", dtype=torch.float8_e4m3fn)
    as_bytes = [tensor.view(torch.uint8) for tensor in kv.tensors]
    assert describe_layers(as_bytes, kv.spec).layout == describe_layers(kv.tensors, kv.spec).layout
    declared = replace(kv.spec, dtype=torch.uint8)
    assert describe_layers(kv.tensors, declared).layout == describe_layers(kv.tensors, kv.spec).layout


def test_ambiguous_axes_are_refused_until_declared() -> None:
    """As many heads as tokens in a block: the shape cannot tell NHD from HND."""
    kv = make_kv("2BNHD", layers=1, blocks=6, block_size=4, heads=4, head_size=8, dtype=torch.float16)
    with pytest.raises(UnknownLayout, match="fits 2BNHD and 2BHND"):
        describe_layer(kv.tensors[0], kv.spec)
    declared = replace(kv.spec, axes="2BNHD")
    layout = describe_layer(kv.tensors[0], declared)
    assert (layout.head_stride, layout.token_stride) == (16, 64)


def test_two_blocks_could_be_key_and_value() -> None:
    kv = make_kv("2BNHD", layers=1, blocks=2, block_size=4, heads=5, head_size=8, dtype=torch.float16)
    with pytest.raises(UnknownLayout, match="fits 2BNHD and B2NHD"):
        describe_layer(kv.tensors[0], kv.spec)


def test_one_head_reads_the_same_either_way() -> None:
    """With one head NHD and HND are the same strides: nothing is ambiguous."""
    kv = make_kv("2BNHD", layers=1, blocks=6, block_size=4, heads=1, head_size=8, dtype=torch.float16)
    assert describe_layer(kv.tensors[0], kv.spec).token_stride == 16


SPEC = LayerSpec(block_size=4, num_kv_heads=5, head_size=8, dtype=torch.float16, num_blocks=6)


@pytest.mark.parametrize(
    ("tensor", "spec", "text"),
    [
        (torch.empty(6, 4, 5, 8, dtype=torch.float16), SPEC, "fits none of 2BNHD, B2NHD"),
        (torch.empty(3, 6, 4, 5, 8, dtype=torch.float16), SPEC, "fits none"),
        (torch.empty(2, 7, 4, 5, 8, dtype=torch.float16), SPEC, "fits none"),
        (torch.empty(2, 6, 4, 5, 9, dtype=torch.float16), SPEC, "fits none"),
        (torch.empty(2, 6, 4, 5, 8, dtype=torch.float32), SPEC, "4 bytes an element"),
        (torch.empty(2, 6, 4, 5, 8, dtype=torch.bfloat16), SPEC, r"of torch.bfloat16; .* says torch.float16"),
        (torch.empty(2, 6, 4, 5, 8, dtype=torch.int16), SPEC, "of torch.int16; float64, float32, bfloat16, "),
        (torch.empty(2, 6, 4, 5, 8, dtype=torch.int64), replace(SPEC, dtype=torch.int64), "torch.int64; "),
        (torch.empty(2, 6, 4, 5, 16, dtype=torch.float16)[..., ::2], SPEC, "fits none"),
        (torch.empty(1, 6, 4, 5, 8, dtype=torch.float16).expand(2, 6, 4, 5, 8), SPEC, "overlap"),
        (torch.empty(2, 6, 4, 5, 12, dtype=torch.float16)[..., :8], SPEC, "gaps"),
        (torch.empty(6, 4, 40, dtype=torch.float16), replace(SPEC, use_mla=True), "fits none of BNC"),
        (torch.empty(2, 6, 4, 5, 8, dtype=torch.float16), replace(SPEC, axes="NHD2B"), "are declared"),
        (torch.empty(2, 6, 4, 5, 8, dtype=torch.float16), replace(SPEC, axes="B2NHD"), "fits none of B2NHD"),
    ],
)  # fmt: skip
def test_unknown_tensors_are_refused(tensor: torch.Tensor, spec: LayerSpec, text: str) -> None:
    with pytest.raises(UnknownLayout, match=text):
        describe_layer(tensor, spec)


def test_only_the_cpu_and_cuda_are_copied_natively() -> None:
    """The number of another device would be taken for that of a GPU."""
    with pytest.raises(UnknownLayout, match="KV tensors on meta; cpu and cuda are accepted"):
        describe_layers([torch.empty(2, 6, 4, 5, 8, dtype=torch.float16, device="meta")], SPEC)


def test_padded_pages_are_refused() -> None:
    """A block stride of twice the page with nobody's layer between: padding."""
    storage = torch.empty(2, 6, 2, 5 * 4 * 16, dtype=torch.float16)
    layers = [storage[layer, :, 0].view(6, 5, 4, 16) for layer in range(2)]
    with pytest.raises(UnknownLayout, match="padded or shared"):
        describe_layers(layers, SPEC)


def test_layers_between_blocks_are_accepted_only_if_all_are_there() -> None:
    kv = sized("BLHNC", dtype=torch.float16)
    spec = kv.spec
    assert describe_layers(kv.tensors, spec).num_layers == 3
    with pytest.raises(UnknownLayout, match="padded or shared"):
        describe_layers(kv.tensors[:2], spec)


def test_layers_that_share_memory_are_refused() -> None:
    kv = sized("2BNHD", dtype=torch.float16)
    with pytest.raises(UnknownLayout, match="share memory"):
        describe_layers([kv.tensors[0], kv.tensors[1], kv.tensors[0]], kv.spec)


def test_layers_that_differ_are_refused() -> None:
    kv, other = sized("2BNHD", dtype=torch.float16), sized("B2NHD", dtype=torch.float16)
    with pytest.raises(UnknownLayout, match="layer 1 lies as"):
        describe_layers([kv.tensors[0], other.tensors[0]], kv.spec)
    with pytest.raises(UnknownLayout, match="no KV tensors"):
        describe_layers([], kv.spec)


def test_verification_finds_a_wrong_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """With strides of another layout the read-back differs, and the pages are put back."""
    kv = sized("2BNHD", dtype=torch.float16)
    axes, right = module._match(kv.tensors[0], kv.spec)
    wrong = module.PagedLayout(
        kv_stride=right.kv_stride, block_stride=right.block_stride, token_stride=right.head_bytes,
        head_stride=right.head_bytes * right.block_size, heads=right.heads, head_bytes=right.head_bytes,
        block_size=right.block_size, num_blocks=right.num_blocks, planes=2,
    )  # fmt: skip
    monkeypatch.setattr(module, "_match", lambda tensor, spec: (axes, wrong))
    before = kv.snapshot()
    with pytest.raises(UnknownLayout, match="gave other bytes"):
        verify_layout(kv.tensors[0], kv.spec)
    assert all(map(torch.equal, kv.snapshot(), before))


@pytest.mark.parametrize("layout", KV_LAYOUTS)
def test_rows_are_joined_where_blocks_of_the_pages_are_runs_of_tokens(layout: str) -> None:
    kv = sized(layout, dtype=torch.bfloat16)
    spec = joined_where_pages_are(replace(kv.spec, axes=axes_of(layout)), kv.tensors[0])
    assert spec.joined == (layout in {"LBNHC", "BLNHC", "BNHC"})
    assert spec.chunk_token_bytes == kv.spec.chunk_token_bytes == kv.token_bytes
    pages = spec.register(kv.tensors)
    layer = pages.layout
    assert not spec.joined or layer.token_stride == layer.row_bytes == kv.token_bytes
    for single in (replace(kv.spec, coded=True), replace(kv.spec, use_mla=True)):
        assert joined_where_pages_are(single, kv.tensors[0]) is single
        with pytest.raises(ValueError, match="joined rows that are coded, or of MLA"):
            replace(single, joined=True)


def test_only_a_head_that_holds_both_can_be_joined() -> None:
    kv = sized("2BNHD", dtype=torch.bfloat16)
    with pytest.raises(UnknownLayout, match="fits none of"):
        describe_layer(kv.tensors[0], replace(kv.spec, joined=True))


def test_key_and_value_on_an_axis_of_their_own_are_not_joined() -> None:
    """Though a head's lie side by side in memory."""
    storage = torch.zeros(6, 4, 5, 2, 8, dtype=torch.float16)
    tensor = storage.permute(3, 0, 1, 2, 4)
    spec = joined_where_pages_are(SPEC, tensor)
    assert not spec.joined
    assert spec.register([tensor]).layout.planes == 2


def test_rows_of_one_head_are_as_they_are() -> None:
    kv = make_kv("LBNHC", layers=2, blocks=6, block_size=4, heads=1, head_size=8, dtype=torch.float16)
    assert joined_where_pages_are(kv.spec, kv.tensors[0]) is kv.spec


@pytest.mark.parametrize("layout", PLAIN_LAYOUTS)
def test_codes_are_verified_and_the_pages_put_back(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = sized(layout, heads=5, head_size=64, dtype=torch.bfloat16)
    spec = replace(kv.spec, axes=axes_of(layout), coded=True)
    assert spec.can_be_coded
    before = kv.snapshot()
    for tensor in kv.tensors:
        verify_code(tensor, spec)
    assert all(map(torch.equal, kv.snapshot(), before))

    coded = module._coded

    def other(numbers: torch.Tensor) -> torch.Tensor:
        code = coded(numbers)
        code[-1, -1, -1] ^= 1
        return code

    monkeypatch.setattr(module, "_coded", other)
    with pytest.raises(UnknownLayout, match="are not those of the host"):
        verify_code(kv.tensors[0], spec)
    assert all(map(torch.equal, kv.snapshot(), before))


@pytest.mark.parametrize(
    ("dtype", "heads", "head_size", "expected"),
    [
        (torch.bfloat16, 1, 64, True),
        (torch.bfloat16, 3, 32, True),
        (torch.bfloat16, 1, 32, False),  # its code is no shorter
        (torch.bfloat16, 1, 80, False),
        (torch.bfloat16, 16, 4, False),
        (torch.float16, 8, 128, False),
        (torch.float8_e4m3fn, 8, 128, False),
    ],
)
def test_which_rows_can_be_coded(dtype: torch.dtype, heads: int, head_size: int, expected: bool) -> None:
    assert LayerSpec(16, heads, head_size, dtype, 10).can_be_coded is expected
