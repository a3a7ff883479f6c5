# SPDX-License-Identifier: Apache-2.0
"""What happened to the prompts of the last five minutes, from counters that only grow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvcache.stats import SchedulerStats

SPAN_S = 300.0
_SPACING_S = 1.0
"""Of samples nearer than this not all are kept, so that frequent readers do not fill the memory."""


@dataclass(frozen=True)
class Hits:
    """Prompt tokens of some time, by outcome."""

    prompt_tokens: int = 0
    hit_gpu_tokens: int = 0
    hit_cache_tokens: int = 0

    @classmethod
    def of(cls, stats: SchedulerStats) -> Hits:
        """Those of the scheduler's whole life."""
        return cls(stats.prompt_tokens, stats.hit_gpu_tokens, sum(stats.hit_cache_tokens.values()))

    def __add__(self, other: Hits) -> Hits:
        return Hits(
            self.prompt_tokens + other.prompt_tokens,
            self.hit_gpu_tokens + other.hit_gpu_tokens,
            self.hit_cache_tokens + other.hit_cache_tokens,
        )

    def __sub__(self, other: Hits) -> Hits:
        return Hits(
            self.prompt_tokens - other.prompt_tokens,
            self.hit_gpu_tokens - other.hit_gpu_tokens,
            self.hit_cache_tokens - other.hit_cache_tokens,
        )

    @property
    def hit_rate(self) -> float | None:
        """Share of the tokens missing in vLLM's own cache that this cache gave back; None without any."""
        wanted = self.prompt_tokens - self.hit_gpu_tokens
        return self.hit_cache_tokens / wanted if wanted > 0 else None


class HitWindow:
    """The hits of the last `span_s` seconds, also across restarts of the scheduler, which counts from zero.

    Args:
        span_s: length of the window in seconds; it is shorter while there are no samples that old.
    """

    def __init__(self, span_s: float = SPAN_S) -> None:
        self._span_s = span_s
        self._samples: deque[tuple[float, Hits]] = deque()
        self._latest = (0.0, Hits())
        self._before = Hits()
        """Of earlier lives of the scheduler."""
        self._pid: int | None = None

    def add(self, at: float, stats: SchedulerStats) -> None:
        """Takes a sample of the counters.

        Args:
            at: seconds, not before those of the call before.
        """
        last = self._latest[1]
        total = self._before + Hits.of(stats)
        if self._samples and (stats.pid != self._pid or total.prompt_tokens < last.prompt_tokens):
            self._before = last
            total = self._before + Hits.of(stats)
        self._pid = stats.pid
        self._latest = (at, total)
        if not self._samples or at - self._samples[-1][0] >= _SPACING_S:
            self._samples.append(self._latest)
        while len(self._samples) > 1 and self._samples[1][0] <= at - self._span_s:
            self._samples.popleft()

    @property
    def seconds(self) -> float:
        """The time that the window covers now."""
        return self._latest[0] - self._samples[0][0] if self._samples else 0.0

    @property
    def hits(self) -> Hits:
        """What happened in the window."""
        return self._latest[1] - self._samples[0][1] if self._samples else Hits()
