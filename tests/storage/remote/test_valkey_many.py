# SPDX-License-Identifier: Apache-2.0
"""Several servers: a cluster that moves slots and loses a node, and sentinels that name another master."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcache.storage.tier import ClearScope, PutOutcome
from kvcache.storage.tiers.remote import RemoteTier
from kvcache.storage.tiers.remote_client import name_of
from kvcache.storage.tiers.valkey import ValkeyClient
from tests.ports import free_port
from tests.storage.disk_rigs import Rig
from tests.storage.remote.rigs import QUICK, context, eventually, get, head, payloads, put, valkey_config
from tests.storage.remote.servers import Server, cli, valkey_server

SLOTS = 16384


def cluster_port() -> int:
    """One whose bus port, 10,000 above it, exists."""
    while (port := free_port()) > 55_000:
        pass
    return port


@pytest.fixture
def cluster(valkey_binary: str, tmp_path: Path) -> Iterator[list[Server]]:
    with ExitStack() as running:
        nodes = []
        for number in range(3):
            folder = tmp_path / f"node{number}"
            options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
            options += ["--cluster-require-full-coverage", "no", "--cluster-allow-reads-when-down", "yes"]
            node = valkey_server(valkey_binary, folder, *options, port=cluster_port())
            nodes.append(running.enter_context(node))
        for number, node in enumerate(nodes):
            first, end = SLOTS * number // 3, SLOTS * (number + 1) // 3
            cli(node, "CLUSTER", "ADDSLOTSRANGE", str(first), str(end - 1))
            cli(node, "CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
            if number:
                cli(node, "CLUSTER", "MEET", "127.0.0.1", str(nodes[0].port))
        names = [cli(node, "CLUSTER", "MYID") for node in nodes]

        def met(node: Server) -> bool:
            known = cli(node, "CLUSTER", "NODES")
            return "handshake" not in known and all(name in known for name in names)

        eventually(lambda: all(met(node) for node in nodes))
        eventually(lambda: all("cluster_state:ok" in cli(node, "CLUSTER", "INFO") for node in nodes))
        yield nodes


def cluster_tier(cluster: list[Server], deadline_s: float = 5.0) -> RemoteTier:
    config = valkey_config(cluster[0].endpoint, cluster[1].endpoint, mode="Cluster")
    assert config.valkey is not None
    client = ValkeyClient(config.valkey, deadline_s)
    return RemoteTier("remote", client, context(), deadline_s=deadline_s, policy=QUICK)


def test_a_cluster(cluster: list[Server], rig: Rig) -> None:
    tier = cluster_tier(cluster)
    objects = rig.objects(40)
    assert put(tier, objects) == [PutOutcome.STORED] * 40
    assert put(tier, objects) == [PutOutcome.PRESENT] * 40
    assert all(int(cli(node, "DBSIZE")) > 0 for node in cluster)
    assert head(tier, objects) == [obj.payload.nbytes for obj in objects]
    assert get(tier, objects) == payloads(objects)
    assert tier.remove([obj.key for obj in objects[:5]]).result(10) == 5

    # A slot moves: its objects are missed once, then looked for at the right node.
    moved = objects[20]
    slot = int(cli(cluster[0], "CLUSTER", "KEYSLOT", f"kvcache:{name_of(moved.key)}"))
    source = cluster[[SLOTS * (n + 1) // 3 > slot for n in range(3)].index(True)]
    target = next(node for node in cluster if node is not source)
    node_id = cli(target, "CLUSTER", "MYID")
    cli(source, "DEL", f"kvcache:{name_of(moved.key)}")
    # A heartbeat of the source that is under way now still claims the slot: with the higher epoch it would
    # take it back from the target, and the two would name each other for ever.
    cli(target, "CLUSTER", "BUMPEPOCH")
    for node in sorted(cluster, key=lambda node: (node is not target, node is not source)):
        cli(node, "CLUSTER", "SETSLOT", str(slot), "NODE", node_id)
    eventually(lambda: put(tier, [moved]) == [PutOutcome.STORED])
    eventually(lambda: get(tier, [moved]) == payloads([moved]))
    assert tier.health().ready
    cleared = tier.clear(ClearScope()).result(10)
    assert (cleared.objects, cleared.complete) == (35, True)
    tier.close()


def test_a_cluster_that_loses_a_node(cluster: list[Server], rig: Rig) -> None:
    tier = cluster_tier(cluster)
    objects = rig.objects(60)
    put(tier, objects)
    cluster[2].stop()
    found: list[bytes | None] = []
    for _ in range(4):
        found = get(tier, objects)
    # The others go on, and the lost one is not asked any more.
    assert tier.health().ready
    assert cluster[2].endpoint in tier.health().detail
    assert 0 < found.count(None) < 60
    assert all(a in (None, b) for a, b in zip(found, payloads(objects), strict=True))
    cleared = tier.clear(ClearScope()).result(20)
    assert not cleared.complete and str(cluster[2].port) in cleared.detail
    cluster[2].start()
    eventually(lambda: tier.health().detail == "")
    eventually(lambda: set(put(tier, objects)) <= {PutOutcome.STORED, PutOutcome.PRESENT})
    assert get(tier, objects) == payloads(objects)
    tier.close()


@pytest.fixture
def sentinels(any_valkey: str, tmp_path: Path) -> Iterator[tuple[list[Server], list[Server]]]:
    """A master and its replica, and two sentinels that watch them."""
    with ExitStack() as running:
        master = running.enter_context(valkey_server(any_valkey, tmp_path / "master"))
        follow = ("--replicaof", "127.0.0.1", str(master.port), "--repl-diskless-sync-delay", "0")
        replica = running.enter_context(valkey_server(any_valkey, tmp_path / "replica", *follow))
        eventually(lambda: "'master_link_status': 'up'" in cli(replica, "INFO", "replication"))
        watchers = []
        for number in range(2):
            folder = tmp_path / f"sentinel{number}"
            folder.mkdir()
            port = free_port()
            (folder / "sentinel.conf").write_text(
                f"port {port}\nbind 127.0.0.1\nsentinel monitor cache 127.0.0.1 {master.port} 2\n"
                "sentinel down-after-milliseconds cache 500\nsentinel failover-timeout cache 3000\n"
            )
            server = Server([any_valkey, "sentinel.conf", "--sentinel"], folder, port)
            watchers.append(running.enter_context(server))
        eventually(lambda: all(_others(server) == (1, 1) for server in watchers))
        yield [master, replica], watchers


def _others(sentinel: Server) -> tuple[int, int]:
    """Sentinels and replicas that a sentinel knows of."""
    from valkey import Valkey

    with Valkey(port=sentinel.port) as client:
        return len(client.sentinel_sentinels("cache")), len(client.sentinel_slaves("cache"))


def test_sentinels(sentinels: tuple[list[Server], list[Server]], rig: Rig) -> None:
    (master, replica), watchers = sentinels
    config = valkey_config(*(w.endpoint for w in watchers), mode="Sentinel", sentinel_master="cache")
    assert config.valkey is not None
    tier = RemoteTier("remote", ValkeyClient(config.valkey, 5.0), context(), deadline_s=5.0, policy=QUICK)
    objects = rig.objects(10)
    assert put(tier, objects) == [PutOutcome.STORED] * 10
    eventually(lambda: cli(replica, "DBSIZE") == "10")
    master.stop()
    watchers[0].stop()
    watchers[0].start()
    more = rig.objects(3)
    eventually(lambda: set(put(tier, more)) <= {PutOutcome.STORED, PutOutcome.PRESENT}, 60)
    assert get(tier, objects + more) == payloads(objects + more)
    assert cli(replica, "DBSIZE") == "13"
    tier.close()


def test_sentinels_that_know_no_such_master(sentinels: tuple[list[Server], list[Server]]) -> None:
    _, watchers = sentinels
    config = valkey_config(watchers[0].endpoint, mode="Sentinel", sentinel_master="other")
    assert config.valkey is not None
    tier = RemoteTier("remote", ValkeyClient(config.valkey, 5.0), context(), deadline_s=5.0, policy=QUICK)
    assert not tier.health().ready
    assert "other" in tier.health().detail and "sentinel_master" in tier.health().detail
    tier.close()
