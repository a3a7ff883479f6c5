# SPDX-License-Identifier: Apache-2.0
"""The tiers' part of the configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from kvcache.config.base import Strict
from kvcache.config.quantity import Quantity

EvictionName = Literal["Adaptive", "LRU", "LFU", "FIFO", "MRU", "S3FIFO", "ARC"]
"""Which chunk leaves first (`kvcache.storage.policies`). `Adaptive` learns how long which chunks are worth
keeping."""
AdmissionName = Literal["Adaptive", "Always", "SecondUse", "TinyLFU"]
"""Which chunk is let in at all: those of a kind that has proved worth its room, each, those asked for before,
or those asked for more often than the one that would have to leave."""
SharedAdmissionName = Literal["Always", "SecondUse", "TinyLFU"]
"""Which chunk is let in at all: each, those asked for before, or those asked for more often than the one that
would have to leave."""
WriteMode = Literal["Through", "Back"]
"""Written as soon as a chunk is stored in host memory, or when it leaves that."""
WriteQueue = Annotated[Quantity, Field(ge=1 << 20)]
"""Bytes that wait to be written at most, and at most a quarter of host memory for all tiers together; what
comes beyond them is not written and is counted. They wait where they lie in host memory."""
DeadlineMs = Annotated[int, Field(ge=10, le=60_000)]
"""The longest that a request waits for a tier; after it, what has not come is computed."""
RESERVED_NAMES = ("gpu", "cpu", "disk", "remote")
"""Of tiers: none of a third party's has one."""


def _absolute(path: str) -> str:
    if not path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"{path!r} is no absolute path without '..'; write one such as /var/cache/kv")
    return path


AbsolutePath = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_absolute)]


class CpuTierConfig(Strict):
    """The tier in host memory."""

    capacity: Quantity = Field(default=1 << 30, ge=1 << 20, le=1 << 50)
    """Bytes of payload for each rank process."""
    eviction: EvictionName = "Adaptive"
    admission: AdmissionName = "Adaptive"
    """Which chunk is let in at all: those of a kind that has proved worth its room, each, those asked for
    before, or those asked for more often than the one that would have to leave. Where there are tiers below,
    `Adaptive` lets each in, since it is from here that they get what they store."""
    pinning: Literal["Required", "Preferred", "Disabled"] = "Preferred"
    """Page-locked memory where there is a GPU: `Preferred` goes on with pageable memory when the limit of
    locked memory forbids it, `Required` turns the cache off with that reason."""


class DiskTierConfig(Strict):
    """The tier in files: one object a file."""

    directories: list[AbsolutePath] = Field(min_length=1, max_length=16)
    """One a device; objects are spread over them. Processes that name the same ones share their objects."""
    capacity: Quantity = Field(ge=1 << 20, le=1 << 60)
    """Bytes on disk in all directories together, of all ranks and processes that use them."""
    eviction: EvictionName = "Adaptive"
    admission: AdmissionName = "Adaptive"
    write: WriteMode = "Through"
    direct_io: Literal["Auto", "Enabled", "Disabled"] = "Auto"
    """Past the page cache (O_DIRECT). `Auto`: where the file system can."""
    engine: Literal["Auto", "Uring", "Threads"] = "Auto"
    """How reads and writes are submitted. `Auto`: io_uring where the kernel lets it."""
    deadline_ms: DeadlineMs = 2000
    write_queue: WriteQueue = 4 << 30


class TlsConfig(Strict):
    """TLS towards a remote tier. Without files the system's certificates count."""

    ca_file: AbsolutePath | None = None
    """Certificates (PEM) that vouch for the server."""
    cert_file: AbsolutePath | None = None
    """Certificate (PEM) that this side shows."""
    key_file: AbsolutePath | None = None
    """Its private key (PEM)."""


class ValkeyConfig(Strict):
    """Valkey or Redis."""

    endpoints: list[Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:]+\]|[^:/\s]+):[0-9]{1,5}$")]] = Field(
        min_length=1, max_length=64
    )
    """`host:port` of the server, of some of the cluster's nodes, or of the sentinels."""
    mode: Literal["Single", "Cluster", "Sentinel"] = "Single"
    """One server, a cluster, or one server that sentinels name."""
    sentinel_master: str | None = Field(default=None, min_length=1, max_length=256)
    """The name under which the sentinels know the server."""
    sentinel_password_file: AbsolutePath | None = None
    """Of the sentinels themselves, where they ask for one."""
    database: int = Field(default=0, ge=0, le=1023)
    """Number of the database; a cluster has database 0 alone."""
    username: str | None = Field(default=None, min_length=1, max_length=256)
    """Of the server's access lists; without it its default user."""
    password_file: AbsolutePath | None = None
    """Read again when it changes."""
    tls: TlsConfig | None = None

    @model_validator(mode="after")
    def _modes_fit(self) -> Self:
        if self.mode != "Sentinel" and self.sentinel_password_file is not None:
            raise ValueError(
                f"sentinel_password_file: mode {self.mode} asks no sentinels; leave it out, or write mode "
                "Sentinel"
            )
        if (self.mode == "Sentinel") != (self.sentinel_master is not None):
            raise ValueError("sentinel_master is needed in mode Sentinel and in no other")
        if self.mode == "Cluster" and self.database:
            raise ValueError(f"database: a cluster has database 0 alone, got {self.database}")
        if self.mode == "Single" and len(self.endpoints) != 1:
            raise ValueError(f"endpoints: mode Single takes one, got {len(self.endpoints)}; see mode Cluster")
        return self


