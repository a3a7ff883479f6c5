# SPDX-License-Identifier: Apache-2.0
"""Rotation of keys against float64, and the conversions of small floats against torch's."""

from __future__ import annotations

import math

import pytest
import torch

from kvcache import lmc_ops
from kvcache.gpu_connector.rotary import FusedRotary

POSITIONS = 600


def table(rotary_size: int, *, scale: float = 1.0, llama3: bool = False) -> torch.Tensor:
    """float64 [POSITIONS, rotary_size]; `llama3` stretches low frequencies as Llama 3.1 does."""
    frequency = 10000.0 ** (-torch.arange(0, rotary_size, 2, dtype=torch.float64) / rotary_size)
    if llama3:
        wavelength = 2 * math.pi / frequency
        smooth = ((8192 / wavelength - 1.0) / (4.0 - 1.0)).clamp(0, 1)
        frequency = (1 - smooth) * frequency / 8.0 + smooth * frequency
    angle = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1) * scale


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox: bool) -> torch.Tensor:
    """float64 [T, H, R] by [T, R/2]."""
    cos, sin = cos[:, None], sin[:, None]
    if neox:
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)
    one, two = x[..., 0::2], x[..., 1::2]
    return torch.stack((one * cos - two * sin, two * cos + one * sin), dim=-1).flatten(-2)


def moved(
    keys: torch.Tensor, was: torch.Tensor, now: torch.Tensor, table64: torch.Tensor, neox: bool
) -> torch.Tensor:
    """The old rotation undone, then the new one made, in float64."""
    size = table64.shape[1]
    head = keys[..., :size].double()
    (c0, s0), (c1, s1) = table64[was].chunk(2, dim=-1), table64[now].chunk(2, dim=-1)
    norm = c0 * c0 + s0 * s0
    head = rotate(rotate(head, c0 / norm, -s0 / norm, neox), c1, s1, neox)
    return torch.cat((head, keys[..., size:].double()), dim=-1)


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(("head_size", "rotary_size"), [(64, 64), (80, 32), (128, 128)])
@pytest.mark.parametrize("kind", ["plain", "llama3", "scaled"])
def test_keys_move_with_one_rounding(
    dtype: torch.dtype, neox: bool, head_size: int, rotary_size: int, kind: str
) -> None:
    table64 = table(rotary_size, scale=1.3 if kind == "scaled" else 1.0, llama3=kind == "llama3")
    keys = torch.randn(33, 3, head_size).to(dtype)
    was, now = torch.randint(0, POSITIONS, (2, 33))
    was[5] = now[5]
    cache = table64.float()
    expected = moved(keys, was, now, cache.double(), neox)
    untouched = keys.clone()
    lmc_ops.rotary_embedding_k_fused(was, now, keys, head_size, cache, neox)
    error = (keys.double() - expected).abs()
    size = expected[..., :rotary_size].abs().amax(dim=-1, keepdim=True)
    assert bool((error <= TOLERANCE[dtype] * size + 1e-6).all()), float(error.max())
    assert torch.equal(keys[..., rotary_size:], untouched[..., rotary_size:])
    assert torch.equal(keys[5], untouched[5]), "a token that stays was changed"
    assert not torch.equal(keys, untouched)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_rounding_is_to_nearest_even(dtype: torch.dtype) -> None:
    """With a table of cos 0, sin 1 at one position and cos 1, sin 0 at the other, values only change
    places.
    """
    cache = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    bits = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    values = bits.view(dtype)
    values = values[values.isfinite()]
    keys = torch.stack((values, torch.zeros_like(values)), dim=-1).unsqueeze(1).contiguous()
    count = len(values)
    lmc_ops.rotary_embedding_k_fused(
        torch.zeros(count).long(), torch.ones(count).long(), keys, 2, cache, True
    )
    assert torch.equal(keys[:, 0, 1], values)


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0), (torch.float16, None)],
    ids=str,
)
def test_sums_round_as_torch_rounds(dtype: torch.dtype, most: float | None) -> None:
    """A rotation by 45 degrees of all pairs of values against the same sums in float32, rounded by torch."""
    root = torch.tensor(0.5).sqrt()
    cache = torch.stack((torch.tensor([1.0, 0.0]), torch.stack((root, root))))
    if dtype.itemsize == 1:
        values = torch.arange(256, dtype=torch.uint8).view(dtype)
    else:
        values = torch.randint(-(1 << 15), 1 << 15, (400,), dtype=torch.int16).view(dtype)
    values = values[values.float().isfinite()]
    one, two = (grid.flatten() for grid in torch.meshgrid(values.float(), values.float(), indexing="ij"))
    keys = torch.stack((one, two), dim=-1).unsqueeze(1).to(dtype)
    count = len(keys)
    lmc_ops.rotary_embedding_k_fused(
        torch.zeros(count).long(), torch.ones(count).long(), keys, 2, cache, False
    )
    cos = sin = root / (torch.tensor(1.0))
    expected = torch.stack((one * cos - two * sin, two * cos + one * sin), dim=-1)
    if most is not None:
        expected = expected.clamp(-most, most)
    assert torch.equal(keys[:, 0].float(), expected.to(dtype).float())


