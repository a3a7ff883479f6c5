# SPDX-License-Identifier: Apache-2.0
"""Paths inside a pod, the names of what belongs to a resource, and how long a pod takes to end."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_operator.models import KVCacheSpec, SecretKey

MIB = 1 << 20
GIB = 1 << 30

CONFIG_MOUNT = "/etc/kvcache"
CONFIG_KEY = "config.yaml"
SECRETS = "/var/run/secrets"
TOKEN_MOUNT = f"{SECRETS}/kvcache"
TOKEN_KEY = "token"  # noqa: S105
RUNTIME_MOUNT = "/run/kvcache"
HOME = "/home/kvcache"
DISK_VOLUME = "disk"

PRE_STOP_S = 5
"""A stopping pod goes on serving for this long, since load balancers learn of its end a little late."""
_TERMINATION_MARGIN_S = 10
"""Beyond the drain: for vLLM to end its processes after the last request."""


@dataclass(frozen=True)
class Names:
    """Names of the children; all in the resource's namespace."""

    workload: str
    service: str
    pods_service: str
    """Headless: the address of each pod."""
    config_map: str
    connection: str
    token_secret: str

    @classmethod
    def of(cls, name: str, spec: KVCacheSpec) -> Names:
        """The names of a resource's children, the same at all times."""
        own = spec.admin.token_secret_ref
        return cls(
            workload=name,
            service=name,
            pods_service=f"{name}-pods",
            config_map=f"{name}-config",
            connection=f"{name}-connection",
            token_secret=own.name if own is not None else f"{name}-admin-token",
        )


def termination_grace_s(spec: KVCacheSpec) -> int:
    """Seconds that a pod gets from the wish that it ends to its being killed."""
    return int(PRE_STOP_S + spec.engine.drain_timeout + _TERMINATION_MARGIN_S)


@dataclass(frozen=True)
class SecretFiles:
    """Keys of a Secret as files of the engine's container. Files follow the Secret, variables would not."""

    use: str
    """Name of the volume, and of its folder."""
    secret: str
    keys: tuple[str, ...]
    field: str
    """Path of the field that names the Secret."""

    @property
    def mount(self) -> str:
        return f"{SECRETS}/{self.use}"

    def path(self, key: str) -> str:
        """Path of the file with a key."""
        return f"{self.mount}/{key}"


@dataclass(frozen=True)
class SecretUse:
    """A key that must be in a Secret before pods can serve."""

    secret: str
    key: str
    field: str


def secret_files(spec: KVCacheSpec) -> tuple[SecretFiles, ...]:
    """All Secrets that are mounted for the engine, in a fixed order."""
    remote, found = spec.cache.tiers.remote, []

    def add(use: str, field: str, reference: SecretKey | None) -> None:
        if reference is not None:
            found.append(SecretFiles(use, reference.name, (reference.key,), field))

    add("hub-token", "spec.model.tokenSecretRef", spec.model.token_secret_ref)
    if remote is not None and remote.valkey is not None:
        valkey, at = remote.valkey, "spec.cache.tiers.remote.valkey"
        add("valkey-password", f"{at}.passwordSecretRef", valkey.password_secret_ref)
        sentinels = valkey.sentinel_password_secret_ref
        add("sentinel-password", f"{at}.sentinelPasswordSecretRef", sentinels)
        if valkey.tls is not None:
            add("valkey-ca", f"{at}.tls.caSecretRef", valkey.tls.ca_secret_ref)
            client = valkey.tls.client_secret_ref
            if client is not None:
                field = f"{at}.tls.clientSecretRef"
                found.append(SecretFiles("valkey-client", client.name, ("tls.crt", "tls.key"), field))
    if remote is not None and remote.s3 is not None:
        s3, at = remote.s3, "spec.cache.tiers.remote.s3"
        add("s3-credentials", f"{at}.credentialsSecretRef", s3.credentials_secret_ref)
        add("s3-ca", f"{at}.caSecretRef", s3.ca_secret_ref)
    if spec.cache.tiers.encryption is not None:
        field = "spec.cache.tiers.encryption.keySecretRef"
        add("encryption-key", field, spec.cache.tiers.encryption.key_secret_ref)
    return tuple(found)


def secret_uses(spec: KVCacheSpec, files: tuple[SecretFiles, ...]) -> tuple[SecretUse, ...]:
    """Every key of a Secret of the user's that pods need."""
    uses = [SecretUse(entry.secret, key, entry.field) for entry in files for key in entry.keys]
    own, seed = spec.admin.token_secret_ref, spec.cache.seed_secret_ref
    if own is not None:
        uses.append(SecretUse(own.name, own.key, "spec.admin.tokenSecretRef"))
    if seed is not None:
        uses.append(SecretUse(seed.name, seed.key, "spec.cache.seedSecretRef"))
    for index, variable in enumerate(spec.engine.env):
        source = variable.value_from.secret_key_ref if variable.value_from is not None else None
        if source is not None:
            uses.append(SecretUse(source.name, source.key, f"spec.engine.env[{index}].valueFrom"))
    return tuple(uses)
