# SPDX-License-Identifier: Apache-2.0
"""The tiers that chunks are kept in, fastest first."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from kvcache.config.tiers import AdmissionName, EvictionName, SharedAdmissionName, WriteMode
from kvcache_operator.models.base import Matching, Part, rules
from kvcache_operator.models.measures import (
    ClientBuffer,
    Duration,
    Quantity,
    TenantQuota,
    TierCapacity,
    TierDeadline,
    TimeToLive,
    WriteQueue,
)
from kvcache_operator.models.refs import (
    AuthoritySecret,
    CredentialsSecret,
    ObjectName,
    PasswordSecret,
    SecretKey,
    SecretName,
)

_ONE_VOLUME = "exactly one of emptyDir, claimName and claimTemplate is needed"
_ONE_REMOTE = "exactly one of valkey, s3 and mooncake is needed"
_SENTINEL = "sentinelMaster is needed in mode Sentinel and in no other"
_ONE_ENDPOINT = "mode Single takes one endpoint; see mode Cluster"
_DATABASE = "a cluster has database 0 alone"
_SENTINEL_PASSWORD = "a password of sentinels is for mode Sentinel alone"  # noqa: S105
_AUTHORITY = "caSecretRef is for an endpoint of https"
_DEVICE = "device is for protocol rdma alone"
_TTL = "ttl is for valkey; write a rule of the bucket's life cycle, or the settings of Mooncake's master"

HostPort = Annotated[
    str,
    Field(max_length=300),
    Matching(r"^(\[[0-9a-fA-F:]+\]|[^:/\s]+):[0-9]{1,5}$", "write host:port such as valkey.cache.svc:6379"),
]


class CpuTier(Part):
    """The tier in host memory."""

    capacity: TierCapacity
    """Bytes of one replica, shared evenly by its ranks."""
    pinning: Literal["Required", "Preferred", "Disabled"] = "Preferred"
    """Whether the memory is page-locked for a GPU: Preferred goes on without, Required does not."""
    eviction: EvictionName = "Adaptive"
    """Which chunk gives way when the tier is full."""
    admission: AdmissionName = "Adaptive"
    """Which chunk is let in: those of a kind that has proved worth its room, each one, those asked for
    before, or those asked for more often than the one that would have to leave. Adaptive lets each one in
    where there are tiers below."""


class EmptyDir(Part):
    """A folder on the node's disk that lives and ends with the pod. It has no settings."""


class ClaimTemplate(Part):
    """A claim of its own for each replica. The pods become those of a StatefulSet, and the claims outlive
    them."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.storageClassName) == has(oldSelf.storageClassName) && "
                "(!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)",
                "the storage class of claims cannot change; delete the resource and create it anew",
                "",
            )
        )
    )

    storage_class_name: ObjectName | None = None
    """Storage class; without it the cluster's default."""
    access_modes: tuple[Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"], ...] = Field(
        default=("ReadWriteOnce",), min_length=1, max_length=2, strict=False
    )
    """How the volume may be mounted."""
    size: Quantity
    """Size of each claim: more than the tier's capacity, since file systems keep some for themselves. It may
    grow, where the storage class lets it, and never shrink."""


class DiskVolume(Part):
    """Where the tier's files lie: exactly one of the three. Which one cannot change while the tier is
    there."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.emptyDir), has(self.claimName), has(self.claimTemplate)].filter(x, x).size() == 1",
                _ONE_VOLUME,
                "",
            ),
            (
                "has(self.emptyDir) == has(oldSelf.emptyDir) && "
                "has(self.claimName) == has(oldSelf.claimName)",
                "the kind of the disk tier's volume cannot change; delete the resource and create it anew",
                "",
            ),
        )
    )

    empty_dir: EmptyDir | None = None
    """A folder that lives and ends with the pod."""
    claim_name: ObjectName | None = None
    """A claim that is there already; with several replicas it must be ReadWriteMany, and they share what
    lies in it."""
    claim_template: ClaimTemplate | None = None
    """A claim of its own for each replica."""

    @model_validator(mode="after")
    def _one(self) -> DiskVolume:
        if [self.empty_dir, self.claim_name, self.claim_template].count(None) != 2:
            raise ValueError(_ONE_VOLUME)
        return self


class DiskTier(Part):
    """The tier in files."""

    capacity: TierCapacity
    """Bytes on disk of one replica, all its ranks together."""
    volume: DiskVolume = DiskVolume.model_validate({"emptyDir": {}})
    """Where the files lie."""
    path: Annotated[
        str,
        Field(min_length=2, max_length=253),
        Matching(r"^(/[-_a-zA-Z0-9]+([.][-_a-zA-Z0-9]+)*)+$", "write an absolute path such as /var/cache/kv"),
    ] = "/var/cache/kv"
    """Where the volume is mounted in the container."""
    eviction: EvictionName = "Adaptive"
    """Which chunk gives way when the tier is full."""
    admission: AdmissionName = "Adaptive"
    """Which chunk is let in, see `cpu.admission`."""
    write: WriteMode = "Through"
    """Through writes a chunk as soon as it is stored above, Back when it leaves the tier above."""
    direct_io: Literal["Auto", "Enabled", "Disabled"] = Field(default="Auto", alias="directIO")
    """Past the page cache; Auto does so where the file system can."""
    engine: Literal["Auto", "Uring", "Threads"] = "Auto"
    """How reads and writes are submitted; Auto takes io_uring where the kernel lets it."""
    deadline: TierDeadline = Duration.parse("2s")
    """The longest that a request waits for this tier; after it, what has not come is computed."""
    write_queue: WriteQueue = Quantity.parse("4Gi")
    """Bytes in each rank that wait to be written at most, see `remote.writeQueue`."""


class Tls(Part):
    """TLS towards a server. Without Secrets the image's certificates count."""

    ca_secret_ref: AuthoritySecret | None = None
    """Authorities that are trusted."""
    client_secret_ref: SecretName | None = None
    """Secret of type kubernetes.io/tls, with tls.crt and tls.key, by which this client shows who it is."""


