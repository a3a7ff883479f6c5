# SPDX-License-Identifier: Apache-2.0
"""What is worth fetching, against trying every number of chunks."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvcache.storage.plan import HOST, Cost, Found, worth_fetching

costs = st.builds(Cost, st.floats(0, 1), st.floats(0, 1e-6), st.integers(0, 10**6))
found = st.lists(
    st.builds(Found, st.sampled_from([HOST, 0, 1, 2]), st.integers(0, 10**6), st.integers(1, 256)), max_size=8
)


def ready_after(
    chunks: list[Found], count: int, known: dict[int, Cost | None], seconds_per_token: float
) -> float:
    """Seconds until the prompt is ready with the first `count` chunks fetched."""
    fetch = 0.0
    for tier, cost in known.items():
        sizes = [chunk.num_bytes for chunk in chunks[:count] if chunk.tier == tier]
        if sizes and cost is not None:
            fetch = max(fetch, cost.latency_s + (cost.queued_bytes + sum(sizes)) * cost.seconds_per_byte)
    return fetch + sum(chunk.num_tokens for chunk in chunks[count:]) * seconds_per_token


@given(found, costs, costs, st.floats(1e-6, 1e-2))
def test_the_first_token_comes_as_soon_as_it_can(
    chunks: list[Found], first: Cost, second: Cost, seconds_per_token: float
) -> None:
    known = {0: first, 1: second, 2: None}
    count = worth_fetching(chunks, known, seconds_per_token)
    best = min(ready_after(chunks, n, known, seconds_per_token) for n in range(len(chunks) + 1))
    assert math.isclose(ready_after(chunks, count, known, seconds_per_token), best, abs_tol=1e-9)


@given(found, costs)
def test_without_a_measured_prefill_all_is_fetched(chunks: list[Found], cost: Cost) -> None:
    assert worth_fetching(chunks, {0: cost, 1: cost, 2: cost}, 0.0) == len(chunks)


def test_what_costs_nothing_is_always_taken() -> None:
    chunks = [Found(HOST, 0, 16), Found(0, 100, 16), Found(HOST, 0, 16)]
    assert worth_fetching(chunks, {0: None}, 1.0) == 3
    assert worth_fetching(chunks, {0: Cost(1e3, 0.0, 0)}, 1.0) == 1
