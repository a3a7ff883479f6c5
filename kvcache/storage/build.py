# SPDX-License-Identifier: Apache-2.0
"""Makes the tiers below host memory that the configuration names, in their order: disk, remote, plugins.

A tier that cannot start is there all the same, holds nothing and says why; the others serve. What a tier
needs is imported when it is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points

from kvcache.config.tiers import (
    DiskTierConfig,
    PluginTierConfig,
    RemoteTierConfig,
    TiersConfig,
)
from kvcache.stats import TierStats
from kvcache.storage.futures import done
from kvcache.storage.lane import Lane
from kvcache.storage.policies import ADMISSIONS, POLICIES, AdmissionPolicy, EvictionPolicy
from kvcache.storage.tier import (
    ENTRY_POINT_GROUP,
    Cleared,
    ClearScope,
    Health,
    PutOutcome,
    StoredObject,
    Tier,
    TierContext,
    TierFactory,
    WantedObject,
)
from kvcache.tokens.keys import CacheEngineKey

logger = logging.getLogger("vllm.kvcache")

START_FAILED = "StartFailed"
_REMEMBERED = 1 << 16
"""Chunks by which an admission policy's lists are measured where nobody knows what a tier has room for."""


class PluginError(Exception):
    """A tier of a third party cannot be had."""


@dataclass(frozen=True)
class TierPlan:
    """A tier to start and how it is used.

    Args:
        name: of the tier.
        config: its part of the configuration.
        open: starts it.
    """

    name: str
    config: DiskTierConfig | RemoteTierConfig | PluginTierConfig
    open: Callable[[TierContext], Tier]


def tier_plans(config: TiersConfig) -> Iterator[TierPlan]:
    """The tiers of a configuration, the fastest first."""
    disk, remote = config.disk, config.remote
    if disk is not None:
        yield TierPlan("disk", disk, partial(_open_disk, disk))
    if remote is not None:
        yield TierPlan("remote", remote, partial(_open_remote, remote))
    for plugin in config.plugins:
        yield TierPlan(plugin.name, plugin, partial(_open_plugin, plugin))


def open_lanes(config: TiersConfig, context: TierContext) -> list[Lane]:
    """Starts all tiers of the configuration. Raises nothing: what cannot start says so in its state."""
    lanes = []
    for index, plan in enumerate(tier_plans(config)):
        tier: Tier
        try:
            tier = plan.open(context)
        except Exception as error:
            logger.exception("KV cache: the tier %s cannot start; the others serve", plan.name)
            tier = AbsentTier(plan.name, error)
        lanes.append(
            Lane(
                index,
                tier,
                write=plan.config.write,
                deadline_s=plan.config.deadline_ms / 1000,
                write_queue_bytes=plan.config.write_queue,
                admission=lane_admission(plan.config),
            )
        )
    return lanes


def host_policies(
    config: TiersConfig, capacity: int
) -> tuple[EvictionPolicy[CacheEngineKey], AdmissionPolicy[CacheEngineKey] | None]:
    """The policies of host memory, which has room for `capacity` chunks."""
    cpu = config.cpu
    eviction: EvictionPolicy[CacheEngineKey] = POLICIES[cpu.eviction](capacity)
    # What is not worth its room here may be worth it in a tier below, which gets it from here.
    staging = cpu.admission == "Adaptive" and next(tier_plans(config), None) is not None
    if cpu.admission == "Always" or staging:
        return eviction, None
    return eviction, ADMISSIONS[cpu.admission](capacity)


def lane_admission(
    config: DiskTierConfig | RemoteTierConfig | PluginTierConfig,
) -> AdmissionPolicy[CacheEngineKey] | None:
    """Of a tier that has none itself."""
    if isinstance(config, DiskTierConfig) or config.admission == "Always":
        return None
    admission: AdmissionPolicy[CacheEngineKey] = ADMISSIONS[config.admission](_REMEMBERED)
    return admission


def _open_disk(config: DiskTierConfig, context: TierContext) -> Tier:
    from kvcache.storage.tiers.disk import open_disk

    return open_disk(config, context)


def _open_remote(config: RemoteTierConfig, context: TierContext) -> Tier:
    if config.valkey is not None:
        from kvcache.storage.tiers.valkey import open_valkey

        return open_valkey(config, context)
    if config.s3 is not None:
        from kvcache.storage.tiers.s3 import open_s3

        return open_s3(config, context)
    from kvcache.storage.tiers.mooncake import open_mooncake

    return open_mooncake(config, context)


def _open_plugin(config: PluginTierConfig, context: TierContext) -> Tier:
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=config.name))
    if len(found) != 1:
        known = sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})
        raise PluginError(
            f"plugins: {len(found)} entry points {config.name!r} of the group {ENTRY_POINT_GROUP} are "
            f"installed, one is needed; there are {', '.join(known) or 'none'}"
        )
    factory: TierFactory = found[0].load()
    tier = factory(dict(config.options), context)
    tier.name = config.name
    return tier


class AbsentTier(Tier):
    """Stands in for a tier that could not start."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name = name
        self._health = Health(START_FAILED, f"{type(error).__name__}: {error}")

    def head(self, keys: Sequence[CacheEngineKey]) -> Future[list[int | None]]:
        return done([None for _ in keys])

    def get(self, wanted: Sequence[WantedObject]) -> Future[list[bool]]:
        return done([False for _ in wanted])

    def put(self, objects: Sequence[StoredObject]) -> Future[list[PutOutcome]]:
        return done([PutOutcome.FAILED for _ in objects])

    def remove(self, keys: Sequence[CacheEngineKey]) -> Future[int]:
        return done(0)

    def clear(self, scope: ClearScope) -> Future[Cleared]:
        return done(Cleared(0, 0, 0, complete=False, detail=self._health.detail))

    def health(self) -> Health:
        return self._health

    def stats(self) -> TierStats:
        return TierStats(
            name=self.name,
            state=self._health.state,
            capacity_bytes=0,
            used_bytes=0,
            objects=0,
            leases=0,
            evictions=0,
            rejected=0,
            hit_tokens=0,
            read_bytes=0,
            read_seconds=0.0,
            write_bytes=0,
            write_seconds=0.0,
        )

    def close(self) -> None:
        return
