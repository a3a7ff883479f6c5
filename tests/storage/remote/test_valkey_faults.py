# SPDX-License-Identifier: Apache-2.0
"""Valkey behind a proxy that misbehaves: what is answered is right, and silence costs one deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvcache.storage.tier import PutOutcome, WantedObject
from kvcache.storage.tiers.remote import RemoteTier
from kvcache.storage.tiers.valkey import ValkeyClient
from tests.storage.disk_rigs import Rig, aligned
from tests.storage.remote.faults import Fault, FaultProxy
from tests.storage.remote.rigs import (
    QUICK,
    context,
    eventually,
    get,
    head,
    payloads,
    put,
    remote_threads,
    valkey_config,
)
from tests.storage.remote.servers import Server

DEADLINE_S = 0.8


@pytest.fixture
def tier(valkey_proxy: tuple[Server, FaultProxy]) -> Iterator[RemoteTier]:
    tier = make_tier(valkey_proxy[1])
    yield tier
    tier.close()


@pytest.fixture
def proxy(valkey_proxy: tuple[Server, FaultProxy]) -> FaultProxy:
    return valkey_proxy[1]


def make_tier(proxy: FaultProxy, deadline_s: float = DEADLINE_S) -> RemoteTier:
    config = valkey_config(proxy.endpoint)
    assert config.valkey is not None
    client = ValkeyClient(config.valkey, deadline_s)
    return RemoteTier("remote", client, context(), deadline_s=deadline_s, policy=QUICK)


def calls_until_open(tier: RemoteTier, rig: Rig) -> int:
    objects = rig.objects(3)
    for count in range(1, 20):
        assert get(tier, objects) == [None] * 3
        if not tier.health().ready:
            return count
    return 20


@pytest.mark.parametrize(
    "fault",
    [Fault(hang=True), Fault(bytes_per_second=2000), Fault(delay_s=30)],
    ids=["hangs", "throttles", "delays"],
)
def test_a_server_without_answers_costs_one_deadline(
    tier: RemoteTier, proxy: FaultProxy, rig: Rig, fault: Fault
) -> None:
    objects = rig.objects(8)
    put(tier, objects)
    proxy.fault = fault
    assert get(tier, objects) == [None] * 8
    assert tier.health().state == "RemoteSlow"
    # From now on nobody waits: answers are there when the call returns.
    asked = tier.head([obj.key for obj in objects])
    wanted = tier.get([WantedObject(obj.key, aligned(obj.payload.nbytes)) for obj in objects])
    written = tier.put(objects)
    assert asked.done() and wanted.done() and written.done()
    assert written.result() == [PutOutcome.FAILED] * 8
    proxy.fault = Fault()
    proxy.cut()
    eventually(lambda: tier.health().ready)
    assert get(tier, objects) == payloads(objects)


@pytest.mark.parametrize("fault", [Fault(refuse=True), Fault(truncate_after=0)], ids=["refuses", "closes"])
def test_a_server_that_is_away_is_left_alone_after_a_few_calls(
    tier: RemoteTier, proxy: FaultProxy, rig: Rig, fault: Fault
) -> None:
    objects = rig.objects(4)
    put(tier, objects)
    proxy.fault = fault
    proxy.cut()
    assert calls_until_open(tier, rig) <= 3
    assert tier.health().state == "RemoteUnreachable"
    before = proxy.accepted
    for _ in range(50):
        assert get(tier, objects) == [None] * 4
    assert proxy.accepted - before < 10  # probes
    proxy.fault = Fault()
    eventually(lambda: tier.health().ready)
    assert get(tier, objects) == payloads(objects)


@pytest.mark.parametrize(
    "fault_at",
    [lambda at: Fault(truncate_after=at), lambda at: Fault(drop_after=at)],
    ids=["closed", "dropped"],
)
def test_answers_cut_off_anywhere(
    tier: RemoteTier, proxy: FaultProxy, rig: Rig, fault_at: Callable[[int], Fault]
) -> None:
    objects = rig.objects(6)
    put(tier, objects)
    for _ in range(8):
        proxy.cut()
        eventually(lambda: tier.health().ready)
        proxy.fault = fault_at(rig.rng.randrange(6 * rig.object_bytes))
        found = get(tier, objects)
        assert all(a in (None, b) for a, b in zip(found, payloads(objects), strict=True))
        proxy.fault = Fault()
    proxy.cut()
    eventually(lambda: tier.health().ready)
    assert get(tier, objects) == payloads(objects)


def test_flipped_bits_are_never_given_out(tier: RemoteTier, proxy: FaultProxy, rig: Rig) -> None:
    objects = rig.objects(6)
    put(tier, objects)
    missed = 0
    for _ in range(6):
        proxy.fault = Fault()
        proxy.cut()
        eventually(lambda: tier.health().ready)
        put(tier, objects)  # those that looked damaged were removed
        proxy.fault = Fault(flip_after=rig.rng.randrange(2 * rig.object_bytes))
        proxy.cut()
        found = get(tier, objects)
        assert all(a in (None, b) for a, b in zip(found, payloads(objects), strict=True))
        missed += None in found
    # Where the last piece that a connection brings begins before the place, nothing flips.
    assert missed >= 3


def test_writes_that_are_cut_off_leave_nothing_half(
    tier: RemoteTier, proxy: FaultProxy, rig: Rig, valkey_proxy: tuple[Server, FaultProxy]
) -> None:
    objects = rig.objects(24)
    proxy.fault = Fault(bytes_per_second=4e6)
    future = tier.put(objects)
    time.sleep(0.1)
    proxy.cut()
    outcomes = future.result(30)
    proxy.fault = Fault()
    direct = make_tier(FaultProxy(valkey_proxy[0].port))
    found = get(direct, objects)
    for outcome, seen, payload in zip(outcomes, found, payloads(objects), strict=True):
        assert seen in (None, payload)
        assert seen == payload or outcome is not PutOutcome.STORED
    direct.close()


def test_a_target_is_left_alone_after_the_deadline(tier: RemoteTier, proxy: FaultProxy, rig: Rig) -> None:
    objects = rig.objects(8)
    put(tier, objects)
    # Enough for the head of each value to come in time, and for the rest to come too late.
    proxy.fault = Fault(bytes_per_second=40_000)
    targets = [aligned(obj.payload.nbytes) for obj in objects]
    wanted = [WantedObject(obj.key, target) for obj, target in zip(objects, targets, strict=True)]
    assert tier.get(wanted).result(10) == [False] * 8
    for target in targets:
        target[:] = b"\x5a" * len(target)
    proxy.fault = Fault()
    time.sleep(0.5)
    assert all(bytes(target).strip(b"\x5a") == b"" for target in targets)


def test_a_batch_too_large_for_its_time_is_no_fault(tier: RemoteTier, proxy: FaultProxy, rig: Rig) -> None:
    objects = rig.objects(60)
    assert put(tier, objects) == [PutOutcome.STORED] * 60
    proxy.fault = Fault(bytes_per_second=600_000)
    found = get(tier, objects)
    came = sum(seen is not None for seen in found)
    assert 0 < came < 60
    assert tier.health().ready, tier.health()
    # What comes is the beginning, which is what a prompt needs.
    assert None not in found[:4]


def test_it_starts_without_its_server(
    rig: Rig, any_valkey: str, valkey_proxy: tuple[Server, FaultProxy]
) -> None:
    server, proxy = valkey_proxy
    server.stop()
    tier = make_tier(proxy)
    assert not tier.health().ready
    assert put(tier, rig.objects(1)) == [PutOutcome.FAILED]
    server.start()
    eventually(lambda: tier.health().ready)
    objects = rig.objects(2)
    assert put(tier, objects) == [PutOutcome.STORED] * 2
    tier.close()


def test_a_server_that_is_restarted_is_found_again(
    tier: RemoteTier, rig: Rig, valkey_proxy: tuple[Server, FaultProxy]
) -> None:
    server, _ = valkey_proxy
    objects = rig.objects(5)
    put(tier, objects)
    server.restart()
    eventually(lambda: tier.health().ready and put(tier, objects) == [PutOutcome.STORED] * 5)
    assert get(tier, objects) == payloads(objects)


def test_closing_while_the_server_hangs(proxy: FaultProxy, rig: Rig) -> None:
    before = remote_threads()
    tier = make_tier(proxy, deadline_s=30.0)
    objects = rig.objects(4)
    put(tier, objects)
    proxy.fault = Fault(hang=True)
    futures = [tier.get([WantedObject(o.key, aligned(o.payload.nbytes))]) for o in objects]
    written = tier.put(rig.objects(3))
    time.sleep(0.1)
    tier.close()
    assert all(future.result(1) == [False] for future in futures)
    assert written.result(1) == [PutOutcome.FAILED] * 3
    eventually(lambda: remote_threads() <= before)


def test_many_threads_and_faults_at_random(tier: RemoteTier, proxy: FaultProxy, rig: Rig) -> None:
    objects = rig.objects(20)
    put(tier, objects)
    wanted = payloads(objects)
    wrong: list[object] = []

    def work(seed: int) -> None:
        for _ in range(12):
            found = get(tier, objects)
            wrong.extend(a for a, b in zip(found, wanted, strict=True) if a not in (None, b))
            tier.put(objects).result(30)
            head(tier, objects)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    faults = [
        Fault(),
        Fault(flip_after=5000),
        Fault(truncate_after=40_000),
        Fault(refuse=True),
        Fault(hang=True),
    ]
    while any(thread.is_alive() for thread in threads):
        proxy.fault = rig.rng.choice(faults)
        time.sleep(0.05)
        if rig.rng.random() < 0.3:
            proxy.cut()
    assert wrong == []
    proxy.fault = Fault()
    proxy.cut()
    eventually(lambda: tier.health().ready)
    put(tier, objects)
    eventually(lambda: get(tier, objects) == wanted)
