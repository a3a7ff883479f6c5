# SPDX-License-Identifier: Apache-2.0
"""The tier in a bucket of a real S3 server (SeaweedFS)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from kvcache.config.tiers import S3Config
from kvcache.memory.formats import KVShape
from kvcache.storage.tier import ClearScope, PutOutcome
from kvcache.storage.tiers import s3
from kvcache.storage.tiers.remote import RemoteTier
from kvcache.storage.tiers.remote_client import name_of
from kvcache.storage.tiers.s3 import S3Client, open_s3
from kvcache.storage.tiers.s3_credentials import credentials_file
from tests.storage.disk_rigs import SHAPE, Rig
from tests.storage.remote.certificates import Authority
from tests.storage.remote.conftest import BUCKET, S3_KEYS, answers_s3
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
    s3_config,
)
from tests.storage.remote.servers import Server, weed_server

pytestmark = pytest.mark.usefixtures("s3_keys")


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Each test's own."""
    return f"tests/{request.node.name}"


@pytest.fixture
def tier(s3_server: Server, prefix: str) -> Iterator[RemoteTier]:
    tier = open_s3(s3_config(f"http://{s3_server.endpoint}", prefix=prefix), context())
    assert tier.health().ready, tier.health()
    yield tier
    tier.close()


def raw_store(server: Server) -> S3Store:
    return S3Store(
        BUCKET, endpoint=f"http://{server.endpoint}", region="us-east-1", client_options={"allow_http": True}
    )


def proxied(proxy: FaultProxy, prefix: str, deadline_s: float = 1.5) -> RemoteTier:
    config = s3_config(f"http://{proxy.endpoint}", prefix=prefix).s3
    assert config is not None
    return RemoteTier("remote", S3Client(config, deadline_s), context(), deadline_s=deadline_s, policy=QUICK)


