# SPDX-License-Identifier: Apache-2.0
"""URLs of remote stores, and what `kvcache inspect` says of what lies there."""

from __future__ import annotations

import base64
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcache.cli import app
from kvcache.config.tiers import RemoteTierConfig
from kvcache.storage.inspection import Inspection, inspect_place
from kvcache.storage.sealing import Sealer
from kvcache.storage.tier import PutOutcome
from kvcache.storage.tiers.remote_client import key_of, name_of
from kvcache.storage.tiers.remote_url import open_remote, parse_url
from kvcache.tokens.keys import CacheEngineKey
from tests.storage.disk_rigs import Rig
from tests.storage.remote.conftest import BUCKET
from tests.storage.remote.rigs import context, put
from tests.storage.remote.servers import Server, mooncake_master

FILE = "/run/secret"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("valkey://h:1", {"valkey": {"endpoints": ["h:1"]}}),
        (
            "rediss://me%20too@[::1]:6/3?ca_file=/ca&password_file=/run/secret&deadline_ms=50",
            {
                "valkey": {
                    "endpoints": ["[::1]:6"],
                    "username": "me too",
                    "database": 3,
                    "password_file": FILE,
                    "tls": {"ca_file": "/ca"},
                },
                "deadline_ms": 50,
            },
        ),
        (
            "valkey://a:1,b:2?mode=Sentinel&sentinel_master=m&connections=7",
            {
                "valkey": {"endpoints": ["a:1", "b:2"], "mode": "Sentinel", "sentinel_master": "m"},
                "connections": 7,
            },
        ),
        (
            "s3://bucket/some/where?endpoint=http://h:9000&region=r&addressing=Path",
            {
                "s3": {
                    "bucket": "bucket",
                    "prefix": "some/where",
                    "endpoint": "http://h:9000",
                    "region": "r",
                    "addressing": "Path",
                }
            },
        ),
        ("s3://bucket", {"s3": {"bucket": "bucket"}}),
        (
            "mooncake://h:5?admin_endpoint=h:6",
            {"mooncake": {"master": "h:5", "metadata_server": "P2PHANDSHAKE", "admin_endpoint": "h:6"}},
        ),
    ],
)
def test_urls(url: str, expected: dict[str, Any]) -> None:
    assert parse_url(url) == RemoteTierConfig.model_validate(expected)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://h:1", "no remote store is known by ftp"),
        ("valkey://h", "endpoints"),
        ("valkey://me:secret@h:1", "password_file"),
        ("valkey://h:1/x", "database"),
        ("valkey://h:1?colour=red", "colour"),
        ("s3://b", "bucket"),
        ("s3://bucket?connections=0", "connections"),
    ],
)
def test_urls_that_do_not_fit(url: str, text: str) -> None:
    with pytest.raises(ValueError, match=text) as error:
        parse_url(url)
    assert "secret" not in str(error.value).replace(url, "")


def test_names_of_keys() -> None:
    rng = Rig().rng
    for _ in range(50):
        key = CacheEngineKey(
            rng.randbytes(16), rng.randbytes(16), rng.randrange(1 << 16), rng.randrange(1 << 16)
        )
        assert key_of(name_of(key)) == key
    name = name_of(CacheEngineKey(bytes(16), bytes(16), 65535, 0))
    for bad in (
        name + "0",
        name[1:],
        name.replace("-65535", "-65536"),
        name.upper() + "A",
        name + "\n",
        "",
        "a/b",
    ):
        assert key_of(bad) is None


