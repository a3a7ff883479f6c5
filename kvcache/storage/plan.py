# SPDX-License-Identifier: Apache-2.0
"""What of a prefix is worth fetching from slower tiers: as much as makes the first token come soonest.

With `n` leading chunks fetched, the prompt is ready after `fetch(n) + (tokens - tokens(n)) * seconds per
token`. Tiers are read side by side, each one its objects in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

HOST = -1
"""The tier number of host memory: what is there need not be fetched."""


class Found(NamedTuple):
    """A chunk and the fastest tier that has it."""

    tier: int
    num_bytes: int
    num_tokens: int


class Cost(NamedTuple):
    """What reading from a tier takes, as measured."""

    latency_s: float
    seconds_per_byte: float
    queued_bytes: int
    """Of other fetches, which come first."""


def worth_fetching(found: Sequence[Found], costs: Mapping[int, Cost | None], seconds_per_token: float) -> int:
    """How many of the chunks, from the first on, to fetch.

    Args:
        found: a run of chunks without a gap.
        costs: of each tier in `found` but `HOST`; None where nothing was measured: it is tried.
        seconds_per_token: what computing a token takes; 0 where nothing was measured: all is fetched.
    """
    if seconds_per_token <= 0:
        return len(found)
    best, best_saved = 0, 0.0
    saved = 0.0
    seconds: dict[int, float] = {}
    for count, chunk in enumerate(found, start=1):
        saved += chunk.num_tokens * seconds_per_token
        cost = None if chunk.tier == HOST else costs[chunk.tier]
        if cost is not None:
            before = seconds.get(chunk.tier, cost.latency_s + cost.queued_bytes * cost.seconds_per_byte)
            seconds[chunk.tier] = before + chunk.num_bytes * cost.seconds_per_byte
        net = saved - max(seconds.values(), default=0.0)
        if net >= best_saved:
            best, best_saved = count, net
    return best
