# SPDX-License-Identifier: Apache-2.0
"""How long requests wait for their first token, and what a prompt token costs to compute.

The scheduler sees a token at the first step, or the request's end, after it was sampled: a time can be too
long by one step. Seconds in which prompts are computed are counted once however many are computed together,
so that their ratio to the tokens is the time of the device, not that of the requests.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvcache.stats import HistogramStats

if TYPE_CHECKING:
    from vllm.v1.request import Request

Outcome = Literal["hit_cache", "hit_gpu", "computed"]

BOUNDS_S = (
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    0.75,
    1.0,
    1.5,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
)
"""Upper bounds of the buckets, seconds: a hit takes a GPU some 25 ms, a long prompt takes a CPU a minute."""


@dataclass
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(BOUNDS_S, value)] += 1
        self.sum += value


@dataclass
class _Waiting:
    request: Request
    outcome: Outcome


class FirstTokens:
    """Watches requests from their first step until their first token. One thread; `stats` from any.

    Args:
        wall: seconds since the epoch, the clock of `Request.arrival_time`.
        clock: a clock that never goes back, in seconds.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall = wall
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}
        self._computing: set[str] = set()
        self._computing_since = 0.0
        self._histograms: dict[Outcome, _Histogram] = {
            outcome: _Histogram() for outcome in ("hit_cache", "hit_gpu", "computed")
        }
        self.prefill_tokens = 0
        self.prefill_seconds = 0.0

    def scheduled(self, request: Request, hit_cache_tokens: int, hit_gpu_tokens: int) -> None:
        """The request is in a step for the first time; so many of its prompt's tokens were there already."""
        outcome: Outcome = "hit_cache" if hit_cache_tokens else "hit_gpu" if hit_gpu_tokens else "computed"
        self._waiting[request.request_id] = _Waiting(request, outcome)
        if outcome == "computed":
            if not self._computing:
                self._computing_since = self._clock()
            self._computing.add(request.request_id)

    def look(self) -> None:
        """Takes note of the first tokens that came since the last call: at the start of each step."""
        for req_id in [name for name, waiting in self._waiting.items() if waiting.request.num_output_tokens]:
            self.ended(req_id)

    def ended(self, req_id: str) -> None:
        """The request has its first token, or ends without one."""
        waiting = self._waiting.pop(req_id, None)
        if waiting is None:
            return
        if waiting.request.num_output_tokens:
            # The two clocks of different processes, which somebody may set.
            waited = max(0.0, self._wall() - float(waiting.request.arrival_time))
            self._histograms[waiting.outcome].observe(waited)
        if req_id in self._computing:
            self._computing.remove(req_id)
            if waiting.request.num_output_tokens:
                self.prefill_tokens += int(waiting.request.num_prompt_tokens)
            if not self._computing:
                self.prefill_seconds += self._clock() - self._computing_since

    def stats(self) -> dict[str, HistogramStats]:
        """The histogram of each outcome."""
        return {
            outcome: HistogramStats(bounds=list(BOUNDS_S), counts=list(found.counts), sum=found.sum)
            for outcome, found in self._histograms.items()
        }
