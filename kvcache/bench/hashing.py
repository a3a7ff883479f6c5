# SPDX-License-Identifier: Apache-2.0
"""How long the chained hash of a prompt takes, beside plain XXH3-128 over the same bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvcache import _native


@dataclass(frozen=True)
class HashResult:
    """Microseconds, medians of the same run."""

    tokens: int
    chunk_tokens: int
    chained_us: float
    plain_us: float
    """XXH3-128 of each chunk's bytes, with the same vector instructions."""
    plain_whole_us: float
    """XXH3-128 of all bytes at once."""

    @property
    def ratio(self) -> float:
        return self.chained_us / self.plain_us


def hash_results(tokens: int = 128 * 1024, runs: int = 200) -> list[HashResult]:
    """Chunks of 16 (the least that vLLM's blocks allow on a GPU), 32, 64, 256 and 1,024 tokens."""
    ids = np.random.default_rng().integers(0, 1 << 31, tokens, dtype=np.int32)
    data, root = ids.data, bytes(16)  # the same bytes: a copy would lie otherwise in the caches
    results = []
    for chunk in (16, 32, 64, 256, 1024):
        chained, plain, whole = _medians(
            runs,
            lambda: _native.chunk_hashes(ids, chunk, root, root),  # noqa: B023 -- called at once
            lambda: _native.xxh3_128(data, 4 * chunk),  # noqa: B023
            lambda: _native.xxh3_128(data),
        )
        results.append(HashResult(tokens, chunk, chained, plain, whole))
    return results


def _medians(runs: int, *functions: Callable[[], object]) -> list[float]:
    """Microseconds of each, called in turns."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(runs):
        for function, seen in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            seen.append((time.perf_counter() - start) * 1e6)
    return [statistics.median(seen) for seen in times]
