# SPDX-License-Identifier: Apache-2.0
"""The tier in a real Mooncake Store over TCP on loopback: its master, a process with memory, and clients."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.config.tiers import MooncakeConfig, RemoteTierConfig
from kvcache.storage.tier import ClearScope, PutOutcome
from kvcache.storage.tiers.mooncake import PREFIX, MooncakeClient, open_mooncake
from kvcache.storage.tiers.remote import RemoteTier
from kvcache.storage.tiers.remote_client import name_of
from tests.ports import free_port
from tests.storage.disk_rigs import Rig
from tests.storage.remote.rigs import QUICK, context, eventually, get, head, payloads, put
from tests.storage.remote.servers import Server, mooncake_master, mooncake_store


@pytest.fixture
def store(mooncake_package: str, tmp_path: Path) -> Iterator[tuple[Server, int]]:
    """A master with a process of 128 MB, and the master's HTTP port."""
    master, http = mooncake_master(mooncake_package, tmp_path / "master")
    with master, mooncake_store(mooncake_package, tmp_path / "memory", master, "128 MB"):
        yield master, http


def config_of(store: tuple[Server, int], **of: Any) -> MooncakeConfig:
    master, http = store
    settings = {"master": master.endpoint, "metadata_server": "P2PHANDSHAKE", "local_hostname": "127.0.0.1"}
    settings |= {"buffer": "32Mi", "admin_endpoint": f"127.0.0.1:{http}"}
    return MooncakeConfig.model_validate(settings | of)


def make_tier(config: MooncakeConfig, deadline_s: float = 5.0, **of: Any) -> RemoteTier:
    client = MooncakeClient(config, deadline_s)
    return RemoteTier("remote", client, context(**of), deadline_s=deadline_s, policy=QUICK)


def test_two_processes_share_objects(store: tuple[Server, int], rig: Rig) -> None:
    pinned: set[object] = set()
    tier = open_mooncake(RemoteTierConfig(mooncake=config_of(store), deadline_ms=5000), context())
    other = make_tier(config_of(store), pinned=pinned.__contains__)
    tenant = b"tenant-tenant-te"
    objects = rig.objects(20) + [rig.object(num_tokens=n, tenant=tenant) for n in (1, 63)]
    missing = rig.objects(2)
    assert head(tier, objects) == [None] * 22
    assert put(tier, objects) == [PutOutcome.STORED] * 22
    assert put(other, objects) == [PutOutcome.PRESENT] * 22
    assert head(other, objects + missing) == [obj.payload.nbytes for obj in objects] + [None] * 2
    assert get(other, objects + missing) == payloads(objects) + [None] * 2
    assert tier.remove([obj.key for obj in objects[:3] + missing]).result(10) == 3
    assert get(other, objects[:4]) == [None] * 3 + payloads(objects[3:4])

    pinned.add(objects[3].key)
    assert other.clear(ClearScope(tenant=tenant)).result(10)[:3] == (2, 64 * 480, 0)
    assert other.clear(ClearScope(keys=[objects[4].key])).result(10).objects == 1
    cleared = other.clear(ClearScope(namespace=rig.namespace)).result(10)
    assert (cleared.objects, cleared.kept, cleared.complete) == (15, 1, True)
    assert other.clear(ClearScope(pinned_too=True)).result(10).objects == 1
    tier.close()
    other.close()


def test_damaged_objects_are_misses(store: tuple[Server, int], rig: Rig) -> None:
    tier = make_tier(config_of(store))
    objects = rig.objects(3)
    put(tier, objects)
    client = tier._client
    assert isinstance(client, MooncakeClient)
    keys = [PREFIX + name_of(obj.key) for obj in objects]
    value = bytearray(memoryview(client.store.get_buffer(keys[0])))
    value[rig.rng.randrange(len(value))] ^= 1
    for key, bad in ((keys[0], bytes(value)), (keys[1], bytes(value[:-1]))):
        assert client.store.remove(key, True) == 0
        assert client.store.put(key, bad) == 0
    assert get(tier, objects) == [None, None, bytes(objects[2].payload)]
    eventually(lambda: head(tier, objects)[:2] == [None, None])
    assert put(tier, objects[:2]) == [PutOutcome.STORED] * 2
    assert get(tier, objects) == payloads(objects)
    tier.close()


