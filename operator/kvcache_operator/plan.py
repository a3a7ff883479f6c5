# SPDX-License-Identifier: Apache-2.0
"""What a resource comes to: names, ports, budgets and the connector's configuration. Pure: no I/O, no clock,
no chance.

Units are bytes, seconds and tokens throughout.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import yaml
from pydantic import ValidationError

from kvcache.config import ConfigError, LMCacheEngineConfig, explain
from kvcache_operator.errors import Problem, ResourceError
from kvcache_operator.models import MODELS_MOUNT, Device, EngineSpec, KVCache, KVCacheSpec, Transfer
from kvcache_operator.settings import Settings

MIB = 1 << 20
GIB = 1 << 30

CONFIG_MOUNT = "/etc/kvcache"
CONFIG_KEY = "config.yaml"
TOKEN_MOUNT = "/var/run/secrets/kvcache"  # noqa: S105
TOKEN_KEY = "token"  # noqa: S105
RUNTIME_MOUNT = "/run/kvcache"
HOME = "/home/kvcache"

DEFAULT_BLOCK_TOKENS = {Device.CUDA: 16, Device.CPU: 128}
"""vLLM's block size where no `--block-size` is given."""

PRE_STOP_S = 5
"""A stopping pod goes on serving for this long, since load balancers learn of its end a little late."""
TERMINATION_MARGIN_S = 10
"""Beyond the drain: for vLLM to end its processes after the last request."""

_ENGINE_BASE_MEMORY = 2 * GIB
"""API server and EngineCore: 0.6 GiB each measured, and as much again for tokenisers and long prompts."""
_RANK_MEMORY = {Device.CUDA: 6 * GIB, Device.CPU: 2 * GIB}
"""A worker without its caches. CUDA: context, pinned staging, weights on their way to the GPU. CPU: 1.4 GiB
measured for a small model; the weights of a large one come on top, of a size that only loading tells."""
_MESSAGE_RING = 160 * MIB
"""vLLM's shared ring buffer of ten chunks of 16 MiB, one for the executor and one for each rank."""
_SHM_SPARE = 512 * MIB
"""NCCL and torch between ranks; 64 MiB, the default of container runtimes, is known to kill workers."""
_ADMIN_REQUEST = 128 * MIB
_ADMIN_LIMIT = 256 * MIB


@dataclass(frozen=True)
class Names:
    """Names of the children; all in the resource's namespace."""

    workload: str
    service: str
    config_map: str
    token_secret: str


@dataclass(frozen=True)
class Budget:
    """Memory of one pod, in bytes, and its GPUs."""

    gpus: int
    tier_per_rank: int
    shm: int
    engine_request: int
    engine_limit: int | None
    """None on the CPU: the weights lie in the same memory, and a limit without them would end every start."""
    admin_request: int = _ADMIN_REQUEST
    admin_limit: int = _ADMIN_LIMIT


@dataclass(frozen=True)
class Plan:
    """All that the renderers need; equal for equal resources."""

    namespace: str
    owner_uid: str | None
    """None when no API server knows the resource."""
    names: Names
    spec: KVCacheSpec
    image: str
    block_tokens: int
    budget: Budget
    config: LMCacheEngineConfig
    config_yaml: str
    config_checksum: str
    """SHA-256 of `config_yaml`; on the pod template, so that another configuration rolls the pods."""
    termination_grace_s: int

    @property
    def name(self) -> str:
        return self.names.workload

    @property
    def served_name(self) -> str:
        return self.spec.model.served_name or self.spec.model.name


def make_plan(resource: KVCache, settings: Settings) -> Plan:
    """Decides everything that is not I/O.

    Raises:
        ResourceError: fields that fit by themselves but not together.
    """
    spec, name = resource.spec, resource.metadata.name
    block_tokens = _block_tokens(spec.engine)
    problems = [*_volume_problems(spec), *_port_problems(spec), *_space_problems(spec.engine)]
    if spec.cache.chunk_tokens % block_tokens:
        problems.append(
            Problem(
                "spec.cache.chunkTokens",
                f"{spec.cache.chunk_tokens} tokens are no multiple of the engine's block size of "
                f"{block_tokens} tokens; write a multiple of it, or --block-size in spec.engine.args",
            )
        )
    if problems:
        raise ResourceError(problems)
    budget = _budget(spec)
    config = _engine_config(spec, budget)
    config_yaml = _config_yaml(config)
    return Plan(
        namespace=resource.metadata.namespace,
        owner_uid=resource.metadata.uid,
        names=Names(
            workload=name, service=name, config_map=f"{name}-config", token_secret=f"{name}-admin-token"
        ),
        spec=spec,
        image=spec.engine.image
        or (settings.image_cpu if spec.engine.device is Device.CPU else settings.image_cuda),
        block_tokens=block_tokens,
        budget=budget,
        config=config,
        config_yaml=config_yaml,
        config_checksum=hashlib.sha256(config_yaml.encode()).hexdigest(),
        termination_grace_s=PRE_STOP_S + spec.engine.drain_timeout + TERMINATION_MARGIN_S,
    )


