# SPDX-License-Identifier: Apache-2.0
"""The notes' signatures over torch tensors, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvcache import _native, lmc_ops
from tests.csrc.layouts import DTYPES, make_kv, random_slots


def random_like(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    size = [*shape[:-1], shape[-1] * dtype.itemsize]
    return torch.randint(0, 256, size, dtype=torch.uint8).view(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("token_major", [True, False])
@pytest.mark.parametrize("two_major", [True, False])
def test_single_layer(dtype: torch.dtype, token_major: bool, two_major: bool) -> None:
    kv = make_kv(
        "2BNHD" if two_major else "B2NHD",
        layers=1,
        blocks=7,
        block_size=16,
        heads=3,
        head_size=10,
        dtype=dtype,
    )
    (layer,) = kv.tensors
    slots = random_slots(7 * 16, 37, 16)
    packed = random_like([37, 2, 30] if token_major else [2, 37, 30], dtype)
    lmc_ops.single_layer_kv_transfer(packed, layer, slots, True, token_major, two_major, False)
    keys, values = (layer[0], layer[1]) if two_major else (layer[:, 0], layer[:, 1])
    for plane, pages in enumerate((keys, values)):
        got = packed[:, plane] if token_major else packed[plane]
        assert same(got, pages.reshape(7 * 16, 30)[slots])
    packed = random_like(list(packed.shape), dtype)
    lmc_ops.single_layer_kv_transfer(packed, layer, slots, False, token_major, two_major, False)
    for plane, pages in enumerate((keys, values)):
        expected = packed[:, plane] if token_major else packed[plane]
        assert same(pages.reshape(7 * 16, 30)[slots], expected)


def test_single_layer_mla() -> None:
    layer = random_like([5, 4, 576], torch.bfloat16)
    slots = torch.tensor([19, -1, 3, 7])
    packed = random_like([4, 576], torch.bfloat16)
    untouched = packed[1].clone()
    lmc_ops.single_layer_kv_transfer(packed, layer, slots, True, True, False, True)
    assert same(packed[[0, 2, 3]], layer.view(20, 576)[[19, 3, 7]])
    assert same(packed[1], untouched)


@pytest.mark.parametrize("token_major", [True, False])
def test_multi_layer(token_major: bool) -> None:
    layers = [random_like([2, 48, 24], torch.float16) for _ in range(3)]
    pointers = torch.tensor([layer.data_ptr() for layer in layers])
    slots = torch.randperm(48)[:19]
    packed = random_like([3, 19, 2, 24] if token_major else [2, 3, 19, 24], torch.float16)
    arguments = (pointers, slots, torch.device("cpu"), 48)
    lmc_ops.multi_layer_kv_transfer(packed, *arguments, True, False, token_major=token_major)
    for index, layer in enumerate(layers):
        for plane in range(2):
            got = packed[index, :, plane] if token_major else packed[plane, index]
            assert same(got, layer[plane][slots])
    packed = random_like(list(packed.shape), torch.float16)
    lmc_ops.multi_layer_kv_transfer(packed, *arguments, False, False, token_major=token_major)
    assert same(layers[2][1][slots], packed[2, :, 1] if token_major else packed[1, 2])


@pytest.mark.parametrize("shape", [[3, 19, 24], [1, 3, 19, 24]])
def test_multi_layer_mla(shape: list[int]) -> None:
    layers = [random_like([48, 24], torch.bfloat16) for _ in range(3)]
    pointers = torch.tensor([layer.data_ptr() for layer in layers])
    slots = torch.randperm(48)[:19]
    packed = random_like(shape, torch.bfloat16)
    lmc_ops.multi_layer_kv_transfer(packed, pointers, slots, torch.device("cpu"), 48, True, True)
    for index, layer in enumerate(layers):
        assert same(packed.view(3, 19, 24)[index], layer[slots])


def test_bad_arguments_are_named() -> None:
    layer = torch.zeros(2, 7, 16, 3, 10)
    slots = torch.arange(5)
    good = torch.zeros(5, 2, 30)

    def single(packed: torch.Tensor, pages: torch.Tensor = layer, mapping: torch.Tensor = slots) -> None:
        lmc_ops.single_layer_kv_transfer(packed, pages, mapping, True, True, True, False)

    cases: list[tuple[Callable[[], None], str]] = [
        (lambda: single(torch.zeros(2, 5, 30)), r"\[2, 5, 30\].*; \[5, 2, 30\] is accepted"),
        (lambda: single(torch.zeros(5, 2, 60)[..., ::2]), r"a contiguous one is accepted"),
        (lambda: single(good.half()), "is accepted for 5 slots of 120 bytes"),
        (lambda: single(good.to(torch.int32)), "is of torch.int32, the pages are of torch.float32"),
        (lambda: single(good, layer[0]), r"\[2, B, N, H, D\] with contiguous heads is accepted"),
        (lambda: single(good, layer.transpose(0, 1)), r"\[2, B, N, H, D\]"),
        (lambda: single(good, layer, slots.int()), "int64 with one dimension"),
        (lambda: single(good, layer, slots.double()), "torch.float64; a tensor of int64"),
        (lambda: single(good, layer, slots[None]), r"\[1, 5\].*; a tensor of int64 with one dimension"),
        (lambda: single(good, layer, slots.tolist()), "slot_mapping is a list; a tensor of int64"),  # type: ignore[arg-type]
        (lambda: single(good, layer, slots[:4]), r"\[5, 2, 30\].*; \[4, 2, 30\] is accepted for 4 slots"),
        (lambda: single(good, layer, slots - 2), r"slot_mapping\[0\] is -2; slots from 0 to 111 and -1"),
        (
            lambda: single(good, layer.long()),
            "of torch.int64; float64, float32, bfloat16, float16, .* are accepted",
        ),
        (lambda: single(good, layer[:1].expand(2, 7, 16, 3, 10)), "kv_stride is 0 bytes, below the 40"),
        (lambda: single(good, layer[:, :0]), "num_blocks is 0"),
        (lambda: single(good, layer.to("meta")), "pages on meta; cpu and cuda are accepted"),
        (lambda: single(good.to("meta")), "the packed tensor on meta; host memory is accepted"),
        (lambda: single(good, layer, slots + 110), r"slot_mapping\[2\] is 112"),
    ]
    for call, text in cases:
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(ValueError, match="int64 addresses"):
        lmc_ops.multi_layer_kv_transfer(
            torch.zeros(2, 1, 5, 30), torch.zeros(1), slots, torch.device("cpu"), 9, True, False
        )
    cpu = torch.device("cpu")
    for move, dtype, address, text in (
        (
            lmc_ops.multi_layer_kv_transfer,
            torch.int32,
            1,
            "key_value is of torch.int32; float64, float32, .* accepted",
        ),
        (lmc_ops.multi_layer_kv_transfer, torch.float32, 0, "layer 0 has the address 0"),
    ):
        packed, pointer = torch.zeros(2, 1, 5, 30, dtype=dtype), torch.full((1,), address)
        with pytest.raises(ValueError, match=text):
            move(packed, pointer, slots, cpu, 9, True, False)
        with pytest.raises(ValueError, match=text):
            lmc_ops.multi_layer_kv_transfer_unilateral(packed, pointer, pointer, slots, cpu, 9, True)
    with pytest.raises(ValueError, match="a page buffer of 0 slots"):
        lmc_ops.multi_layer_kv_transfer(
            torch.zeros(2, 1, 5, 30), torch.ones(1).long(), slots, torch.device("cpu"), 0, True, False
        )
    assert not bool(layer.any())


def test_build_info_says_what_was_built() -> None:
    info = _native.build_info()
    assert info["cuda"] == bool(info["architectures"])
    assert all(name.startswith("sm_") for name in info["architectures"])
    assert info["compiler"]
    if not _native.cuda_available():
        assert _native.cuda_unavailable_reason()