class Valkey(Part):
    """Valkey or Redis."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("(self.mode == 'Sentinel') == has(self.sentinelMaster)", _SENTINEL, ".sentinelMaster"),
            ("self.mode != 'Single' || self.endpoints.size() == 1", _ONE_ENDPOINT, ".endpoints"),
            ("self.mode != 'Cluster' || self.database == 0", _DATABASE, ".database"),
            (
                "self.mode == 'Sentinel' || !has(self.sentinelPasswordSecretRef)",
                _SENTINEL_PASSWORD,
                ".sentinelPasswordSecretRef",
            ),
        )
    )

    endpoints: tuple[HostPort, ...] = Field(min_length=1, max_length=64, strict=False)
    """host:port of the server, of some of the cluster's nodes, or of the sentinels."""
    mode: Literal["Single", "Cluster", "Sentinel"] = "Single"
    """What the endpoints are."""
    sentinel_master: str | None = Field(default=None, min_length=1, max_length=256)
    """The name under which the sentinels know the server."""
    database: int = Field(default=0, ge=0, le=1023)
    """Number of the database."""
    username: str | None = Field(default=None, min_length=1, max_length=256)
    """Name of the user; without it the default one."""
    password_secret_ref: PasswordSecret | None = None
    """Password, mounted as a file that is read again when it changes."""
    sentinel_password_secret_ref: PasswordSecret | None = None
    """Password of the sentinels themselves, where they ask for one."""
    tls: Tls | None = None
    """TLS; without it the connection is in clear."""

    @model_validator(mode="after")
    def _modes_fit(self) -> Valkey:
        if (self.mode == "Sentinel") != (self.sentinel_master is not None):
            raise ValueError(_SENTINEL)
        if self.mode == "Single" and len(self.endpoints) != 1:
            raise ValueError(_ONE_ENDPOINT)
        if self.mode == "Cluster" and self.database:
            raise ValueError(_DATABASE)
        if self.mode != "Sentinel" and self.sentinel_password_secret_ref is not None:
            raise ValueError(_SENTINEL_PASSWORD)
        return self


class S3(Part):
    """A bucket of S3 or of a server that speaks its protocol."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.caSecretRef) || !has(self.endpoint) || self.endpoint.startsWith('https:')",
                _AUTHORITY,
                ".caSecretRef",
            )
        )
    )

    bucket: str = Field(min_length=3, max_length=63)
    """Name of the bucket."""
    prefix: str = Field(default="kvcache/", max_length=512)
    """Begin of the name of every object."""
    region: str | None = Field(default=None, min_length=1, max_length=64)
    """Region of the bucket."""
    endpoint: (
        Annotated[
            str,
            Field(max_length=512),
            Matching(r"^https?://[^\s/]+$", "write https://host or http://host:port"),
        ]
        | None
    ) = None
    """URL of a server that is not AWS."""
    addressing: Literal["Auto", "Path", "Virtual"] = "Auto"
    """Whether the bucket stands in the path or in the host name."""
    credentials_secret_ref: CredentialsSecret | None = None
    """A credentials file in the format of AWS, with the profile `default`. Without it the pod's identity."""
    ca_secret_ref: AuthoritySecret | None = None
    """Authorities that are trusted, of an endpoint of https."""

    @model_validator(mode="after")
    def _endpoint_fits(self) -> S3:
        if self.ca_secret_ref is not None and (self.endpoint or "https:").startswith("http:"):
            raise ValueError(_AUTHORITY)
        return self


