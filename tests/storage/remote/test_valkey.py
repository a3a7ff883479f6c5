# SPDX-License-Identifier: Apache-2.0
"""The tier on real servers of Valkey and Redis."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from kvcache.storage.tier import NO_TENANT, ClearScope, PutOutcome, WantedObject
from kvcache.storage.tiers.remote import RemoteTier
from kvcache.storage.tiers.remote_client import name_of
from kvcache.storage.tiers.valkey import open_valkey
from kvcache.tokens.keys import CacheEngineKey
from tests.storage.disk_rigs import Rig, aligned
from tests.storage.remote.rigs import (
    context,
    eventually,
    get,
    head,
    payloads,
    put,
    remote_threads,
    valkey_config,
)
from tests.storage.remote.servers import Server, cli


@pytest.fixture
def tier(valkey: Server) -> Iterator[RemoteTier]:
    tier = open_valkey(valkey_config(valkey.endpoint), context())
    yield tier
    tier.close()


def test_what_is_put_comes_back(tier: RemoteTier, rig: Rig) -> None:
    objects = rig.objects(37) + [rig.object(num_tokens=n) for n in (1, 7, 63)]
    missing = rig.objects(3)
    assert head(tier, objects) == [None] * len(objects)
    assert get(tier, objects[:5]) == [None] * 5
    assert put(tier, objects) == [PutOutcome.STORED] * len(objects)
    mixed = objects + missing
    random.Random(rig.seed).shuffle(mixed)
    there = {obj.key for obj in objects}
    assert head(tier, mixed) == [obj.payload.nbytes if obj.key in there else None for obj in mixed]
    assert get(tier, mixed) == [bytes(obj.payload) if obj.key in there else None for obj in mixed]
    stats = tier.stats()
    assert stats.state == "Ready"
    assert stats.write_bytes == stats.read_bytes == sum(obj.payload.nbytes for obj in objects)
    assert stats.read_seconds > 0 < stats.write_seconds
    assert stats.fetch_failures == 5 + len(missing)


def test_empty_calls(tier: RemoteTier) -> None:
    assert tier.head([]).result(1) == []
    assert tier.get([]).result(1) == []
    assert tier.put([]).result(1) == []
    assert tier.remove([]).result(5) == 0


def test_the_same_object_twice_is_stored_once(tier: RemoteTier, valkey: Server, rig: Rig) -> None:
    obj = rig.object()
    assert put(tier, [obj]) == [PutOutcome.STORED]
    assert put(tier, [obj]) == [PutOutcome.PRESENT]
    assert sorted(put(tier, [twin := rig.object(), twin]), key=str) == [PutOutcome.PRESENT, PutOutcome.STORED]
    assert cli(valkey, "DBSIZE") == "2"


def test_tiers_that_write_the_same_objects(tier: RemoteTier, valkey: Server, rig: Rig) -> None:
    objects = rig.objects(24)
    other = open_valkey(valkey_config(valkey.endpoint, remote={"connections": 3}), context())
    outcomes = [tier.put(objects), other.put(objects[::-1])]
    first, second = (future.result(30) for future in outcomes)
    both = list(zip(first, second[::-1], strict=True))
    assert all(sorted(o.name for o in pair) == ["PRESENT", "STORED"] for pair in both), both
    assert get(tier, objects) == get(other, objects) == payloads(objects)
    other.close()


def test_readers_beside_writers_see_whole_objects(valkey: Server, rig: Rig) -> None:
    objects = rig.objects(16)
    tiers = [open_valkey(valkey_config(valkey.endpoint), context()) for _ in range(2)]
    seen: list[list[bytes | None]] = []

    def read() -> None:
        for _ in range(10):
            seen.append(get(tiers[1], objects))

    reader = threading.Thread(target=read)
    reader.start()
    for obj in objects:
        put(tiers[0], [obj])
    reader.join()
    wanted = payloads(objects)
    assert all(found in (None, payload) for row in seen for found, payload in zip(row, wanted, strict=True))
    for tier in tiers:
        tier.close()


def test_damaged_values_are_misses_and_make_room(tier: RemoteTier, valkey: Server, rig: Rig) -> None:
    from valkey import Valkey

    objects = rig.objects(6)
    put(tier, objects)
    with Valkey(port=valkey.port) as client:
        names = [f"kvcache:{name_of(obj.key)}" for obj in objects]
        value = bytearray(client.get(names[0]))
        value[rig.rng.randrange(4096, len(value))] ^= 1 << rig.rng.randrange(8)
        client.set(names[0], bytes(value))  # a bit of the payload
        value = bytearray(client.get(names[1]))
        value[rig.rng.randrange(4096)] ^= 1 << rig.rng.randrange(8)
        client.set(names[1], bytes(value))  # a bit of the header
        client.set(names[2], client.get(names[3]))  # another chunk's
        client.set(names[4], b"x" * len(value))
        client.delete(names[5])
        client.rpush(names[5], b"no string")
    assert head(tier, objects)[5] is None
    expected: list[bytes | None] = [None, None, None, bytes(objects[3].payload), None, None]
    spoiled = [objects[i] for i in (0, 1, 2, 4)]
    assert [get(tier, [obj])[0] for obj in objects[:5]] == expected[:5]
    eventually(lambda: head(tier, spoiled) == [None] * 4)
    eventually(lambda: tier.health().ready)
    assert put(tier, spoiled) == [PutOutcome.STORED] * 4
    assert get(tier, spoiled) == payloads(spoiled)


def test_a_value_of_another_length_is_replaced(tier: RemoteTier, valkey: Server, rig: Rig) -> None:
    obj = rig.object()
    put(tier, [obj])
    cli(valkey, "APPEND", f"kvcache:{name_of(obj.key)}", "more")
    assert head(tier, [obj]) == [None]
    assert get(tier, [obj]) == [None]
    assert put(tier, [obj]) == [PutOutcome.STORED]
    assert get(tier, [obj]) == payloads([obj])


def test_remove(tier: RemoteTier, rig: Rig) -> None:
    objects = rig.objects(9)
    put(tier, objects)
    assert tier.remove([obj.key for obj in objects[:4] + rig.objects(2)]).result(10) == 4
    assert [size is None for size in head(tier, objects)] == [True] * 4 + [False] * 5


def test_clear_by_namespace_tenant_and_keys(valkey: Server, rig: Rig) -> None:
    pinned: set[CacheEngineKey] = set()
    tier = open_valkey(valkey_config(valkey.endpoint), context(pinned=pinned.__contains__))
    tenants = [b"tenant-%09d" % number for number in range(2)]
    other = b"another-name-spc"
    groups = {
        "plain": rig.objects(5),
        "first": rig.objects(4, tenant=tenants[0]),
        "second": rig.objects(3, tenant=tenants[1]),
        "other": rig.objects(2, namespace=other),
    }
    everything = [obj for group in groups.values() for obj in group]
    put(tier, everything)
    cli(valkey, "SET", "kvcache:not-ours", "x")
    cli(valkey, "SET", "somebody", "else")
    pinned.add(groups["first"][0].key)

    cleared = tier.clear(ClearScope(tenant=tenants[0])).result(10)
    assert (cleared.objects, cleared.kept, cleared.complete) == (3, 1, True)
    assert cleared.num_bytes == 3 * everything[0].payload.nbytes
    cleared = tier.clear(ClearScope(tenant=tenants[0], pinned_too=True)).result(10)
    assert (cleared.objects, cleared.kept) == (1, 0)
    assert tier.clear(ClearScope(tenant=NO_TENANT, namespace=other)).result(10).objects == 2
    keys = [obj.key for obj in groups["second"][:2]] + [rig.object().key]
    assert tier.clear(ClearScope(keys=keys)).result(10).objects == 2
    assert head(tier, everything) == [
        obj.payload.nbytes if obj in groups["plain"] + groups["second"][2:] else None for obj in everything
    ]
    assert tier.clear(ClearScope()).result(10).objects == 6
    assert head(tier, everything) == [None] * len(everything)
    assert cli(valkey, "DBSIZE") == "2"
    tier.close()


def test_a_server_that_is_full_declines(valkey: Server, rig: Rig) -> None:
    tier = open_valkey(valkey_config(valkey.endpoint), context())
    put(tier, rig.objects(4))
    try:
        cli(valkey, "CONFIG", "SET", "maxmemory", "1mb")
        assert put(tier, rig.objects(3)) == [PutOutcome.DECLINED] * 3
        assert tier.health().ready
        assert tier.stats().rejected == 3
        cli(valkey, "CONFIG", "SET", "maxmemory", "0")
        assert put(tier, rig.objects(3)) == [PutOutcome.STORED] * 3
    finally:
        cli(valkey, "CONFIG", "SET", "maxmemory", "0")
        tier.close()


def test_objects_live_as_long_as_they_are_told(valkey: Server, rig: Rig) -> None:
    tier = open_valkey(valkey_config(valkey.endpoint, remote={"ttl_s": 1000}), context())
    obj = rig.object()
    put(tier, [obj])
    assert 0 < int(cli(valkey, "TTL", f"kvcache:{name_of(obj.key)}")) <= 1000
    tier.close()


def test_what_waits_to_be_written_is_bounded(valkey: Server, rig: Rig) -> None:
    limit = 1 << 20
    tier = open_valkey(valkey_config(valkey.endpoint, remote={"write_queue": "1Mi"}), context())
    objects = rig.objects(limit // rig.object().payload.nbytes + 9)
    outcomes = put(tier, objects)
    room = limit // objects[0].payload.nbytes
    assert outcomes == [PutOutcome.STORED] * room + [PutOutcome.DECLINED] * (len(objects) - room)
    assert put(tier, objects[room:]) == [PutOutcome.STORED] * (len(objects) - room)
    tier.close()


def test_only_the_target_is_written(tier: RemoteTier, rig: Rig) -> None:
    obj = rig.object()
    put(tier, [obj])
    memory = aligned(3 * 40960)
    memory[:] = b"\xa5" * len(memory)
    target = memory[40960 : 40960 + obj.payload.nbytes]
    assert tier.get([WantedObject(obj.key, target)]).result(10) == [True]
    assert target == obj.payload
    assert bytes(memory[:40960]).strip(b"\xa5") == bytes(memory[40960 + len(target) :]).strip(b"\xa5") == b""


def test_after_closing_nothing_is_there(valkey: Server, rig: Rig) -> None:
    before = remote_threads()
    tier = open_valkey(valkey_config(valkey.endpoint), context())
    objects = rig.objects(3)
    put(tier, objects)
    assert remote_threads() > before
    tier.close()
    assert head(tier, objects) == [None] * 3
    assert get(tier, objects) == [None] * 3
    assert put(tier, objects) == [PutOutcome.FAILED] * 3
    assert tier.remove([objects[0].key]).result(5) == 0
    eventually(lambda: remote_threads() <= before)
