# SPDX-License-Identifier: Apache-2.0
"""Remote stores by a URL, for commands: what a configuration says, in one word.

    valkey://[USER@]HOST:PORT[,HOST:PORT...][/DATABASE][?password_file=F&mode=Cluster&...]
    valkeys://...                    the same over TLS (ca_file, cert_file, key_file); redis and rediss too
    s3://BUCKET[/PREFIX][?endpoint=http://HOST:PORT&region=R&addressing=Path&ca_file=F]
    mooncake://HOST:PORT[?metadata_server=P2PHANDSHAKE&admin_endpoint=HOST:PORT&...]

Parameters are the fields of `kvcache.config.tiers`, and `deadline_ms` and `connections` of the tier.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import ValidationError

from kvcache.config.tiers import RemoteTierConfig
from kvcache.storage.tier import TierContext
from kvcache.storage.tiers.remote import RemoteTier
from kvcache.storage.tiers.remote_client import RemoteClient

Fields = dict[str, object]

_TIER_FIELDS = ("deadline_ms", "connections", "ttl_s", "write_queue")
_NUMBERS = (*_TIER_FIELDS[:3], "database")
_TLS_FIELDS = ("ca_file", "cert_file", "key_file")


def parse_url(url: str) -> RemoteTierConfig:
    """The configuration that a URL stands for.

    Raises:
        ValueError: it is none, or a parameter does not fit.
    """
    parts = urlsplit(url)
    parse = _PARSERS.get(parts.scheme)
    if parse is None:
        known = ", ".join(f"{scheme}://" for scheme in _PARSERS)
        raise ValueError(
            f"{url}: no remote store is known by {parts.scheme or 'no scheme'}; there are {known}"
        )
    fields: Fields = {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        fields[name] = int(text) if name in _NUMBERS and text.isdigit() else text
    tier = {name: fields.pop(name) for name in _TIER_FIELDS if name in fields}
    try:
        return RemoteTierConfig.model_validate(tier | parse(parts, fields))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{url}: {where}: {first['msg']}") from None


def make_client(config: RemoteTierConfig) -> RemoteClient:
    """The client of the configured store, which nobody has asked yet.

    Raises:
        ValueError: a setting cannot be used.
    """
    time_s = config.deadline_ms / 1000
    if config.valkey is not None:
        from kvcache.storage.tiers.valkey import ValkeyClient

        return ValkeyClient(config.valkey, time_s, config.ttl_s)
    if config.s3 is not None:
        from kvcache.storage.tiers.s3 import S3Client

        return S3Client(config.s3, time_s, config.connections)
    from kvcache.storage.tiers.mooncake import MooncakeClient

    if config.mooncake is None:
        raise ValueError("the configuration names no remote store")
    return MooncakeClient(config.mooncake, time_s)


def open_remote(config: RemoteTierConfig, context: TierContext) -> RemoteTier:
    """The tier of the configured store.

    Raises:
        ValueError: as `open_valkey`, `open_s3` and `open_mooncake` do.
    """
    if config.valkey is not None:
        from kvcache.storage.tiers.valkey import open_valkey

        return open_valkey(config, context)
    if config.s3 is not None:
        from kvcache.storage.tiers.s3 import open_s3

        return open_s3(config, context)
    from kvcache.storage.tiers.mooncake import open_mooncake

    return open_mooncake(config, context)


def _valkey(parts: SplitResult, fields: Fields) -> Fields:
    user, at, hosts = parts.netloc.rpartition("@")
    if ":" in user:
        raise ValueError(
            "a password in a URL is seen by everybody; write it into a file and name password_file"
        )
    database = parts.path.strip("/")
    fields["endpoints"] = hosts.split(",")
    if at:
        fields["username"] = unquote(user)
    if database:
        fields["database"] = int(database) if database.isdigit() else database
    if parts.scheme in ("valkeys", "rediss"):
        fields["tls"] = {name: fields.pop(name) for name in _TLS_FIELDS if name in fields}
    return {"valkey": fields}


def _s3(parts: SplitResult, fields: Fields) -> Fields:
    prefix = unquote(parts.path.strip("/"))
    return {"s3": {"bucket": parts.netloc, **({"prefix": prefix} if prefix else {}), **fields}}


def _mooncake(parts: SplitResult, fields: Fields) -> Fields:
    return {"mooncake": {"master": parts.netloc, "metadata_server": "P2PHANDSHAKE", **fields}}


_PARSERS: dict[str, Callable[[SplitResult, Fields], Fields]] = {
    "valkey": _valkey,
    "valkeys": _valkey,
    "redis": _valkey,
    "rediss": _valkey,
    "s3": _s3,
    "mooncake": _mooncake,
}
