# SPDX-License-Identifier: Apache-2.0
"""What a store or a load of a window is made of: its chunks and their memory, before and during the copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from kvcache.gpu_connector.interface import Completed, Completion
from kvcache.memory.objects import MemoryObj
from kvcache.storage.lane import Lane
from kvcache.tokens.database import Chunk
from kvcache.tokens.keys import CacheEngineKey


@dataclass(frozen=True)
class Loaded:
    """A load that has ended, or of which all copies are queued."""

    num_tokens: int
    """Of the window."""
    span: slice
    """Those of them that were wanted and are in the pages, behind the copies that still run."""
    num_bytes: int = 0
    seconds: float = 0.0
    error: Exception | None = None
    """Why not all copies were made."""
    copies: Completion = field(default_factory=Completed)

    @property
    def there(self) -> torch.Tensor:
        """bool [tokens]: True for those of the span."""
        return mask_of(self.num_tokens, self.span)


OnLoaded = Callable[[Loaded], None]


@dataclass(eq=False)
class StoreCopies:
    """Chunks on their way from the pages."""

    completion: Completion
    chunks: list[Chunk]
    started: float
    keep: bool
    """False: the chunks are given back unseen once nothing is written to them any more."""
    on_stored: Callable[[int], None]
    """Called once with the tokens that are visible without a gap: `acknowledged`, or less where chunks were
    given back."""
    acknowledged: int
    skipped: int


@dataclass(eq=False)
class LoadCopies:
    """Chunks on their way to the pages."""

    completion: Completion
    plan: LoadPlan
    num_tokens: int
    started: float
    on_loaded: OnLoaded
    counted: bool = False
    """Among the loaded tokens."""
    on_ready: OnLoaded | None = None
    """Called once all copies are queued, or have ended; None once that is done."""


def mask_of(num_tokens: int, span: slice) -> torch.Tensor:
    """bool [tokens]: True within the span. In numpy: a call into torch costs several times as much."""
    mask = np.zeros(num_tokens, dtype=np.bool_)
    mask[span] = True
    return torch.from_numpy(mask)


@dataclass
class StorePlan:
    """Reserved chunks and their memory; tokens count from the window's start."""

    chunks: list[Chunk] = field(default_factory=list)
    objs: list[MemoryObj] = field(default_factory=list)
    skipped: int = 0
    stored: int = 0
    """Stored or on their way."""
    acknowledged: int = 0
    """Without a gap once the reserved ones are visible."""

    @property
    def starts(self) -> list[int]:
        return [chunk.start for chunk in self.chunks]

    @property
    def ends(self) -> list[int]:
        return [chunk.end for chunk in self.chunks]

    def copies(
        self, completion: Completion, started: float, on_stored: Callable[[int], None], *, keep: bool = True
    ) -> StoreCopies:
        return StoreCopies(completion, self.chunks, started, keep, on_stored, self.acknowledged, self.skipped)


@dataclass
class LoadPlan:
    """Leased chunks, one behind the other, and their memory; tokens count from the window's start.

    In lists of their parts: a request waits while they are made.
    """

    keys: list[CacheEngineKey]
    starts: list[int]
    ends: list[int]
    objs: list[MemoryObj]
    skipped: int = 0
    owner: str = ""
    sources: dict[CacheEngineKey, Lane] = field(default_factory=dict)
    """Tiers below that chunks were fetched from for this load."""

    def span(self, chunks: int | None = None) -> slice:
        """Tokens that are wanted and in the first `chunks` chunks, in all if None."""
        ends = self.ends[:chunks]
        return slice(max(self.skipped, self.starts[0]), ends[-1]) if ends else slice(0, 0)

    def count(self, chunks: int | None = None) -> int:
        """How many those are."""
        span = self.span(chunks)
        return max(0, int(span.stop) - int(span.start))

    def tokens(self, chunks: int) -> int:
        """In the first `chunks` chunks, wanted or not."""
        return self.ends[chunks - 1] - self.starts[0] if chunks else 0

    def mask(self, num_tokens: int) -> torch.Tensor:
        """bool [tokens]: True where they are wanted and in a chunk."""
        return mask_of(num_tokens, self.span())
