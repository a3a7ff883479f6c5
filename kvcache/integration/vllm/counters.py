# SPDX-License-Identifier: Apache-2.0
"""Where prompt tokens came from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

HOST_TIER = "cpu"

Sources = tuple[tuple[str, int], ...]
"""Tiers and where the tokens that came from them end, counted from the sequence's start and ascending. What
lies behind the last one came from host memory."""


def tokens_by_tier(sources: Sources, first: int, last: int) -> Counter[str]:
    """How many of the tokens `[first, last)` each tier gave."""
    found: Counter[str] = Counter()
    for tier, end in sources:
        taken = min(end, last) - first
        if taken > 0:
            found[tier] += taken
            first += taken
    if first < last:
        found[HOST_TIER] += last - first
    return found


@dataclass
class TokenCounters:
    """Each token of a scheduled request's prompt is in exactly one of the three."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_gpu_tokens: int = 0
    hit_cache_tokens: Counter[str] = field(default_factory=Counter)
    """By tier."""
    computed_tokens: int = 0

    def scheduled(self, prompt: int, on_gpu: int, hit: int, sources: Sources) -> None:
        """A request is scheduled for the first time: of its `prompt` tokens the first `on_gpu` were vLLM's
        own, and the next `hit` are given back."""
        self.requests += 1
        self.prompt_tokens += prompt
        self.hit_gpu_tokens += on_gpu
        self.hit_cache_tokens.update(tokens_by_tier(sources, on_gpu, on_gpu + hit))
        self.computed_tokens += prompt - on_gpu - hit

    def did_not_come(self, first: int, last: int, sources: Sources) -> None:
        """The tokens `[first, last)` were counted as given back, and are computed."""
        self.hit_cache_tokens.subtract(tokens_by_tier(sources, first, last))
        self.computed_tokens += last - first
