# SPDX-License-Identifier: Apache-2.0
"""Who is let into host memory, and what changes while it runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcache.config.tiers import TenantConfig
from kvcache.storage.policies import ADMISSIONS, POLICIES, AdmissionPolicy
from kvcache.storage.tenants import Quotas, tenant_of
from kvcache.storage.tier import NO_TENANT
from kvcache.storage.tiers.cpu import Outcome
from kvcache.tokens.keys import CacheEngineKey
from tests.storage.rigs import SHAPE, Rig, chain


def use(rig: Rig, keys: list[CacheEngineKey]) -> int:
    """A request: looks up, and stores what it computes; how many chunks it found."""
    found = rig.begin("r", keys).chunks
    rig.storage.release("r")
    rig.store(keys, first=found)
    return found


def test_what_is_used_once_does_not_get_in() -> None:
    rig = Rig(slots=8, cpu={"admission": ADMISSIONS["SecondUse"](8)})
    keys = chain("a", 4)
    assert [use(rig, keys) for _ in range(3)] == [0, 0, 4]
    assert use(rig, chain("b", 2)) == 0
    stats = rig.tier.stats()
    assert (stats.objects, stats.rejected) == (4, 0)
    assert stats.declined > 0
    rig.storage.close()


def test_a_chunk_that_is_not_worth_its_victim_leaves_it_where_it_is() -> None:
    class Never(AdmissionPolicy[CacheEngineKey]):
        def __init__(self, capacity: int) -> None:
            self.victims: list[CacheEngineKey] = []

        def seen(self, key: CacheEngineKey) -> None: ...

        def admits(self, key: CacheEngineKey, victim: CacheEngineKey | None) -> bool:
            if victim is not None:
                self.victims.append(victim)
            return victim is None

    admission = Never(4)
    rig = Rig(slots=3, cpu={"admission": admission})
    old = [chain(name, 1)[0] for name in "abc"]
    for key in old:
        assert rig.store([key]) == [Outcome.RESERVED]
    for number in range(3):
        assert rig.store(chain(f"n{number}", 1)) == [Outcome.DECLINED]
    # The same one each time: it was not moved.
    assert admission.victims == [old[0]] * 3
    assert all(key in rig.tier for key in old)
    rig.storage.close()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies_change_while_it_runs(name: str) -> None:
    rig = Rig(slots=6)
    kept = chain("a", 3)
    rig.store(kept)
    rig.begin("r", kept)
    rig.tier.set_policies(POLICIES[name](6), None)
    for number in range(20):
        assert rig.store(chain(f"n{number}", 1)) == [Outcome.RESERVED]
    rig.check_leased("r", kept)
    rig.storage.release("r")
    rig.tier.resize(2 * SHAPE.chunk_bytes)
    stats = rig.tier.stats()
    assert (stats.objects, stats.used_bytes, stats.capacity_bytes) == (2, *[2 * SHAPE.chunk_bytes] * 2)
    rig.tier.resize(5 * SHAPE.chunk_bytes)
    for number in range(9):
        rig.store(chain(f"m{number}", 1))
    assert rig.tier.stats().objects == 5
    rig.storage.close()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_gives_chains_up_from_their_ends(name: str) -> None:
    rig = Rig(slots=9)
    rig.tier.set_policies(POLICIES[name](9), None)
    prompts = [chain(f"{number}-", 1 + number % 4) for number in range(40)]
    for keys in prompts:
        use(rig, keys)
        for other in prompts:
            there = [key in rig.tier for key in other]
            assert there == sorted(there, reverse=True)
    rig.storage.close()


def table(**quotas: int) -> dict[str, TenantConfig]:
    return {salt: TenantConfig.model_construct(quota=quota) for salt, quota in quotas.items()}


def test_quotas_of_a_configuration() -> None:
    quotas = Quotas({"a": TenantConfig(quota="2Mi"), "*": TenantConfig(quota="1Mi")})  # type: ignore[arg-type]
    assert quotas.of(tenant_of("a")) == 2 << 20
    assert quotas.of(tenant_of("b")) == 1 << 20
    assert quotas.of(NO_TENANT) is None
    of: Callable[[bytes], int | None] = quotas.of
    quotas.replace({"": TenantConfig(quota="3Mi")})  # type: ignore[arg-type]
    assert (of(NO_TENANT), of(tenant_of("a"))) == (3 << 20, None)
    assert tenant_of("") == NO_TENANT
    assert len({tenant_of(salt) for salt in ("", "a", "b", "*")}) == 4


def test_a_tenant_over_its_quota_gives_up_its_own() -> None:
    quotas = Quotas(table(a=2 * SHAPE.chunk_bytes))
    rig = Rig(slots=8, cpu={"quota": quotas.of})
    tenant = tenant_of("a")
    others = [chain(f"o{number}", 1) for number in range(3)]
    for keys in others:
        rig.store(keys)
    mine = [chain(f"m{number}", 1) for number in range(4)]
    for keys in mine:
        assert rig.store(keys, tenant=tenant) == [Outcome.RESERVED]
    assert [keys[0] in rig.tier for keys in mine] == [False, False, True, True]
    assert all(keys[0] in rig.tier for keys in others)
    # All of its chunks are in use: it is declined, with room to spare.
    rig.begin("r", mine[2])
    rig.begin("s", mine[3])
    assert rig.store(chain("m4", 1), tenant=tenant) == [Outcome.DECLINED]
    assert rig.tier.stats().declined == 1
    for owner in "rs":
        rig.storage.release(owner)
    rig.storage.close()
