# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache.memory.formats import KVShape, MemoryFormat

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
    ("field", "value", "text"),
    [
        ("num_layers", 0, "num_layers is 0; it must be above 0"),
        ("hidden", -1, "hidden is -1"),
        ("chunk_tokens", 0, "chunk_tokens is 0"),
        ("kv_planes", 3, "kv_planes is 3; 2 .* and 1 .* are accepted"),
        ("dtype", torch.int64, "of torch.int64; float64, float32, bfloat16, float16, .* are accepted"),
    ],
)
def test_shapes_that_cannot_be(field: str, value: Any, text: str) -> None:
    good: dict[str, Any] = {
        "num_layers": 2, "kv_planes": 2, "hidden": 8, "dtype": torch.float16, "chunk_tokens": 16,
    }  # fmt: skip
    assert KVShape(**good).chunk_bytes == 2 * 2 * 8 * 2 * 16
    with pytest.raises(ValueError, match=text):
        KVShape(**good | {field: value})


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