@pytest.fixture
def proxy(s3_server: Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(s3_server.port)
    yield proxy
    proxy.close()


def test_what_is_put_comes_back(tier: RemoteTier, rig: Rig) -> None:
    objects = rig.objects(21) + [rig.object(num_tokens=n) for n in (1, 7, 63)]
    missing = rig.objects(3)
    assert head(tier, objects) == [None] * len(objects)
    assert put(tier, objects) == [PutOutcome.STORED] * len(objects)
    assert put(tier, objects) == [PutOutcome.PRESENT] * len(objects)
    mixed = objects + missing
    rig.rng.shuffle(mixed)
    assert head(tier, mixed) == [None if obj in missing else obj.payload.nbytes for obj in mixed]
    assert get(tier, mixed) == [None if obj in missing else bytes(obj.payload) for obj in mixed]
    assert tier.remove([obj.key for obj in objects[:4] + missing]).result(20) == 4
    assert head(tier, objects[:5]) == [None] * 4 + [objects[4].payload.nbytes]


def test_tiers_that_write_the_same_objects(
    tier: RemoteTier, s3_server: Server, prefix: str, rig: Rig
) -> None:
    other = open_s3(s3_config(f"http://{s3_server.endpoint}", prefix=prefix), context())
    objects = rig.objects(12)
    first, second = (future.result(60) for future in (tier.put(objects), other.put(objects[::-1])))
    both = list(zip(first, second[::-1], strict=True))
    assert all(
        PutOutcome.STORED in pair and set(pair) <= {PutOutcome.STORED, PutOutcome.PRESENT} for pair in both
    )
    assert get(other, objects) == payloads(objects)
    other.close()


def test_large_objects_go_in_parts_and_ranges(
    s3_server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "MULTIPART_FROM_BYTES", 12 << 20)
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(s3, "RANGE_BYTES", 4 << 20)
    shape = KVShape(4, 2, 1024, SHAPE.dtype, 900)
    rig = Rig(shape=shape)
    tier = open_s3(s3_config(f"http://{s3_server.endpoint}", prefix=prefix), context(shape=shape))
    large, small = rig.object(), rig.object(num_tokens=300)
    assert large.payload.nbytes > s3.MULTIPART_FROM_BYTES
    assert put(tier, [large, small]) == [PutOutcome.STORED] * 2
    assert get(tier, [large]) == payloads([large])  # alone: in ranges
    assert get(tier, [small]) == payloads([small])
    assert get(tier, [large, small] * 3) == payloads([large, small] * 3)
    # Shorter than it was or damaged: never given out, however it is read.
    store = raw_store(s3_server)
    path = f"{prefix}/{name_of(large.key)}"
    value = bytes(obstore.get(store, path).bytes())
    for damaged in (value[:-1], value[: 5 << 20], value[:100], b"x" + value[1:]):
        obstore.put(store, path, damaged)
        assert get(tier, [large]) == [None]
    tier.close()


def test_damaged_objects_are_misses_and_make_room(
    tier: RemoteTier, s3_server: Server, prefix: str, rig: Rig
) -> None:
    objects = rig.objects(4)
    put(tier, objects)
    store = raw_store(s3_server)
    paths = [f"{prefix}/{name_of(obj.key)}" for obj in objects]
    value = bytearray(obstore.get(store, paths[0]).bytes())
    value[rig.rng.randrange(len(value))] ^= 1 << rig.rng.randrange(8)
    obstore.put(store, paths[0], bytes(value))
    obstore.put(store, paths[1], bytes(obstore.get(store, paths[2]).bytes()))
    obstore.put(store, paths[3], b"short")
    assert get(tier, objects) == [None, None, bytes(objects[2].payload), None]
    eventually(lambda: head(tier, objects)[:2] == [None, None] and tier.health().ready)
    assert put(tier, [objects[0], objects[1], objects[3]]) == [PutOutcome.STORED] * 3
    assert get(tier, objects) == payloads(objects)


def test_clear(s3_server: Server, prefix: str, rig: Rig) -> None:
    pinned: set[object] = set()
    config = s3_config(f"http://{s3_server.endpoint}", prefix=prefix)
    tier = open_s3(config, context(pinned=pinned.__contains__))
    tenant, other = b"tenant-tenant-te", b"another-name-spc"
    mine, theirs, away = rig.objects(5, tenant=tenant), rig.objects(4), rig.objects(3, namespace=other)
    put(tier, mine + theirs + away)
    obstore.put(raw_store(s3_server), f"{prefix}/readme", b"not ours")
    pinned.add(mine[0].key)
    cleared = tier.clear(ClearScope(tenant=tenant)).result(60)
    assert (cleared.objects, cleared.kept, cleared.complete) == (4, 1, True)
    assert tier.clear(ClearScope(namespace=other)).result(60).objects == 3
    assert tier.clear(ClearScope(keys=[theirs[0].key, away[0].key])).result(60).objects == 1
    assert tier.clear(ClearScope(pinned_too=True)).result(60).objects == 4
    assert head(tier, mine + theirs + away) == [None] * 12
    assert bytes(obstore.get(raw_store(s3_server), f"{prefix}/readme").bytes()) == b"not ours"
    tier.close()


def test_a_bucket_that_is_not_there(s3_server: Server, rig: Rig) -> None:
    tier = open_s3(s3_config(f"http://{s3_server.endpoint}", bucket="no-such-bucket"), context())
    assert "no such bucket" in tier.health().detail
    assert put(tier, rig.objects(1)) == [PutOutcome.FAILED]
    tier.close()


def test_wrong_credentials(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    tier = open_s3(s3_config(f"http://{s3_server.endpoint}"), context())
    assert tier.health().state == "RemoteDenied"
    assert "wrong" not in tier.health().detail and S3_KEYS[1] not in tier.health().detail
    tier.close()


def test_credentials_from_the_shared_file(
    s3_server: Server, prefix: str, rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    file.write_text(f"[cache]\naws_access_key_id={S3_KEYS[0]}\naws_secret_access_key={S3_KEYS[1]}\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "cache")
    tier = open_s3(s3_config(f"http://{s3_server.endpoint}", prefix=prefix), context())
    objects = rig.objects(2)
    assert put(tier, objects) == [PutOutcome.STORED] * 2
    tier.close()


def test_which_credentials_come_first(tmp_path: Path) -> None:
    file = tmp_path / ".aws" / "credentials"
    file.parent.mkdir()
    file.write_text(
        "[default]\naws_access_key_id = a\naws_secret_access_key = s%cret\naws_session_token = t\n"
    )
    home = {"HOME": str(tmp_path)}
    found = credentials_file(home)
    assert found is not None
    credential = found()
    assert (credential["access_key_id"], credential["secret_access_key"], credential.get("token")) == (
        "a",
        "s%cret",
        "t",
    )
    assert credential["expires_at"] is not None
    assert credentials_file(home | {"AWS_ACCESS_KEY_ID": "x"}) is None
    assert credentials_file(home | {"AWS_WEB_IDENTITY_TOKEN_FILE": "x"}) is None
    assert credentials_file({}) is None
    assert credentials_file({"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}) is None
    other = credentials_file(home | {"AWS_PROFILE": "other"})
    assert other is not None
    with pytest.raises(ValueError, match="profile other"):
        other()
    file.write_text("[default]\naws_secret = hidden\nrubbish")
    with pytest.raises(ValueError, match="aws_access_key_id") as error:
        found()
    assert "hidden" not in str(error.value)


def test_addressing_and_files(tmp_path: Path) -> None:
    def endpoint(**of: object) -> tuple[object, object]:
        store = s3.make_store(S3Config.model_validate({"bucket": "bucket", "region": "eu-north-1"} | of), 1.0)
        assert store.config["unsigned_payload"]
        return store.config.get("endpoint"), store.config.get("virtual_hosted_style_request")

    host = "http://store.example:9000"
    assert endpoint() == (None, "true")
    assert endpoint(endpoint=host) == (host, "false")
    assert endpoint(endpoint=host, addressing="Virtual") == ("http://bucket.store.example:9000", "true")
    assert endpoint(addressing="Path") == (None, "false")
    with pytest.raises(ValueError, match=r"ca_file.*cannot be read"):
        endpoint(ca_file=str(tmp_path / "none"))


def test_tls_with_an_own_authority(weed: str, tmp_path: Path, rig: Rig) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    options = (f"-s3.cert.file={pair.cert}", f"-s3.key.file={pair.key}")
    server = weed_server(weed, tmp_path / "weed", *S3_KEYS, *options)
    server.ready = answers_s3
    with server:
        tier = open_s3(s3_config(f"https://{server.endpoint}", ca_file=str(authority.file)), context())
        objects = rig.objects(3)
        assert put(tier, objects) == [PutOutcome.STORED] * 3
        assert get(tier, objects) == payloads(objects)
        tier.close()
        stranger = open_s3(s3_config(f"https://{server.endpoint}"), context())
        assert stranger.health().state == "RemoteUnreachable"
        stranger.close()


@pytest.mark.parametrize(
    "fault", [Fault(hang=True), Fault(bytes_per_second=3000)], ids=["hangs", "throttles"]
)
def test_a_server_without_answers_costs_one_deadline(
    proxy: FaultProxy, prefix: str, rig: Rig, fault: Fault
) -> None:
    tier = proxied(proxy, prefix)
    objects = rig.objects(6)
    assert put(tier, objects) == [PutOutcome.STORED] * 6
    proxy.fault = fault
    assert get(tier, objects) == [None] * 6
    assert tier.health().state == "RemoteSlow"
    assert tier.head([obj.key for obj in objects]).done()
    assert tier.put(objects).done()
    proxy.fault = Fault()
    proxy.cut()
    eventually(lambda: tier.health().ready)
    assert get(tier, objects) == payloads(objects)
    tier.close()


def test_connections_that_break(proxy: FaultProxy, prefix: str, rig: Rig) -> None:
    tier = proxied(proxy, prefix)
    objects = rig.objects(6)
    put(tier, objects)
    wanted = payloads(objects)
    for fault in (
        Fault(truncate_after=rig.rng.randrange(1000, 60_000)),
        Fault(drop_after=rig.rng.randrange(1000, 60_000)),
        Fault(flip_after=rig.rng.randrange(1000, 30_000)),
        Fault(refuse=True),
    ):
        put(tier, objects)
        proxy.cut()
        proxy.fault = fault
        found = get(tier, objects)
        assert all(a in (None, b) for a, b in zip(found, wanted, strict=True)), fault
        proxy.fault = Fault()
        proxy.cut()
        eventually(lambda: tier.health().ready)
    put(tier, objects)
    assert get(tier, objects) == wanted
    tier.close()


def test_another_deadline_counts_at_once(proxy: FaultProxy, prefix: str, rig: Rig) -> None:
    tier = proxied(proxy, prefix, deadline_s=0.05)
    objects = rig.objects(4)
    config = s3_config(f"http://{proxy.endpoint}", {"deadline_ms": 20_000}, prefix=prefix)
    assert set(tier.adapt(config)) == {"deadline_ms", "write_queue"}
    proxy.fault = Fault(delay_s=0.06)  # longer than the deadline was
    eventually(lambda: tier.health().ready)
    assert put(tier, objects) == [PutOutcome.STORED] * 4
    assert get(tier, objects) == payloads(objects)
    assert proxy.met > 0
    tier.close()


def test_closing_while_the_server_hangs(proxy: FaultProxy, prefix: str, rig: Rig) -> None:
    before = remote_threads()
    tier = proxied(proxy, prefix)
    proxy.fault = Fault(hang=True)
    written = tier.put(rig.objects(3))
    time.sleep(0.1)
    tier.close()
    assert written.result(5) == [PutOutcome.FAILED] * 3
    eventually(lambda: remote_threads() <= before)