def check_place(url: str, rig: Rig, damage: Any) -> Inspection:
    """Puts objects there, damages one of them, and looks at what is said."""
    tenant = rig.rng.randbytes(16)
    tier = open_remote(parse_url(url), context())
    objects = [*rig.objects(4), rig.object(num_tokens=9, tenant=tenant)]
    assert put(tier, objects) == [PutOutcome.STORED] * 5
    damage(name_of(objects[0].key))
    tier.close()
    found = inspect_place(url)
    assert {obj.name: obj.state for obj in found.objects} == {
        name_of(obj.key): "Ok" if obj is not objects[0] else "ObjectCorrupt" for obj in objects
    }
    assert [obj.name for obj in found.bad] == [name_of(objects[0].key)]
    assert found.stored_bytes == sum(4096 + obj.payload.nbytes for obj in objects)
    last = next(obj for obj in found.objects if obj.name == name_of(objects[4].key))
    assert (last.num_tokens, last.tenant, last.rank) == (9, tenant.hex(), 0)
    assert last.chunk_hash == objects[4].key.chunk_hash.hex()
    assert {obj.state for obj in inspect_place(url, verify=False).objects} == {"Unchecked"}
    return found


def test_valkey(valkey: Server, rig: Rig, tmp_path: Path) -> None:
    from valkey import Valkey

    url = f"valkey://{valkey.endpoint}?deadline_ms=30000"
    with Valkey(port=valkey.port) as client:
        client.set("kvcache:something", b"x" * 5000)

        def damage(name: str) -> None:
            client.setrange(f"kvcache:{name}", 4096 + 77, b"damaged")

        found = check_place(url, rig, damage)
        assert found.unknown == ["something"]
        result = CliRunner().invoke(app, ["inspect", url, "--json"])
        assert result.exit_code == 2
        assert json.loads(result.stdout)["damaged"] == 1
        client.flushall()

    keys = tmp_path / "keys"
    keys.write_text(f"mine {base64.b64encode(os.urandom(32)).decode()}\n")
    keys.chmod(0o400)
    sealed = open_remote(parse_url(url), context(encryption_key_file=str(keys)))
    put(sealed, rig.objects(2))
    sealed.close()
    for sealer in (None, Sealer(keys)):
        found = inspect_place(url, sealer=sealer)
        assert [(obj.state, obj.sealed_by) for obj in found.objects] == [("Ok", "mine")] * 2


@pytest.mark.usefixtures("s3_keys")
def test_s3(s3_server: Server, rig: Rig) -> None:
    import obstore
    from obstore.store import S3Store

    url = f"s3://{BUCKET}/inspected?endpoint=http://{s3_server.endpoint}&region=us-east-1&deadline_ms=30000"
    endpoint = f"http://{s3_server.endpoint}"
    store = S3Store(BUCKET, endpoint=endpoint, region="us-east-1", client_options={"allow_http": True})

    def damage(name: str) -> None:
        value = bytearray(obstore.get(store, f"inspected/{name}").bytes())
        value[-1] ^= 1
        obstore.put(store, f"inspected/{name}", bytes(value))

    check_place(url, rig, damage)


def test_mooncake(mooncake_package: str, rig: Rig, tmp_path: Path) -> None:
    from tests.storage.remote.servers import mooncake_store

    master, http = mooncake_master(mooncake_package, tmp_path / "master")
    url = f"mooncake://{master.endpoint}?admin_endpoint=127.0.0.1:{http}&local_hostname=127.0.0.1&buffer=32Mi&deadline_ms=30000"

    def damage(name: str) -> None:
        from kvcache.storage.tiers.mooncake import PREFIX, MooncakeClient
        from kvcache.storage.tiers.remote_url import make_client

        client = make_client(parse_url(url))
        assert isinstance(client, MooncakeClient)
        client.ping(master.endpoint, time.monotonic() + 10)
        value = bytearray(memoryview(client.store.get_buffer(PREFIX + name)))
        value[-1] ^= 1
        assert client.store.remove(PREFIX + name, True) == client.store.put(PREFIX + name, bytes(value)) == 0
        client.release()

    with master, mooncake_store(mooncake_package, tmp_path / "memory", master, "64 MB"):
        check_place(url, rig, damage)


def test_places_that_cannot_be_reached(any_valkey: str) -> None:
    with pytest.raises(ValueError, match="is it running there"):
        inspect_place("valkey://127.0.0.1:1?deadline_ms=500")
