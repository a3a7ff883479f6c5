# SPDX-License-Identifier: Apache-2.0
"""The model that is served and the engine, vLLM, that serves it."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from kvcache_operator.models.base import Part
from kvcache_operator.models.measures import DrainTimeout, Duration, Quantity, StartupTimeout

MODELS_MOUNT = "/models"
"""Where the claim of `spec.model.volume` is mounted."""


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

_OWNED_SHORT_FLAGS = ("-tp", "-pp", "-dp")
_OWNED_ENV = frozenset({"BIND_HOST", "PYTHONHASHSEED", "VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE"})
_OWNED_ENV_PREFIXES = ("KVCACHE_", "LMCACHE_")


def owned_flag(arg: str) -> str | None:
    """The owned flag that `arg` sets, else None.

    vLLM's parser also takes underscores, unambiguous abbreviations (`--max-model`) and keys of a JSON flag
    (`--kv-transfer-config.kv_role`).
    """
    if not arg.startswith("--"):
        return next((flag for flag in _OWNED_SHORT_FLAGS if arg == flag or arg.startswith(f"{flag}=")), None)
    name = arg.partition("=")[0].partition(".")[0].replace("_", "-")
    return next((flag for flag in OWNED_FLAGS if len(name) > 2 and flag.startswith(name)), None)


def _check_arg(arg: str) -> str:
    flag = owned_flag(arg)
    if flag is not None:
        raise ValueError(
            f"{arg!r} sets {flag}, which the operator sets itself; remove it and use the field of spec for it"
        )
    return arg


def _check_env_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(
            f"{name!r} is no name of an environment variable; use letters, digits and underscores"
        )
    if name in _OWNED_ENV or name.startswith(_OWNED_ENV_PREFIXES):
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


class SecretKey(Part):
    """One key of a Secret in the resource's namespace."""

    name: str = Field(min_length=1, max_length=253)
    """Name of the Secret."""
    key: str = Field(min_length=1, max_length=253)
    """Key in the Secret."""


class EnvSource(Part):
    """Where a value comes from that must not stand in the resource."""

    secret_key_ref: SecretKey
    """A key of a Secret."""


class EnvVar(Part):
    """An environment variable of the engine: a value, or where it comes from."""

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


def _check_claim(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", name):
        raise ValueError(f"{name!r} names no claim; use lower-case letters, digits, dashes and dots")
    return name


def _check_model(name: str) -> str:
    if ".." in name.split("/"):
        raise ValueError(f"{name!r} leads out of its folder; write the path without '..'")
    return name


class ModelVolume(Part):
    """A claim that holds models."""

    claim_name: Annotated[str, AfterValidator(_check_claim)] = Field(min_length=1, max_length=253)
    """Name of a PersistentVolumeClaim in the resource's namespace. It is mounted at /models: read-only where
    `model.name` is a path below it, otherwise as the folder that downloads are kept in."""


class ModelSpec(Part):
    """What is served."""

    name: Annotated[str, AfterValidator(_check_model)] = Field(min_length=1, max_length=256)
    """Name of a model on the Hugging Face Hub, or an absolute path of a folder that holds one."""
    revision: str | None = Field(default=None, min_length=1, max_length=128)
    """Branch, tag or commit on the Hub."""
    served_name: str | None = Field(default=None, min_length=1, max_length=128)
    """Name under which requests ask for the model. Default: `name`."""
    volume: ModelVolume | None = None
    """Where models lie; without it downloads live as long as the pod."""

    @property
    def is_path(self) -> bool:
        """Whether the model is a folder, so that nothing is downloaded."""
        return self.name.startswith("/")


class EngineSpec(Part):
    """vLLM: its image, its shape and its flags."""

    image: Annotated[str, AfterValidator(_check_image)] | None = Field(default=None, max_length=512)
    """Image with vLLM and the cache, with a tag or digest. Default: the operator's, by `device`."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the image is pulled."""
    device: Device = Field(default=Device.CUDA, strict=False)
    """What vLLM computes on: CUDA takes one GPU for each rank, CPU takes none."""
    args: tuple[Annotated[str, AfterValidator(_check_arg), Field(max_length=1024)], ...] = Field(
        default=(), max_length=64, strict=False
    )
    """More flags for vLLM, one string each. Flags that the operator sets are refused."""
    env: Annotated[tuple[EnvVar, ...], AfterValidator(_check_unique_names)] = Field(
        default=(), max_length=64, strict=False
    )
    """More environment variables for vLLM; one that the operator sets as a default is replaced."""
    port: int = Field(default=8000, ge=1024, le=65535)
    """Port of the completions API."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=16)
    """Ranks that share each layer."""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=16)
    """Ranks that share the layers among them, on one node."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of weights and activations."""
    max_model_length: int | None = Field(default=None, ge=1, le=16_777_216)
    """Longest prompt and answer together, in tokens. Default: what the model allows."""
    cpu_kv_space: Quantity = Quantity.parse("4Gi")
    """Memory for vLLM's own KV blocks where `device` is CPU, for each rank; whole gibibytes."""
    startup_timeout: StartupTimeout = Duration.parse("30m")
    """The longest that loading the model may take before the container is started again."""
    drain_timeout: DrainTimeout = Duration.parse("60s")
    """The longest that running requests may take to end when a pod is stopped."""

    @property
    def ranks(self) -> int:
        """Worker processes of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
