# SPDX-License-Identifier: Apache-2.0
"""The engine, vLLM: its image, its shape, its flags and its variables."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from kvcache_operator.models.base import LIST_MAP_BY_NAME, Part, rules
from kvcache_operator.models.measures import (
    DrainTimeout,
    Duration,
    Quantity,
    SharedMemory,
    StartupTimeout,
)
from kvcache_operator.models.refs import EnvSource, SecretName


class Device(StrEnum):
    """What vLLM computes on."""

    CUDA = "CUDA"
    CPU = "CPU"


OWNED_FLAGS = (
    "--model",
    "--revision",
    "--served-model-name",
    "--host",
    "--port",
    "--uds",
    "--config",
    "--dtype",
    "--kv-cache-dtype",
    "--gpu-memory-utilization",
    "--kv-events-config",
    "--max-model-len",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--data-parallel-rank",
    "--headless",
    "--kv-transfer-config",
    "--kv-offloading-size",
    "--kv-offloading-backend",
    "--shutdown-timeout",
    "--ssl-keyfile",
    "--ssl-certfile",
)
"""Flags of vLLM that other fields set, or that would take the pod's shape out of the operator's hands."""

FIELDS_OF_FLAGS = {
    "--model": "spec.model.name",
    "--revision": "spec.model.revision",
    "--served-model-name": "spec.model.servedName",
    "--port": "spec.engine.port",
    "--dtype": "spec.engine.dtype",
    "--kv-cache-dtype": "spec.engine.kvCacheDtype",
    "--gpu-memory-utilization": "spec.engine.gpuMemoryUtilizationPercent",
    "--kv-events-config": "spec.cache.events",
    "--max-model-len": "spec.engine.maxModelLength",
    "--tensor-parallel-size": "spec.engine.tensorParallelSize",
    "-tp": "spec.engine.tensorParallelSize",
    "--pipeline-parallel-size": "spec.engine.pipelineParallelSize",
    "-pp": "spec.engine.pipelineParallelSize",
    "--kv-transfer-config": "spec.cache",
    "--shutdown-timeout": "spec.engine.drainTimeout",
}
"""The field that sets a flag. The other owned flags have none."""
_OWNED_PATTERN = "^--(" + "|".join(flag[2:].replace("-", "[-_]") for flag in OWNED_FLAGS) + ")([=.]|$)"
_OWNED_SHORT_FLAGS = ("-tp", "-pp", "-dp")
_OWNED_ENV = frozenset(
    {
        *("BIND_HOST", "PYTHONHASHSEED", "VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE"),
        *("HF_TOKEN_PATH", "AWS_SHARED_CREDENTIALS_FILE"),
    }
)
_OWNED_ENV_PREFIXES = ("KVCACHE_", "LMCACHE_")
_OWNED_ENV_PATTERN = f"^({'|'.join(sorted(_OWNED_ENV))})$|^({'|'.join(_OWNED_ENV_PREFIXES)})"


def owned_flag(arg: str) -> str | None:
    """The owned flag that `arg` sets, else None.

    vLLM's parser also takes underscores, unambiguous abbreviations (`--max-model`) and keys of a JSON flag
    (`--kv-transfer-config.kv_role`).
    """
    if not arg.startswith("--"):
        return next((flag for flag in _OWNED_SHORT_FLAGS if arg == flag or arg.startswith(f"{flag}=")), None)
    name = arg.partition("=")[0].partition(".")[0].replace("_", "-")
    return next((flag for flag in OWNED_FLAGS if len(name) > 2 and flag.startswith(name)), None)


def owned_variable(name: str) -> bool:
    """Whether the operator itself sets this environment variable."""
    return name in _OWNED_ENV or name.startswith(_OWNED_ENV_PREFIXES)


def _check_arg(arg: str) -> str:
    flag = owned_flag(arg)
    if flag is not None:
        field = FIELDS_OF_FLAGS.get(flag)
        instead = f"remove it and set {field}" if field else "remove it, there is no field for it"
        raise ValueError(f"{arg!r} sets {flag}, which the operator sets itself; {instead}")
    return arg


def _check_env_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(
            f"{name!r} is no name of an environment variable; use letters, digits and underscores"
        )
    if owned_variable(name):
        raise ValueError(f"{name} is set by the operator; remove it and use the field of spec for it")
    return name


def _check_image(image: str) -> str:
    last = image.rpartition("/")[2]
    if re.search(r"\s", image) or not re.search(r"[:@].", last):
        raise ValueError(
            f"{image!r} has neither tag nor digest; write one, such as {image.strip() or 'vllm'}:0.1.0"
        )
    return image


def _check_unique_names(variables: tuple[EnvVar, ...]) -> tuple[EnvVar, ...]:
    names = [variable.name for variable in variables]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice; keep one")
    return variables


class EnvVar(Part):
    """An environment variable of the engine: a value, or where it comes from."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!(has(self.value) && has(self.valueFrom))",
                "value and valueFrom exclude each other; keep one",
                "",
            ),
            (
                f"!self.name.matches('{_OWNED_ENV_PATTERN}')",
                "this variable is set by the operator; remove it and use the field of spec for it",
                ".name",
            ),
        )
    )

    name: Annotated[str, AfterValidator(_check_env_name)] = Field(min_length=1, max_length=256)
    """Name of the variable."""
    value: str | None = Field(default=None, max_length=4096)
    """The value, empty if absent; `$(NAME)` of a variable before it is replaced."""
    value_from: EnvSource | None = None
    """Takes the place of `value`."""

    @model_validator(mode="after")
    def _one_source(self) -> EnvVar:
        if self.value is not None and self.value_from is not None:
            raise ValueError(f"{self.name} has both value and valueFrom; keep one")
        return self


