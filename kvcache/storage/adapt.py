# SPDX-License-Identifier: Apache-2.0
"""A running storage manager takes over what of a new configuration needs no restart."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol, runtime_checkable

from kvcache.config.base import Strict
from kvcache.config.live import is_live
from kvcache.config.tiers import TiersConfig
from kvcache.storage.build import TierPlan, host_policies, lane_admission, tier_plans
from kvcache.storage.lane import Lane
from kvcache.storage.manager import StorageManager

_OF_THE_LANE = frozenset({"write", "deadline_ms", "write_queue"})
"""Fields of a tier's configuration that say how it is used; the others belong to the tier itself."""


@runtime_checkable
class Adaptable(Protocol):
    """A tier that can change while it runs."""

    def adapt(self, config: Strict) -> Collection[str]:
        """Takes over what it can of its part of the configuration.

        Returns:
            Names of the fields that have taken effect.
        """
        ...


def adapt(storage: StorageManager, old: TiersConfig, new: TiersConfig) -> list[str]:
    """Takes over the live fields in which the two differ. Any thread.

    Args:
        storage: that runs as `old` says, with the same tiers as `new`.

    Returns:
        Live fields (dotted names) that could not take effect after all, and wait for the next start.
    """
    waiting = list(_adapt_host_memory(storage, old, new))
    if new.tenants != old.tenants:
        storage.quotas.replace(new.tenants)
    for lane, before, after in zip(storage.lanes, tier_plans(old), tier_plans(new), strict=True):
        if before.config != after.config:
            waiting += _adapt_lane(lane, before, after)
    storage.fit_queues()
    return waiting


def _adapt_host_memory(storage: StorageManager, old: TiersConfig, new: TiersConfig) -> Iterator[str]:
    # What was reserved at the start is the most that there is; less of it can be used.
    if new.cpu.capacity != old.cpu.capacity:
        chunk = storage.cpu.shape.chunk_bytes
        if storage.cpu.resize(new.cpu.capacity) // chunk < new.cpu.capacity // chunk:
            storage.cpu.resize(old.cpu.capacity)
            yield "tiers.cpu.capacity"
    if (new.cpu.eviction, new.cpu.admission) != (old.cpu.eviction, old.cpu.admission):
        chunks = storage.cpu.stats().capacity_bytes // storage.cpu.shape.chunk_bytes
        storage.cpu.set_policies(*host_policies(new, chunks))


def _adapt_lane(lane: Lane, before: TierPlan, after: TierPlan) -> Iterator[str]:
    old, new = before.config.model_dump(), after.config.model_dump()
    differ = {name for name in new if new[name] != old[name] and is_live(f"tiers.{after.name}.{name}")}
    lane.write = after.config.write
    lane.deadline_s = after.config.deadline_ms / 1000
    lane.write_queue_bytes = after.config.write_queue
    done = set(_OF_THE_LANE)
    if "admission" in differ and after.name != "disk":
        lane.admission = lane_admission(after.config)
        done.add("admission")
    if isinstance(lane.tier, Adaptable):
        done |= set(lane.tier.adapt(after.config))
    for name in sorted(differ - done):
        yield f"tiers.{after.name}.{name}"
