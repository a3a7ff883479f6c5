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
    """Exceptions that a row of so many elements has room for."""
    return -(-elements // 128) * 4 - 1


def encode(row: Row) -> bytes | None:
    """The code of bfloat16 elements given as their bits; None where there is none."""
    exponents = (row >> 7).astype(int) & 255
    largest = max((int(e) for e in exponents if e < 255), default=0)
    zero = exponents == 0
    for base in range(largest, max(-1, largest - 16), -1):
        distance = base - exponents
        exception = ~zero & ((distance < 0) | (distance > 14))
        if exception.sum() <= capacity(len(row)):
            break
    else:
        return None
    small = ((row >> 8).astype(int) & 128) | (row & 127)
    codes = np.where(zero | exception, 15, distance)
    halves = codes[0::2] + 16 * codes[1::2]
    found = np.flatnonzero(exception)
    entries = b"".join(int(i).to_bytes(2, "little") + int(row[i]).to_bytes(2, "little") for i in found)
    header = bytes([base, 0]) + len(found).to_bytes(2, "little") + entries
    code: bytes = (
        small.astype(np.uint8).tobytes()
        + halves.astype(np.uint8).tobytes()
        + header.ljust(4 * capacity(len(row)) + 4, b"\0")
    )
    return code


def exceptions(rows: Row) -> npt.NDArray[np.bool_]:
    """Where elements of rows need more than sign, mantissa and code."""
    exponents = (rows >> 7).astype(int) & 255
    base = np.where(exponents < 255, exponents, 0).max(axis=1, keepdims=True)
    distance = base - exponents
    found: npt.NDArray[np.bool_] = (exponents != 0) & ((distance < 0) | (distance > 14))
    return found


def rows(generator: np.random.Generator, count: int, elements: int) -> Row:
    """Bits of bfloat16 rows such as a model's: normal, of one scale a row, with outliers, zeros, tiny and not
    finite elements here and there, as many exceptions as there is room for in some. In half of them a few
    elements are so much larger that the largest exponent may be no base."""
    scale = np.exp2(generator.integers(-120, 100, (count, 1)).astype(np.float64))
    values = generator.normal(size=(count, elements)) * scale
    values *= np.where(generator.random((count, elements)) < 0.01, 64.0, 1.0)
    bits: Row = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    special = np.array([0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC1, 0x0080], dtype=np.uint16)
    for row in bits:
        places = generator.choice(elements, int(generator.integers(0, capacity(elements) + 1)), replace=False)
        row[places] = special[generator.integers(0, len(special), len(places))]
    # What chance made of exceptions beyond the room for them becomes zero.
    found = exceptions(bits)
    bits[found & (np.cumsum(found, axis=1) > capacity(elements))] = 0
    for row, taken in zip(bits[::2], exceptions(bits[::2]).sum(axis=1), strict=True):
        room = int(generator.integers(0, capacity(elements) - int(taken) + 1))
        places = generator.choice(elements, room, replace=False)
        exponent = row[places] >> 7 & 255
        row[places] += np.where((exponent > 0) & (exponent < 200), 12 << 7, 0).astype(np.uint16)
    return bits


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
