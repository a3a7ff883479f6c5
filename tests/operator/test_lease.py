# SPDX-License-Identifier: Apache-2.0
"""Of several processes one works. Time is simulated."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvcache_operator.cluster import ClusterError
from kvcache_operator.lease import Lease, LeaseLostError
from tests.operator.fake_cluster import FakeCluster

LIFE_S = 15.0


class World:
    """A cluster, a clock, and processes that want the lease."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.now = 0.0

    def lease(self, identity: str) -> Lease:
        return Lease(self.cluster, "system", identity, LIFE_S, clock=lambda: self.now)

    def holder(self) -> str:
        lease = self.cluster.get("coordination.k8s.io/v1", "Lease", "system", "kvcache-operator")
        assert lease is not None
        return str(lease["spec"]["holderIdentity"])


def attempt(lease: Lease) -> str | None:
    return asyncio.run(lease._try())


def test_the_second_waits_until_the_first_is_silent() -> None:
    world = World()
    first, second = world.lease("first"), world.lease("second")
    assert attempt(first) is None
    assert attempt(second) == "first"
    for _ in range(10):
        world.now += LIFE_S / 3
        assert attempt(first) is None
        assert attempt(second) == "first"
    world.now += LIFE_S * 0.9
    assert attempt(second) == "first"
    world.now += LIFE_S * 0.2
    assert attempt(second) is None
    assert attempt(first) == "second"


def test_a_lease_that_is_given_back_is_free_at_once() -> None:
    world = World()
    first, second = world.lease("first"), world.lease("second")
    assert attempt(first) is None
    asyncio.run(first.release())
    assert attempt(second) is None


def test_never_do_two_believe_that_they_hold_it() -> None:
    """Random silences of random length: whoever could not renew has given up before another takes over."""
    world, rng = World(), random.Random(7)
    leases = [world.lease(name) for name in ("a", "b", "c")]
    believes: dict[str, float] = {}
    cut: dict[str, float] = {}
    for _ in range(3000):
        world.now += rng.uniform(0, LIFE_S / 3)
        lease = rng.choice(leases)
        if rng.random() < 0.02:
            cut[lease.identity] = world.now + rng.uniform(0, 3 * LIFE_S)
        for name in [name for name, since in believes.items() if world.now - since > LIFE_S * 2 / 3]:
            del believes[name]
        if cut.get(lease.identity, 0) > world.now:
            continue
        if attempt(lease) is None:
            believes[lease.identity] = world.now
        else:
            believes.pop(lease.identity, None)
        assert len(believes) <= 1


def test_who_cannot_renew_gives_up() -> None:
    async def hold() -> None:
        cluster = FakeCluster()
        lease = Lease(cluster, "system", "me", 0.3)
        await lease.acquire()
        cluster.faults["Lease"] = 500
        await lease.hold()

    with pytest.raises(LeaseLostError, match="renewed"):
        asyncio.run(asyncio.wait_for(hold(), 10))


def test_a_server_that_does_not_answer_is_waited_for() -> None:
    async def acquire() -> str | None:
        cluster = FakeCluster()
        cluster.faults["Lease"] = None
        lease = Lease(cluster, "system", "me", 0.06)
        waiting = asyncio.create_task(lease.acquire())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        cluster.faults.clear()
        await waiting
        return await lease._try()

    assert asyncio.run(asyncio.wait_for(acquire(), 10)) is None


def test_errors_are_the_callers() -> None:
    world = World()
    world.cluster.faults["Lease"] = 500
    with pytest.raises(ClusterError):
        attempt(world.lease("a"))
