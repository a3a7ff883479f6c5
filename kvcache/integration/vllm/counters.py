# SPDX-License-Identifier: Apache-2.0
"""Where prompt tokens came from.

A request is counted when it is known where all of its prompt came from: at once if nothing is being loaded
for it in its first step, else when the load's outcome is heard of. Counters never fall, and at any time they
add up to the prompts that were counted.
"""

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


@dataclass(frozen=True)
class Prompt:
    """Of a request that is scheduled for the first time."""

    tokens: int
    on_gpu: int
    """That vLLM had itself, from the first on."""
    hit: int
    """That are given back, behind those."""
    sources: Sources


@dataclass
class TokenCounters:
    """Each token of a counted prompt is in exactly one of the three."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_gpu_tokens: int = 0
    hit_cache_tokens: Counter[str] = field(default_factory=Counter)
    """By tier."""
    computed_tokens: int = 0
    _open: dict[str, Prompt] = field(default_factory=dict)
    """Lookup whose load has not ended to the prompt that waits for it."""

    @property
    def open_prompts(self) -> int:
        """Scheduled, but not counted yet."""
        return len(self._open)

    def scheduled(self, prompt: Prompt, loading: str | None = None) -> None:
        """A request is scheduled for the first time; what it is given back comes by the load of the lookup
        `loading`, or is there if that is None."""
        if loading is None or not prompt.hit:
            self._count(prompt, 0)
        else:
            self._open[loading] = prompt

    def load_ended(self, lookup_id: str, missing: int) -> None:
        """The last `missing` tokens of a load did not come, and are computed."""
        prompt = self._open.pop(lookup_id, None)
        if prompt is not None:
            self._count(prompt, min(missing, prompt.hit))

    def _count(self, prompt: Prompt, missing: int) -> None:
        hit = prompt.hit - missing
        self.requests += 1
        self.prompt_tokens += prompt.tokens
        self.hit_gpu_tokens += prompt.on_gpu
        self.hit_cache_tokens.update(tokens_by_tier(prompt.sources, prompt.on_gpu, prompt.on_gpu + hit))
        self.computed_tokens += prompt.tokens - prompt.on_gpu - hit
