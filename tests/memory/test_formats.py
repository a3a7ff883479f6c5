# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from kvcache.memory.formats import MemoryFormat

SHAPES = {
    MemoryFormat.KV_LT2D: [5, 7, 2, 11],
    MemoryFormat.KV_LTD: [5, 7, 11],
    MemoryFormat.KV_T2D: [7, 2, 11],
    MemoryFormat.KV_2TD: [2, 7, 11],
    MemoryFormat.KV_2LTD: [2, 5, 7, 11],
    MemoryFormat.KV_MLA_FMT: [7, 11],
}


@pytest.mark.parametrize("fmt", MemoryFormat)
def test_shapes_and_token_dimensions(fmt: MemoryFormat) -> None:
    shape = fmt.shape(tokens=7, hidden=11, layers=5)
    assert list(shape) == SHAPES[fmt]
    assert fmt.num_tokens(shape) == 7
    assert shape[fmt.token_dim] == 7
    assert fmt.num_dims == len(shape)


def test_layer_slices_of_the_resident_formats_are_the_layer_formats() -> None:
    whole = torch.arange(5 * 7 * 2 * 11).view(MemoryFormat.KV_LT2D.shape(tokens=7, hidden=11, layers=5))
    assert whole[3].is_contiguous()
    assert whole[3].shape == MemoryFormat.KV_T2D.shape(tokens=7, hidden=11)


def test_only_formats_with_the_planes_outside_are_not_token_major() -> None:
    apart = {fmt for fmt in MemoryFormat if not fmt.token_major}
    assert apart == {MemoryFormat.KV_2TD, MemoryFormat.KV_2LTD}


@pytest.mark.parametrize(
    ("fmt", "shape"),
    [
        (MemoryFormat.KV_T2D, [7, 3, 11]),
        (MemoryFormat.KV_2TD, [7, 2, 11]),
        (MemoryFormat.KV_MLA_FMT, [1, 7, 11]),
    ],
)
def test_a_shape_of_another_format_is_refused(fmt: MemoryFormat, shape: list[int]) -> None:
    with pytest.raises(ValueError, match=f"is no {fmt.name}"):
        fmt.num_tokens(torch.Size(shape))