def _block_tokens(engine: EngineSpec) -> int:
    """vLLM's block size: the last `--block-size` of the arguments, as its parser has it, or the default."""
    tokens = DEFAULT_BLOCK_TOKENS[engine.device]
    for index, arg in enumerate(engine.args):
        flag, equals, value = arg.partition("=")
        if flag.replace("_", "-") != "--block-size":
            continue
        if not equals:
            value = engine.args[index + 1] if index + 1 < len(engine.args) else ""
        if not value.isdecimal() or int(value) == 0:
            raise ResourceError.at(
                f"spec.engine.args[{index}]",
                f"--block-size has the value {value!r}; write a number of tokens such as 128",
            )
        tokens = int(value)
    return tokens


def _volume_problems(spec: KVCacheSpec) -> list[Problem]:
    model = spec.model
    if model.is_path and model.volume is not None and not model.name.startswith(f"{MODELS_MOUNT}/"):
        text = f"{model.name} is not in the volume, which lies at {MODELS_MOUNT}; write {MODELS_MOUNT}/NAME"
        return [Problem("spec.model.name", text)]
    if model.is_path and model.revision is not None:
        return [
            Problem("spec.model.revision", "a folder has no revisions; remove it, or name a model on the Hub")
        ]
    return []


def _port_problems(spec: KVCacheSpec) -> list[Problem]:
    if spec.admin.port != spec.engine.port:
        return []
    return [Problem("spec.admin.port", f"{spec.admin.port} is spec.engine.port too; write another port")]


def _space_problems(engine: EngineSpec) -> list[Problem]:
    if engine.device is Device.CPU and (engine.cpu_kv_space < GIB or engine.cpu_kv_space % GIB):
        text = f"{engine.cpu_kv_space.text} is no whole number of gibibytes, as vLLM needs; write 1Gi or 2Gi"
        return [Problem("spec.engine.cpuKvSpace", text)]
    return []


def _budget(spec: KVCacheSpec) -> Budget:
    """The tier's capacity is that of one replica; each rank gets an equal part, in whole MiB."""
    engine, ranks = spec.engine, spec.engine.ranks
    tier_per_rank = spec.cache.tiers.cpu.capacity // ranks // MIB * MIB
    shm = (1 + ranks) * _MESSAGE_RING + _SHM_SPARE
    host_kv = ranks * engine.cpu_kv_space if engine.device is Device.CPU else 0
    memory = _ENGINE_BASE_MEMORY + ranks * (_RANK_MEMORY[engine.device] + tier_per_rank) + host_kv + shm
    return Budget(
        gpus=ranks if engine.device is Device.CUDA else 0,
        tier_per_rank=tier_per_rank,
        shm=shm,
        engine_request=memory,
        engine_limit=memory if engine.device is Device.CUDA else None,
    )


def _engine_config(spec: KVCacheSpec, budget: Budget) -> LMCacheEngineConfig:
    cpu = spec.cache.tiers.cpu
    values = {
        "chunk_size": spec.cache.chunk_tokens,
        "use_layerwise": spec.cache.transfer is Transfer.LAYERWISE,
        "runtime_dir": RUNTIME_MOUNT,
        "tiers": {
            "cpu": {
                "capacity": in_mebibytes(budget.tier_per_rank),
                "pinning": cpu.pinning,
                "eviction": cpu.eviction,
            }
        },
    }
    try:
        return LMCacheEngineConfig.model_validate(values)
    except (ValidationError, ConfigError) as error:
        text = (
            explain(error, LMCacheEngineConfig, "spec.cache")
            if isinstance(error, ValidationError)
            else str(error)
        )
        raise ResourceError.at("spec.cache", text) from error


def _config_yaml(config: LMCacheEngineConfig) -> str:
    """Every key with its value, so that what vLLM was told can be read from the ConfigMap."""
    values = config.model_dump(mode="json")
    values["tiers"]["cpu"]["capacity"] = in_mebibytes(config.tiers.cpu.capacity)
    return yaml.safe_dump(values, sort_keys=True)


def in_mebibytes(size: int) -> str:
    """`size` bytes as a quantity in Mi, rounded up."""
    return f"{math.ceil(size / MIB)}Mi"
