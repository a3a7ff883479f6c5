# SPDX-License-Identifier: Apache-2.0
"""Who is let in: TLS, ACL users, passwords that change, and sealed objects."""

from __future__ import annotations

import base64
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.config.tiers import TlsConfig
from kvcache.storage.tier import PutOutcome
from kvcache.storage.tiers import valkey as valkey_module
from kvcache.storage.tiers.remote import RemoteTier
from kvcache.storage.tiers.remote_client import name_of
from kvcache.storage.tiers.valkey import ValkeyClient, open_valkey
from tests.storage.disk_rigs import Rig
from tests.storage.remote.certificates import Authority
from tests.storage.remote.rigs import QUICK, context, eventually, get, payloads, put, valkey_config
from tests.storage.remote.servers import Server, cli, valkey_server

ACL = re.findall(r"[+~][a-z|:*]+", str(valkey_module.__doc__))
"""As the docstring says what is needed."""


def tier_at(server: Server, **of: Any) -> RemoteTier:
    config = valkey_config(server.endpoint, **of)
    assert config.valkey is not None
    return RemoteTier("remote", ValkeyClient(config.valkey, 5.0), context(), deadline_s=5.0, policy=QUICK)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def tls_server(tls_valkey: str, tmp_path: Path, authority: Authority) -> Iterator[Server]:
    pair = authority.issue("server")
    options = ["--tls-cert-file", str(pair.cert), "--tls-key-file", str(pair.key)]
    options += ["--tls-ca-cert-file", str(authority.file), "--tls-auth-clients", "yes"]
    with valkey_server(tls_valkey, tmp_path / "valkey", *options, tls=True) as server:
        yield server


def test_tls_with_certificates_on_both_sides(
    tls_server: Server, authority: Authority, tmp_path: Path, rig: Rig
) -> None:
    mine = authority.issue("client")
    objects = rig.objects(12)
    files = {"cert_file": str(mine.cert), "key_file": str(mine.key)}
    tier = tier_at(tls_server, tls=TlsConfig(ca_file=str(authority.file), **files))
    assert put(tier, objects) == [PutOutcome.STORED] * 12
    assert get(tier, objects) == payloads(objects)
    tier.close()

    stranger = Authority(tmp_path, "stranger")
    for tls in (
        TlsConfig(ca_file=str(stranger.file), **files),
        TlsConfig(ca_file=str(authority.file)),
        TlsConfig(**files),
    ):
        refused = tier_at(tls_server, tls=tls)
        assert refused.health().state == "RemoteUnreachable"
        assert get(refused, objects) == [None] * 12
        refused.close()


def test_the_name_in_the_certificate_counts(tls_valkey: str, tmp_path: Path, authority: Authority) -> None:
    pair = authority.issue("server", address="127.0.0.2")
    options = ["--tls-cert-file", str(pair.cert), "--tls-key-file", str(pair.key)]
    options += ["--tls-ca-cert-file", str(authority.file), "--tls-auth-clients", "no"]
    with valkey_server(tls_valkey, tmp_path / "valkey", *options, tls=True) as server:
        tier = tier_at(server, tls=TlsConfig(ca_file=str(authority.file)))
        assert not tier.health().ready
        assert "127.0.0.1" in tier.health().detail
        tier.close()


def test_the_acl_of_the_docstring_is_enough(valkey: Server, tmp_path: Path, rig: Rig) -> None:
    from kvcache.storage.tier import ClearScope

    password = tmp_path / "password"
    password.write_text("first secret\n")
    cli(valkey, "ACL", "SETUSER", "cache", "reset", "on", ">first secret", *ACL)
    tier = tier_at(valkey, username="cache", password_file=str(password))
    objects = rig.objects(6, tenant=b"t" * 16)
    assert put(tier, objects) == [PutOutcome.STORED] * 6
    assert get(tier, objects) == payloads(objects)
    assert tier.remove([objects[0].key]).result(5) == 1
    assert tier.clear(ClearScope(tenant=b"t" * 16)).result(5).objects == 5
    tier.close()
    cli(valkey, "ACL", "DELUSER", "cache")


