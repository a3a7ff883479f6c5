# SPDX-License-Identifier: Apache-2.0
"""A plain numpy reference of coded rows, written from the description in `csrc/include/row_codec.h`, and
pages whose rows have a code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache import _native
from kvcache.gpu_connector.layout import describe_layers
from tests.csrc.layouts import PagedKV, axes_of, make_kv

Row = npt.NDArray[np.uint16]


def capacity(elements: int) -> int:
    """Elements of a row of so many that may escape."""
    return min(elements, elements // 8 + -(-elements // 128) * 16 - 1)


def encode(row: Row) -> bytes | None:
    """The code of bfloat16 elements given as their bits; None where there is none."""
    exponents = (row >> 7).astype(int) & 255
    largest = max((int(e) for e in exponents if e < 255), default=0)
    for base in range(largest, max(-1, largest - 16), -1):
        codes = np.minimum((base - exponents) % 256, 7)
        if (codes == 7).sum() <= capacity(len(row)):
            break
    else:
        return None
    small = ((row >> 8).astype(int) & 128) | (row & 127)
    lower, third = bytearray(len(row) // 4), bytearray(len(row) // 8)
    for at, number in enumerate(codes.tolist()):
        group, i = divmod(at, 16)
        lower[4 * group + i % 4] |= (number & 3) << 2 * (i // 4)
        bit = 4 * (i % 4) + i // 4
        third[2 * group + bit // 8] |= number // 4 << bit % 8
    tail = bytes([base, *exponents[codes == 7].tolist()])
    small_bytes: bytes = small.astype(np.uint8).tobytes()
    return small_bytes + lower + third + tail.ljust(capacity(len(row)) + 1, b"\0")


def escapes(rows: Row) -> npt.NDArray[np.bool_]:
    """Where elements of rows escape over the largest exponent."""
    exponents = (rows >> 7).astype(int) & 255
    found: npt.NDArray[np.bool_] = (_finite(rows).max(axis=1, keepdims=True) - exponents) % 256 > 6
    return found


def rows(generator: np.random.Generator, count: int, elements: int) -> Row:
    """Bits of bfloat16 rows such as a model's: normal, of one scale a row, with outliers, zeros, tiny and not
    finite elements here and there, as many that escape as there is room for in some. In half of them a few
    elements are so much larger that the largest exponent may be no base."""
    scale = np.exp2(generator.integers(-120, 100, (count, 1)).astype(np.float64))
    values = generator.normal(size=(count, elements)) * scale
    values *= np.where(generator.random((count, elements)) < 0.01, 64.0, 1.0)
    bits: Row = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    special = np.array([0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC1, 0x0080], dtype=np.uint16)
    for row in bits:
        places = generator.choice(elements, int(generator.integers(0, capacity(elements) + 1)), replace=False)
        row[places] = special[generator.integers(0, len(special), len(places))]
    # What chance made escape beyond the room for it becomes the row's largest.
    largest = np.take_along_axis(bits, _finite(bits).argmax(axis=1)[:, None], axis=1)
    found = escapes(bits)
    bits = np.where(found & (np.cumsum(found, axis=1) > capacity(elements)), largest, bits)
    for row, taken in zip(bits[::2], escapes(bits[::2]).sum(axis=1), strict=True):
        room = int(generator.integers(0, capacity(elements) - int(taken) + 1))
        places = generator.choice(elements, room, replace=False)
        exponent = row[places] >> 7 & 255
        row[places] += np.where((exponent > 0) & (exponent < 200), 12 << 7, 0).astype(np.uint16)
    return bits


def _finite(rows: Row) -> npt.NDArray[np.int64]:
    """Exponents, 0 for what is not finite."""
    exponents = (rows >> 7).astype(np.int64) & 255
    return np.where(exponents < 255, exponents, 0)


def kv(layout: str, *, heads: int, head_size: int, seed: int = 0, **sizes: Any) -> PagedKV:
    """Pages whose rows have a code."""
    made = make_kv(layout, heads=heads, head_size=head_size, dtype=torch.bfloat16, **sizes)
    generator = np.random.default_rng(seed)
    for view in made.views:
        blocks, block_size, planes, held, _ = view.shape
        bits = rows(generator, blocks * block_size * planes, held * head_size)
        view.copy_(torch.from_numpy(bits.view(np.uint8)).view(view.shape))
    return made


def pages_of(kv: PagedKV) -> _native.Pages:
    return describe_layers(kv.tensors, replace(kv.spec, axes=axes_of(kv.layout), coded=True))