class EngineSpec(Part):
    """vLLM: its image, its shape and its flags."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"!has(self.args) || self.args.all(a, !a.matches('{_OWNED_PATTERN}'))",
                "a flag that the operator sets itself: remove it and use the field of spec for it",
                ".args",
            ),
        )
    )

    image: Annotated[str, AfterValidator(_check_image)] | None = Field(default=None, max_length=512)
    """Image with vLLM and the cache, with a tag or digest. Default: the operator's, by `device`."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the image is pulled."""
    device: Device = Field(default=Device.CUDA, strict=False)
    """What vLLM computes on: CUDA takes one GPU for each rank, CPU takes none."""
    image_pull_secrets: tuple[SecretName, ...] = Field(
        default=(), max_length=8, strict=False, json_schema_extra=LIST_MAP_BY_NAME
    )
    """Secrets with credentials of image registries, for every container of the pod."""
    args: tuple[Annotated[str, AfterValidator(_check_arg), Field(max_length=1024)], ...] = Field(
        default=(), max_length=64, strict=False
    )
    """More flags for vLLM, one string each. Flags that the operator sets are refused."""
    env: Annotated[tuple[EnvVar, ...], AfterValidator(_check_unique_names)] = Field(
        default=(), max_length=64, strict=False, json_schema_extra=LIST_MAP_BY_NAME
    )
    """More environment variables for vLLM; one that the operator sets as a default is replaced."""
    port: int = Field(default=8000, ge=1024, le=65535)
    """Port of the completions API."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=16)
    """Ranks that share each layer."""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=16)
    """Ranks that share the layers among them, on one node."""
    gpu_memory_utilization_percent: int = Field(default=90, ge=10, le=98)
    """Share of each GPU's memory that vLLM may take; no meaning where `device` is CPU."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of weights and activations."""
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Type of keys and values in vLLM's pages and in the cache; auto is the type of the model."""
    max_model_length: int | None = Field(default=None, ge=1, le=16_777_216)
    """Longest prompt and answer together, in tokens. Default: what the model allows."""
    cpu_kv_space: Quantity = Quantity.parse("4Gi")
    """Memory for vLLM's own KV blocks where `device` is CPU, for each rank; whole gibibytes."""
    shm_size: SharedMemory | None = None
    """Size of /dev/shm. Default: computed from the number of ranks."""
    startup_timeout: StartupTimeout = Duration.parse("30m")
    """The longest that loading the model may take before the container is started again."""
    drain_timeout: DrainTimeout = Duration.parse("60s")
    """The longest that running requests may take to end when a pod is stopped."""

    @property
    def ranks(self) -> int:
        """Worker processes of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