def test_a_new_password_counts_for_new_connections(valkey: Server, tmp_path: Path, rig: Rig) -> None:
    password = tmp_path / "password"
    password.write_text("old")
    cli(valkey, "ACL", "SETUSER", "cache", "reset", "on", ">old", *ACL)
    tier = tier_at(valkey, username="cache", password_file=str(password))
    objects = rig.objects(2)
    put(tier, objects)

    cli(valkey, "ACL", "SETUSER", "cache", "<old", ">new")
    cli(valkey, "CLIENT", "KILL", "USER", "cache")
    for _ in range(4):
        get(tier, objects)
    eventually(lambda: tier.health().state == "RemoteDenied")
    assert "password_file" in tier.health().detail

    password.write_text("new")
    eventually(lambda: tier.health().ready)
    assert get(tier, objects) == payloads(objects)

    password.unlink()
    cli(valkey, "CLIENT", "KILL", "USER", "cache")
    eventually(lambda: bool(get(tier, objects)) and tier.health().state == "RemoteDenied")
    assert str(password) in tier.health().detail
    tier.close()
    cli(valkey, "ACL", "DELUSER", "cache")


def test_a_user_who_may_not_write(valkey: Server, tmp_path: Path, rig: Rig) -> None:
    owner = tier_at(valkey)
    objects = rig.objects(3)
    put(owner, objects)
    cli(valkey, "ACL", "SETUSER", "reader", "reset", "on", "nopass", *(w for w in ACL if w != "+set"))
    reader = tier_at(valkey, username="reader")
    assert get(reader, objects) == payloads(objects)
    more = rig.objects(1)
    assert put(reader, more) == [PutOutcome.FAILED]
    assert get(owner, more) == [None]
    reader.close()
    owner.close()
    cli(valkey, "ACL", "DELUSER", "reader")


def test_sealed_objects(valkey: Server, tmp_path: Path, rig: Rig) -> None:
    from valkey import Valkey

    def line(name: str) -> str:
        return f"{name} {base64.b64encode(os.urandom(32)).decode()}\n"

    keys = tmp_path / "keys"
    first = line("first")
    keys.write_text(first)
    keys.chmod(0o400)
    sealed = open_valkey(valkey_config(valkey.endpoint), context(encryption_key_file=str(keys)))
    plain = open_valkey(valkey_config(valkey.endpoint), context())
    objects = rig.objects(5)
    assert put(sealed, objects) == [PutOutcome.STORED] * 5
    assert get(sealed, objects) == payloads(objects)
    with Valkey(port=valkey.port) as client:
        value = client.get(f"kvcache:{name_of(objects[0].key)}")
    assert bytes(objects[0].payload[:64]) not in value

    # Who has no key sees nothing and breaks nothing.
    assert get(plain, objects) == [None] * 5
    assert put(plain, objects) == [PutOutcome.PRESENT] * 5
    assert get(sealed, objects) == payloads(objects)

    # A new key writes, the old one still reads.
    keys.chmod(0o600)
    keys.write_text(line("second") + first)
    keys.chmod(0o400)
    more = rig.objects(2)
    assert put(sealed, more) == [PutOutcome.STORED] * 2
    assert get(sealed, objects + more) == payloads(objects + more)

    # What is not sealed is trusted by nobody who seals, and gives way.
    open_one = rig.objects(1)
    put(plain, open_one)
    assert get(sealed, open_one) == [None]
    eventually(lambda: put(sealed, open_one) == [PutOutcome.STORED])
    assert get(sealed, open_one) == payloads(open_one)
    for tier in (sealed, plain):
        tier.close()


def test_a_server_on_ipv6(any_valkey: str, tmp_path: Path, rig: Rig) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no ::1")
    with valkey_server(any_valkey, tmp_path / "six", "--bind", "127.0.0.1", "::1") as server:
        tier = open_valkey(valkey_config(f"[::1]:{server.port}"), context())
        assert put(tier, rig.objects(2)) == [PutOutcome.STORED] * 2
        tier.close()