def test_strided_keys_and_bf16_tables() -> None:
    """Keys inside of a [T, 2, D] buffer: values stay, and a table's own rounding is taken back."""
    buffer = torch.randn(21, 2, 4 * 32)
    before = buffer.clone()
    cache = table(32).bfloat16()
    was, now = torch.randint(0, POSITIONS, (2, 21))
    FusedRotary(cache)(was, now, torch.unflatten(buffer[:, 0], -1, (4, 32)))
    expected = moved(before[:, 0].view(21, 4, 32), was, now, cache.double(), True)
    assert torch.allclose(buffer[:, 0].view(21, 4, 32).double(), expected, atol=1e-5)
    assert torch.equal(buffer[:, 1], before[:, 1])


def test_there_and_back_is_almost_nothing() -> None:
    keys = torch.randn(9, 2, 64)
    before = keys.clone()
    rotary = FusedRotary(table(64).float(), is_neox=False)
    was, now = torch.randint(0, POSITIONS, (2, 9))
    rotary(was, now, keys)
    rotary(now, was, keys)
    assert torch.allclose(keys, before, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"old_positions": torch.tensor([0, POSITIONS])},
            rf"old_positions\[1\] is {POSITIONS}; the table has",
        ),
        ({"new_positions": torch.tensor([-1, 0])}, r"new_positions\[0\] is -1"),
        ({"new_positions": torch.tensor([0])}, "2 and 1 entries"),
        ({"old_positions": torch.tensor([0])}, "old_positions has 1 entries for keys of 2 tokens"),
        ({"key": torch.zeros(2, 1, 15)}, r"\[T, H, 16\] with contiguous heads"),
        ({"key": torch.zeros(1, 1, 16).expand(2, 1, 16)}, "token_stride is 0 bytes, below the 64"),
        ({"key": torch.zeros(48).as_strided((2, 2, 16), (16, 16, 1))}, "below the 128 that lie within it"),
        ({"key": torch.zeros(2, 1, 16).int()}, "dtype int32; float32"),
        ({"cos_sin_cache": torch.zeros(9, 18)}, "18 entries a position; an even number of at most 16"),
        ({"cos_sin_cache": torch.zeros(9, 7)}, "7 entries a position"),
        ({"cos_sin_cache": torch.zeros(9, 16).to(torch.float8_e5m2)}, "the table's dtype is a float8"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, torch.Tensor], text: str) -> None:
    arguments = {
        "old_positions": torch.tensor([0, 1]),
        "new_positions": torch.tensor([2, 3]),
        "key": torch.ones(2, 1, 16),
        "cos_sin_cache": table(16).float(),
    }
    arguments |= change
    with pytest.raises(ValueError, match=text):
        lmc_ops.rotary_embedding_k_fused(**arguments, head_size=16, is_neox=True)
    if "key" not in change:
        assert bool((arguments["key"] == 1).all())


def test_gaps_become_zeros() -> None:
    buffer = torch.randint(1, 255, (20, 2, 6), dtype=torch.uint8)
    before = buffer.clone()
    lmc_ops.zero_tokens(buffer, [(0, 3), (7, 7), (18, 20)])
    kept = [*range(3, 18)]
    with pytest.raises(ValueError, match=r"the packed tensor is a tensor \[\]"):
        lmc_ops.zero_tokens(torch.tensor(1.0), [(0, 1)])
    assert torch.equal(buffer[kept], before[kept])
    assert int(buffer[[0, 1, 2, 18, 19]].sum()) == 0
    with pytest.raises(ValueError, match="a gap from 18 to 21 in 20 tokens"):
        lmc_ops.zero_tokens(buffer, [(0, 20), (18, 21)])
    assert torch.equal(buffer[kept], before[kept])
