# SPDX-License-Identifier: Apache-2.0
"""TinyLFU (Einziger, Friedman and Manes, TinyLFU: A Highly Efficient Cache Admission Policy, 2017)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from kvcache.storage.policies.base import AdmissionPolicy
from kvcache.tokens.keys import CacheEngineKey

_ROWS = 4
_SAMPLE = 10
"""Uses for each object that there is room for, after which all counts are halved."""
_MOST = 15
_HALVES = struct.Struct("<QQ")

Digest = CacheEngineKey | bytes
"""A key, or its bytes, which start with the chunk's hash."""


class FrequencySketch:
    """How often keys were used of late, about: never too low by collisions, and halved by age (count-min
    sketch).

    A key's first use goes into a Bloom filter (the doorkeeper) alone, since most keys have no second one and
    would fill the counters. A byte a counter, four rows.

    Args:
        capacity: keys that there is room for; ten times as many uses are a sample.
    """

    def __init__(self, capacity: int) -> None:
        width = 1 << max(6, (2 * capacity - 1).bit_length())
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(_ROWS)]
        self._door = bytearray(width)
        """Eight bits for each counter of a row."""
        self._sample = _SAMPLE * max(1, capacity)
        self._counted = 0

    def add(self, key: Digest) -> None:
        first, second = _halves(key)
        if self._enter(first, second):
            for row, place in zip(self._rows, self._places(first, second), strict=True):
                row[place] = min(_MOST, row[place] + 1)
        self._counted += 1
        if self._counted >= self._sample:
            self._age()

    def estimate(self, key: Digest) -> int:
        """0 to 16."""
        first, second = _halves(key)
        counted = min(row[place] for row, place in zip(self._rows, self._places(first, second), strict=True))
        return counted + self._inside(first, second)

    def _places(self, first: int, second: int) -> Iterator[int]:
        """One a row, of two hashes (Kirsch and Mitzenmacher, Less Hashing, Same Performance, 2006)."""
        return ((first + row * second) & self._mask for row in range(_ROWS))

    def _bits(self, first: int, second: int) -> Iterator[tuple[int, int]]:
        for bit in (first >> 32, second >> 32, (first ^ second) >> 29):
            yield (bit >> 3) & self._mask, 1 << (bit & 7)

    def _inside(self, first: int, second: int) -> bool:
        return all(self._door[place] & bit for place, bit in self._bits(first, second))

    def _enter(self, first: int, second: int) -> bool:
        """Whether it was inside."""
        inside = self._inside(first, second)
        if not inside:
            for place, bit in self._bits(first, second):
                self._door[place] |= bit
        return inside

    def _age(self) -> None:
        for row in self._rows:
            np.frombuffer(row, np.uint8)[:] >>= 1
        self._door = bytearray(len(self._door))
        self._counted //= 2


class TinyLFUAdmission(AdmissionPolicy[Digest]):
    """Lets in what was used more often of late than what would have to leave."""

    def __init__(self, capacity: int) -> None:
        self._sketch = FrequencySketch(capacity)

    def seen(self, key: Digest) -> None:
        self._sketch.add(key)

    def admits(self, key: Digest, victim: Digest | None) -> bool:
        return victim is None or self._sketch.estimate(key) > self._sketch.estimate(victim)


def _halves(key: Digest) -> tuple[int, int]:
    """Two 64-bit hashes, the same in every process."""
    first, second = _HALVES.unpack_from(key if isinstance(key, bytes) else key.chunk_hash)
    return first, second | 1
