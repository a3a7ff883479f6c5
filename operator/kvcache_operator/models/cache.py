# SPDX-License-Identifier: Apache-2.0
"""The cache: what a chunk is, which way it moves, who may share it, and the tiers it is kept in."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

from kvcache_operator.models.base import Matching, Part, rules
from kvcache_operator.models.refs import SecretKey
from kvcache_operator.models.tiers import Tiers

NEEDS_SHARED = (
    "a Producer or Consumer needs a tier that others share: remote, or a disk tier with volume.claimName"
)


class Role(StrEnum):
    """What a replica does with the cache."""

    BOTH = "Both"
    PRODUCER = "Producer"
    CONSUMER = "Consumer"


class Transfer(StrEnum):
    """How KV moves between the engine's pages and the cache."""

    WHOLE = "Whole"
    LAYERWISE = "Layerwise"


class EventsMode(StrEnum):
    """How what the cache holds is made known."""

    DISABLED = "Disabled"
    ZMQ = "ZMQ"


def _check_power_of_two(tokens: int) -> int:
    if tokens & (tokens - 1):
        raise ValueError(f"{tokens} is no power of two; take 256")
    return tokens


class EventsSpec(Part):
    """KV events: vLLM tells routers which blocks it holds."""

    mode: EventsMode = Field(default=EventsMode.DISABLED, strict=False)
    """ZMQ publishes them on a port of each pod."""
    port: int = Field(default=5557, ge=1024, le=65535)
    """Port of the publisher."""


class CacheSpec(Part):
    """The cache of one replica."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.role == 'Both' || has(self.tiers.remote) || "
                "(has(self.tiers.disk) && has(self.tiers.disk.volume.claimName))",
                NEEDS_SHARED,
                ".role",
            ),
            (
                "self.chunkTokens in [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]",
                "a power of two from 16 to 4096 is needed; take 256",
                ".chunkTokens",
            ),
        )
    )

    chunk_tokens: Annotated[int, AfterValidator(_check_power_of_two)] = Field(default=256, ge=16, le=4096)
    """Tokens that are stored and looked up as one: a power of two, a multiple of the engine's block size."""
    role: Role = Field(default=Role.BOTH, strict=False)
    """Both stores and loads; a Producer only stores, a Consumer only loads."""
    transfer: Transfer = Field(default=Transfer.WHOLE, strict=False)
    """Whole moves all layers of a chunk at once, Layerwise each layer while the next is computed. What is
    stored is the same for both."""
    namespace: (
        Annotated[
            str,
            Field(min_length=1, max_length=63),
            Matching(r"^[a-zA-Z0-9]([-_.a-zA-Z0-9]*)$", "write letters, digits, dashes, dots, underscores"),
        ]
        | None
    ) = None
    """Mixed into every key: only resources of the same namespace find each other's chunks. Another one
    empties the cache for all that follows. Model, revision, types and parallelism are in the keys anyway."""
    seed_secret_ref: SecretKey | None = None
    """A secret text that is mixed into every key too, so that nobody can craft tokens whose keys collide. It
    must be equal wherever chunks are shared; a new one counts from the next start of a pod."""
    tiers: Tiers
    """Where chunks are kept."""
    events: EventsSpec = EventsSpec()
    """KV events."""