def test_without_the_list_only_keys_are_cleared(store: tuple[Server, int], rig: Rig) -> None:
    tier = make_tier(config_of(store, admin_endpoint=None))
    objects = rig.objects(3)
    put(tier, objects)
    cleared = tier.clear(ClearScope()).result(10)
    assert not cleared.complete and "admin_endpoint" in cleared.detail
    assert tier.clear(ClearScope(keys=[obj.key for obj in objects])).result(10).objects == 3
    tier.close()


def test_a_master_that_comes_late_is_restarted_and_hangs(
    mooncake_package: str, tmp_path: Path, rig: Rig, request: pytest.FixtureRequest
) -> None:
    master, http = mooncake_master(mooncake_package, tmp_path / "master")
    config = config_of((master, http), segment="32Mi")
    tier = make_tier(config, deadline_s=1.0)
    assert tier.health().state == "RemoteUnreachable"
    assert put(tier, rig.objects(1)) == [PutOutcome.FAILED]
    request.addfinalizer(master.stop)
    master.start()
    eventually(lambda: tier.health().ready)
    objects = rig.objects(4)
    assert put(tier, objects) == [PutOutcome.STORED] * 4

    master.restart()  # it has forgotten everything
    eventually(lambda: tier.health().ready and PutOutcome.STORED in put(tier, objects))
    eventually(lambda: set(put(tier, objects)) <= {PutOutcome.STORED, PutOutcome.PRESENT})
    eventually(lambda: get(tier, objects) == payloads(objects))

    assert master.process is not None
    os.kill(master.process.pid, signal.SIGSTOP)
    try:
        assert head(tier, objects) == [None] * 4
        assert tier.health().state == "RemoteSlow"
        assert tier.head([objects[0].key]).done()
    finally:
        os.kill(master.process.pid, signal.SIGCONT)
    eventually(lambda: tier.health().ready)
    eventually(lambda: get(tier, objects) == payloads(objects))
    tier.close()


def test_a_master_that_is_silent_from_the_start(
    mooncake_package: str, tmp_path: Path, rig: Rig, request: pytest.FixtureRequest
) -> None:
    """The client's own set-up would hold up all of the process until it answers."""
    master, http = mooncake_master(mooncake_package, tmp_path / "master")
    request.addfinalizer(master.stop)
    master.start()
    assert master.process is not None
    os.kill(master.process.pid, signal.SIGSTOP)
    try:
        tier = make_tier(config_of((master, http), segment="32Mi"), deadline_s=0.3)
        assert tier.health().state in ("RemoteUnreachable", "RemoteConnecting")
        eventually(lambda: "timed out" in tier.health().detail)
        assert tier.head([rig.object().key]).done()
    finally:
        os.kill(master.process.pid, signal.SIGCONT)
    eventually(lambda: tier.health().ready)
    objects = rig.objects(2)
    assert put(tier, objects) == [PutOutcome.STORED] * 2
    assert get(tier, objects) == payloads(objects)
    tier.close()


def test_a_buffer_that_is_too_small(mooncake_package: str) -> None:
    from kvcache.memory.formats import KVShape
    from tests.storage.disk_rigs import SHAPE

    config = config_of((Server([], Path(), free_port()), 1), buffer="16Mi")
    shape = KVShape(32, 2, 1024, SHAPE.dtype, 256)
    with pytest.raises(ValueError, match=r"mooncake.buffer is 16777216 bytes"):
        open_mooncake(RemoteTierConfig(mooncake=config), context(shape=shape))