class S3Config(Strict):
    """An S3 bucket. Credentials come from the chain of the client: environment, files, the pod's identity."""

    bucket: str = Field(min_length=3, max_length=63)
    """Its name; it must be there."""
    prefix: str = Field(default="kvcache/", max_length=512)
    """Begins every object's name."""
    region: str | None = Field(default=None, min_length=1, max_length=64)
    """Without it the client's chain of settings says it."""
    endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s/]+$")
    """Of a server that is not AWS."""
    addressing: Literal["Auto", "Path", "Virtual"] = "Auto"
    """The bucket's name in the path or in the host's name. `Auto`: in the path where an endpoint is given."""
    ca_file: AbsolutePath | None = None
    """Certificates (PEM) that vouch for the endpoint."""

    @model_validator(mode="after")
    def _endpoint_fits(self) -> Self:
        if self.ca_file is not None and (self.endpoint or "https:").startswith("http:"):
            raise ValueError(
                f"ca_file: no certificate is looked at on the way to {self.endpoint}; leave it out, or write "
                "an endpoint of https"
            )
        return self


class MooncakeConfig(Strict):
    """Mooncake Store."""

    master: str = Field(pattern=r"^[^:/\s]+:[0-9]{1,5}$")
    """`host:port` of its master service."""
    metadata_server: str = Field(min_length=1, max_length=512)
    """As its client takes it: `http://host:port/metadata`, `etcd://...` or `P2PHANDSHAKE`."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """How bytes travel."""
    device: str = Field(default="", max_length=256)
    """The network devices for rdma, separated by commas; empty for the client's choice."""
    local_hostname: str | None = Field(default=None, min_length=1, max_length=256)
    """Under which other clients reach this process; without it the pod's address."""
    segment: Quantity = Field(default=0, ge=0)
    """Bytes of this process's memory that it gives to the store; 0: none, it only uses what others give."""
    buffer: Quantity = Field(default=512 << 20, ge=16 << 20)
    """Bytes of the client's own copy buffer."""
    admin_endpoint: str | None = Field(default=None, pattern=r"^[^:/\s]+:[0-9]{1,5}$")
    """`host:port` of the master's HTTP service, which lists objects: for clearing and inspecting."""

    @model_validator(mode="after")
    def _device_fits(self) -> Self:
        if self.device and self.protocol != "rdma":
            raise ValueError(
                f"device: protocol {self.protocol} takes no device, got {self.device!r}; leave it out, or "
                "write protocol rdma"
            )
        return self


class RemoteTierConfig(Strict):
    """The tier that machines share: exactly one of the three."""

    valkey: ValkeyConfig | None = None
    s3: S3Config | None = None
    mooncake: MooncakeConfig | None = None
    deadline_ms: DeadlineMs = 2000
    ttl_s: int | None = Field(default=None, ge=1)
    """Life of an object from when it was written. Valkey alone takes one; without it the store's own rules
    count."""
    admission: SharedAdmissionName = "Always"
    write: WriteMode = "Through"
    connections: int = Field(default=4, ge=1, le=64)
    """Requests at a time of each rank, for reads and for writes each."""
    write_queue: WriteQueue = 512 << 20

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("valkey", "s3", "mooncake") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of valkey, s3 and mooncake is needed, got {given or 'none'}")
        if self.ttl_s is not None and self.valkey is None:
            rules = "a lifecycle rule of the bucket" if self.s3 else "the master's own settings"
            raise ValueError(
                f"ttl_s: {given[0]} takes no life of an object from a client; leave it out and use {rules}"
            )
        return self


class PluginTierConfig(Strict):
    """A tier of a third party, found by its entry point in the group `kvcache.tiers`."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    """Of the entry point, and of the tier in statistics."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Handed to it as they are."""
    write: WriteMode = "Through"
    admission: SharedAdmissionName = "Always"
    deadline_ms: DeadlineMs = 2000
    write_queue: WriteQueue = 512 << 20


class TenantConfig(Strict):
    """What the requests of one `cache_salt` may occupy."""

    quota: Quantity = Field(ge=1 << 20)
    """Bytes in host memory, and as many on disk, of each rank. A remote store has limits of its own, and a
    plugin those that it keeps."""


class TiersConfig(Strict):
    """All tiers, in the order in which they are asked: cpu, disk, remote, plugins."""

    cpu: CpuTierConfig = CpuTierConfig()
    disk: DiskTierConfig | None = None
    remote: RemoteTierConfig | None = None
    plugins: list[PluginTierConfig] = Field(default_factory=list, max_length=8)
    """Tiers of third parties, asked in this order after all others."""
    tenants: dict[str, TenantConfig] = Field(default_factory=dict, max_length=1024)
    """By `cache_salt`; the key `*` stands for every salt that is not named. What they may occupy in host
    memory and on disk: no remote store counts it."""
    encryption_key_file: AbsolutePath | None = None
    """Keys of AES-GCM for what lies in tiers below host memory. See `kvcache.storage.sealing`."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [*RESERVED_NAMES, *(plugin.name for plugin in self.plugins)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"plugins: {', '.join(twice)} names more than one tier; give each plugin a name of its own "
                f"other than {', '.join(RESERVED_NAMES)}"
            )
        return self
