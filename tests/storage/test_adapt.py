# SPDX-License-Identifier: Apache-2.0
"""A running storage manager that takes over another configuration."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from kvcache.config.base import Strict
from kvcache.config.tiers import RemoteTierConfig, TiersConfig
from kvcache.storage.adapt import adapt
from kvcache.storage.tenants import tenant_of
from tests.storage.doubles import DoubleTier
from tests.storage.rigs import SHAPE, Rig, chain

SLOTS = 300
MIB = 1 << 20
REMOTE = {"valkey": {"endpoints": ["host:6379"]}}


def tiers(capacity: int = SLOTS * SHAPE.chunk_bytes, **more: Any) -> TiersConfig:
    cpu = {"capacity": f"{capacity >> 10}Ki", **more.pop("cpu", {})}
    return TiersConfig.model_validate({"cpu": cpu, **more})


def roomy_rig(*below: DoubleTier) -> Rig:
    assert SLOTS * SHAPE.chunk_bytes >= 2 * MIB
    return Rig(tiers=below, slots=SLOTS)


def test_less_host_memory_evicts_at_once_and_what_was_set_aside_comes_back() -> None:
    rig = roomy_rig()
    keys = chain("a", SLOTS)
    rig.store(keys)
    wide, narrow = tiers(), tiers(MIB)
    assert adapt(rig.storage, wide, narrow) == []
    stats = rig.tier.stats()
    assert stats.capacity_bytes <= MIB
    assert stats.used_bytes <= MIB
    assert stats.evictions == SLOTS - stats.objects
    assert adapt(rig.storage, narrow, wide) == []
    rig.store(chain("b", SLOTS))
    assert rig.tier.stats().objects == SLOTS
    rig.check_clean()


def test_more_host_memory_than_was_set_aside_waits_and_nothing_is_lost() -> None:
    rig = roomy_rig()
    rig.store(chain("a", 20))
    old, new = tiers(), tiers(SLOTS * SHAPE.chunk_bytes * 2, cpu={"eviction": "FIFO"})
    assert adapt(rig.storage, old, new) == ["tiers.cpu.capacity"]
    stats = rig.tier.stats()
    assert (stats.capacity_bytes, stats.objects) == (SLOTS * SHAPE.chunk_bytes, 20)
    rig.check_clean()


def test_another_eviction_policy_decides_from_now_on() -> None:
    rig = roomy_rig()
    first, rest = chain("first", 1), chain("rest", SLOTS - 1)
    rig.store(first)
    rig.store(rest)
    assert adapt(rig.storage, tiers(), tiers(cpu={"eviction": "MRU"})) == []
    rig.store(chain("new", 1))
    # The least recently used one would be the first; the most recently used one is the last of the rest.
    assert rig.storage.lookup(first) == 1
    assert rig.storage.lookup(rest) == SLOTS - 2
    rig.check_clean()


def test_quotas_of_tenants() -> None:
    rig = roomy_rig()
    tenant = tenant_of("salt")
    with_quota = tiers(tenants={"salt": {"quota": "1Mi"}})
    assert rig.storage.quotas.of(tenant) is None
    assert adapt(rig.storage, tiers(), with_quota) == []
    assert rig.storage.quotas.of(tenant) == MIB
    assert adapt(rig.storage, with_quota, tiers()) == []
    assert rig.storage.quotas.of(tenant) is None
    rig.check_clean()


def test_how_a_tier_below_is_used() -> None:
    rig = roomy_rig(DoubleTier("remote"))

    def used() -> tuple[object, ...]:
        lane = rig.storage.lanes[0]
        return lane.deadline_s, lane.write, lane.write_queue_bytes, lane.admission is None

    remote = {**REMOTE, "deadline_ms": 50, "write": "Back", "write_queue": "4Mi", "admission": "SecondUse"}
    assert adapt(rig.storage, tiers(remote=REMOTE), tiers(remote=remote)) == []
    assert used() == (0.05, "Back", 4 * MIB, False)
    assert adapt(rig.storage, tiers(remote=remote), tiers(remote=REMOTE)) == []
    assert used() == (2.0, "Through", 512 * MIB, True)
    rig.check_clean()


class AdaptableTier(DoubleTier):
    given: Strict | None = None

    def adapt(self, config: Strict) -> Collection[str]:
        self.given = config
        return ["ttl_s"]


@pytest.mark.parametrize(("tier", "waiting"), [(DoubleTier, ["tiers.remote.ttl_s"]), (AdaptableTier, [])])
def test_what_a_tier_cannot_change_itself_waits(tier: type[DoubleTier], waiting: list[str]) -> None:
    below = tier("remote")
    rig = roomy_rig(below)
    assert adapt(rig.storage, tiers(remote=REMOTE), tiers(remote={**REMOTE, "ttl_s": 9})) == waiting
    if isinstance(below, AdaptableTier):
        assert isinstance(below.given, RemoteTierConfig)
        assert below.given.ttl_s == 9
    rig.check_clean()
