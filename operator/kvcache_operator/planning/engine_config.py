# SPDX-License-Identifier: Apache-2.0
"""From the resource to the engine's configuration: `kvcache.config.LMCacheEngineConfig`, nothing else."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import ValidationError

from kvcache.config import ConfigError, LMCacheEngineConfig, explain
from kvcache_operator.errors import Problem, ResourceError
from kvcache_operator.models import DiskTier, KVCacheSpec, RemoteTier, Tiers, Transfer
from kvcache_operator.planning.budget import Budget
from kvcache_operator.planning.places import MIB, RUNTIME_MOUNT, SecretFiles

_KIB = 1 << 10
Files = dict[str, SecretFiles]


def engine_config(
    spec: KVCacheSpec, budget: Budget, secret_files: tuple[SecretFiles, ...]
) -> LMCacheEngineConfig:
    """The configuration of each process of a pod.

    Raises:
        ResourceError: a value that the engine does not take.
    """
    files = {entry.use: entry for entry in secret_files}
    values: dict[str, Any] = {
        "chunk_size": spec.cache.chunk_tokens,
        "use_layerwise": spec.cache.transfer is Transfer.LAYERWISE,
        "runtime_dir": RUNTIME_MOUNT,
        **({"hash_seed": spec.cache.namespace} if spec.cache.namespace else {}),
        "tiers": _tiers(spec.cache.tiers, budget, files),
    }
    owned = sorted(spec.experimental.keys() & {*values, "hash_seed"})
    if owned:
        text = f"{owned[0]} has fields of its own below spec.cache; write it there"
        raise ResourceError([Problem(f"spec.experimental.{owned[0]}", text)])
    try:
        return LMCacheEngineConfig.model_validate(values | spec.experimental)
    except (ValidationError, ConfigError) as error:
        at = "spec.experimental" if _is_about(error, spec) else "spec.cache"
        text = explain(error, LMCacheEngineConfig, at) if isinstance(error, ValidationError) else str(error)
        raise ResourceError.at(at, text.removeprefix(f"{at}: ")) from error


def _is_about(error: Exception, spec: KVCacheSpec) -> bool:
    """Whether a field of `experimental` is at fault."""
    places = error.errors() if isinstance(error, ValidationError) else []
    return any(place["loc"] and place["loc"][0] in spec.experimental for place in places)


def config_yaml(config: LMCacheEngineConfig, with_seed: bool) -> str:
    """What the resource decides, defaults of its fields included, so that it can be read from the ConfigMap.

    A key of the engine that the resource does not know is left out: a new one in a later version would
    otherwise replace all pods for nothing.

    Args:
        config: what to write.
        with_seed: whether the seed stands here; otherwise a variable holds it, which a file would overrule.
    """
    values = config.model_dump(
        mode="json", exclude_none=True, exclude_unset=True, exclude=None if with_seed else {"hash_seed"}
    )
    tiers, read = values["tiers"], config.tiers
    tiers["cpu"]["capacity"] = size_text(read.cpu.capacity)
    if read.disk is not None:
        tiers["disk"]["capacity"] = size_text(read.disk.capacity)
        tiers["disk"]["write_queue"] = size_text(read.disk.write_queue)
    if read.remote is not None:
        tiers["remote"]["write_queue"] = size_text(read.remote.write_queue)
        if read.remote.mooncake is not None:
            mooncake = tiers["remote"]["mooncake"]
            mooncake["buffer"] = size_text(read.remote.mooncake.buffer)
            if "segment" in mooncake:
                mooncake["segment"] = size_text(read.remote.mooncake.segment)
    for written, plugin in zip(tiers.get("plugins", ()), read.plugins, strict=True):
        written["write_queue"] = size_text(plugin.write_queue)
    for salt, tenant in read.tenants.items():
        tiers["tenants"][salt]["quota"] = size_text(tenant.quota)
    return yaml.safe_dump(values, sort_keys=True)


def size_text(size: int) -> str:
    """`size` bytes as a quantity in Mi, else in Ki, rounded up."""
    return f"{size // MIB}Mi" if size % MIB == 0 else f"{-(-size // _KIB)}Ki"


def _tiers(tiers: Tiers, budget: Budget, files: Files) -> dict[str, Any]:
    values: dict[str, Any] = {
        "cpu": {
            "capacity": size_text(budget.tier_per_rank),
            "pinning": tiers.cpu.pinning,
            "eviction": tiers.cpu.eviction,
            "admission": tiers.cpu.admission,
        },
    }
    if tiers.plugins:
        values["plugins"] = [
            {
                "name": plugin.name,
                "options": {option.name: option.value for option in plugin.options},
                "write": plugin.write,
                "admission": plugin.admission,
                "deadline_ms": plugin.deadline * 1000,
                "write_queue": size_text(plugin.write_queue),
            }
            for plugin in tiers.plugins
        ]
    if tiers.tenants:
        values["tenants"] = {
            tenant.salt: {"quota": size_text(max(MIB, tenant.quota // budget.ranks))}
            for tenant in tiers.tenants
        }
    if tiers.disk is not None:
        values["disk"] = _disk(tiers.disk)
    if tiers.remote is not None:
        values["remote"] = _remote(tiers.remote, files)
    if tiers.encryption is not None:
        values["encryption_key_file"] = _file(files, "encryption-key")
    return values


def _disk(disk: DiskTier) -> dict[str, Any]:
    return {
        "directories": [disk.path],
        "capacity": size_text(disk.capacity),
        "eviction": disk.eviction,
        "admission": disk.admission,
        "write": disk.write,
        "direct_io": disk.direct_io,
        "engine": disk.engine,
        "deadline_ms": disk.deadline * 1000,
        "write_queue": size_text(disk.write_queue),
    }


def _remote(remote: RemoteTier, files: Files) -> dict[str, Any]:
    values: dict[str, Any] = {
        "deadline_ms": remote.deadline * 1000,
        "admission": remote.admission,
        "write": remote.write,
        "connections": remote.connections,
        "write_queue": size_text(remote.write_queue),
    }
    if remote.ttl is not None:
        values["ttl_s"] = int(remote.ttl)
    if (valkey := remote.valkey) is not None:
        values["valkey"] = {
            "endpoints": list(valkey.endpoints),
            "mode": valkey.mode,
            "sentinel_master": valkey.sentinel_master,
            "database": valkey.database,
            "username": valkey.username,
            "password_file": _file(files, "valkey-password"),
            "sentinel_password_file": _file(files, "sentinel-password"),
            "tls": None
            if valkey.tls is None
            else {
                "ca_file": _file(files, "valkey-ca"),
                "cert_file": _file(files, "valkey-client", 0),
                "key_file": _file(files, "valkey-client", 1),
            },
        }
    if (s3 := remote.s3) is not None:
        values["s3"] = {
            "bucket": s3.bucket,
            "prefix": s3.prefix,
            "region": s3.region,
            "endpoint": s3.endpoint,
            "addressing": s3.addressing,
            "ca_file": _file(files, "s3-ca"),
        }
    if (mooncake := remote.mooncake) is not None:
        values["mooncake"] = {
            "master": mooncake.master,
            "metadata_server": mooncake.metadata_server,
            "protocol": mooncake.protocol,
            "device": mooncake.device or "",
            "buffer": size_text(mooncake.buffer),
            "admin_endpoint": mooncake.admin_endpoint,
            **({"segment": size_text(mooncake.segment)} if mooncake.segment is not None else {}),
        }
    return values


def _file(files: Files, use: str, key: int = 0) -> str | None:
    return files[use].path(files[use].keys[key]) if use in files else None