class Mooncake(Part):
    """Mooncake Store."""

    model_config = ConfigDict(
        json_schema_extra=rules(("!has(self.device) || self.protocol == 'rdma'", _DEVICE, ".device"))
    )

    master: HostPort
    """host:port of its master service."""
    metadata_server: str = Field(min_length=1, max_length=512)
    """As its client takes it: http://host:port/metadata, etcd://... or P2PHANDSHAKE."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """How bytes travel. rdma needs a device in the pod: see `podTemplate`."""
    device: str | None = Field(default=None, min_length=1, max_length=256)
    """Name of the RDMA device."""
    segment: Quantity | None = None
    """Host memory that each rank gives to the store; without it none, and it uses what others give."""
    buffer: ClientBuffer = Quantity.parse("512Mi")
    """The client's own copy buffer in each rank."""
    admin_endpoint: HostPort | None = None
    """host:port of the master's HTTP service, which lists objects: flushes and `reclaimPolicy: Delete` need
    it."""

    @model_validator(mode="after")
    def _device_fits(self) -> Mooncake:
        if self.device is not None and self.protocol != "rdma":
            raise ValueError(_DEVICE)
        return self


class RemoteTier(Part):
    """The tier that replicas and resources share: exactly one of the three kinds."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.valkey), has(self.s3), has(self.mooncake)].filter(x, x).size() == 1",
                _ONE_REMOTE,
                "",
            ),
            ("!has(self.ttl) || has(self.valkey)", _TTL, ".ttl"),
        )
    )

    valkey: Valkey | None = None
    """Valkey or Redis."""
    s3: S3 | None = None
    """An S3 bucket."""
    mooncake: Mooncake | None = None
    """Mooncake Store."""
    deadline: TierDeadline = Duration.parse("2s")
    """The longest that a request waits for this tier; after it, what has not come is computed."""
    ttl: TimeToLive | None = None
    """Life of an object from when it was written, in Valkey; without it the server's own rules."""
    admission: SharedAdmissionName = "Always"
    """Which chunk is let in, see `cpu.admission`."""
    write: WriteMode = "Through"
    """Through writes a chunk as soon as it is stored above, Back when it leaves the tier above."""
    connections: int = Field(default=4, ge=1, le=64)
    """Requests at a time of each rank."""
    write_queue: WriteQueue = Quantity.parse("512Mi")
    """Bytes in each rank that wait to be written at most, and at most a quarter of its host memory; what
    comes beyond them is not written. They wait where they lie in host memory and take none besides."""

    @model_validator(mode="after")
    def _one(self) -> RemoteTier:
        if [self.valkey, self.s3, self.mooncake].count(None) != 2:
            raise ValueError(_ONE_REMOTE)
        if self.ttl is not None and self.valkey is None:
            raise ValueError(_TTL)
        return self


class Option(Part):
    """One option of a plugin."""

    name: str = Field(min_length=1, max_length=128)
    """Name of the option."""
    value: str = Field(max_length=4096)
    """Its value, as a string."""


class PluginTier(Part):
    """A tier of a third party: the image must hold its package."""

    name: Annotated[
        str, Field(max_length=32), Matching(r"^[a-z][a-z0-9_-]*$", "write the name of its entry point")
    ]
    """Name of its entry point in the group `kvcache.tiers`, and of the tier in statistics."""
    options: tuple[Option, ...] = Field(
        default=(),
        max_length=64,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Handed to it as strings."""
    write: WriteMode = "Through"
    """When a chunk is written, see `disk.write`."""
    admission: SharedAdmissionName = "Always"
    """Which chunk is let in, see `cpu.admission`."""
    deadline: TierDeadline = Duration.parse("2s")
    """The longest that a request waits for this tier."""
    write_queue: WriteQueue = Quantity.parse("512Mi")
    """Bytes in each rank that wait to be written at most, see `remote.writeQueue`."""


class Tenant(Part):
    """What the requests of one tenant may occupy."""

    salt: str = Field(min_length=1, max_length=256)
    """The `cache_salt` of its requests; `*` stands for every salt that is not named."""
    quota: TenantQuota
    """Bytes in host memory, and as many on disk, of one replica. A remote store has limits of its own."""


class Encryption(Part):
    """Encryption of what lies below host memory."""

    key_secret_ref: SecretKey
    """Keys of AES-GCM, in the form that the engine reads."""


class Tiers(Part):
    """Where chunks are kept, fastest first."""

    cpu: CpuTier
    """Host memory. Every resource has this tier."""
    disk: DiskTier | None = None
    """Files."""
    remote: RemoteTier | None = None
    """A store that is shared."""
    plugins: tuple[PluginTier, ...] = Field(
        default=(),
        max_length=8,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Tiers of third parties, asked after all others."""
    tenants: tuple[Tenant, ...] = Field(
        default=(),
        max_length=256,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["salt"]},
    )
    """Quotas by `cache_salt`."""
    encryption: Encryption | None = None
    """Encryption of what lies on disk and in remote tiers."""
