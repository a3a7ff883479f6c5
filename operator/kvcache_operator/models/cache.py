# SPDX-License-Identifier: Apache-2.0
"""The cache: what a chunk is, which way it moves, and the tiers it is kept in."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from kvcache_operator.models.base import Part
from kvcache_operator.models.measures import TierCapacity


class Role(StrEnum):
    """What a replica does with the cache."""

    BOTH = "Both"
    PRODUCER = "Producer"
    CONSUMER = "Consumer"


class Transfer(StrEnum):
    """How KV moves between the engine's pages and the cache."""

    WHOLE = "Whole"
    LAYERWISE = "Layerwise"


def _check_power_of_two(tokens: int) -> int:
    if tokens & (tokens - 1):
        raise ValueError(f"{tokens} is no power of two; take 256")
    return tokens


class CpuTier(Part):
    """The tier in host memory."""

    capacity: TierCapacity
    """Bytes of one replica, shared evenly by its ranks."""
    pinning: Literal["Required", "Preferred", "Disabled"] = "Preferred"
    """Whether the memory is page-locked for a GPU: Preferred goes on without, Required does not."""
    eviction: Literal["LRU"] = "LRU"
    """Which chunk gives way when the tier is full."""


class Tiers(Part):
    """Where chunks are kept, fastest first."""

    cpu: CpuTier
    """Host memory."""


class CacheSpec(Part):
    """The cache of one replica."""

    chunk_tokens: Annotated[int, AfterValidator(_check_power_of_two)] = Field(default=256, ge=16, le=4096)
    """Tokens that are stored and looked up as one: a power of two, a multiple of the engine's block size."""
    role: Role = Field(default=Role.BOTH, strict=False)
    """Both stores and loads; a Producer only stores, a Consumer only loads."""
    transfer: Transfer = Field(default=Transfer.WHOLE, strict=False)
    """Whole moves all layers of a chunk at once, Layerwise each layer while the next is computed."""
    # Whole is the default as long as the engine has no layerwise connector; a later default of Layerwise
    # changes no stored byte, since one chunk has one layout for both.
    tiers: Tiers
    """Where chunks are kept."""


class AdminSpec(Part):
    """The admin sidecar: health, metrics, statistics and flushes."""

    port: int = Field(default=8081, ge=1024, le=65535)
    """Port of the admin API."""
