# SPDX-License-Identifier: Apache-2.0
"""The one configuration model of the cache: typed, strict, and free of torch and vLLM.

The operator renders exactly this model into a ConfigMap; the connector reads it. Sources, the first one that
names a key wins: `kv_connector_extra_config` of vLLM, a YAML file, environment variables
(`LMCACHE_CHUNK_SIZE`, nested keys joined by two underscores: `LMCACHE_TIERS__CPU__CAPACITY`). An unknown key
is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

ENV_PREFIX = "LMCACHE_"
CONFIG_FILE_ENV = "LMCACHE_CONFIG_FILE"
CONFIG_FILE_KEY = "config_file"

_QUANTITY = re.compile(r"^(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$")
_UNIT_BYTES: dict[str | None, int] = {
    None: 1,
    **{unit + "i": 1024 ** (power + 1) for power, unit in enumerate("KMGTP")},
    **{unit: 1000 ** (power + 1) for power, unit in enumerate("kMGTP")},
}
_LEAST_PLAIN_DIGITS = 9
"""A bare number below this length is taken for a forgotten unit: nobody wants a cache of 32 bytes."""


class ConfigError(ValueError):
    """The configuration cannot be used. The text names the field, what was read and what is accepted."""


def parse_quantity(value: object) -> int:
    """Bytes of a Kubernetes quantity such as `32Gi`, `500M` or `34359738368`.

    Raises:
        ValueError: not a quantity, a bare number of fewer than nine digits (a unit was forgotten), or no
            whole number of bytes.
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{value!r} is no quantity; write a number with a unit such as 32Gi")
    text = str(value).strip()
    match = _QUANTITY.match(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no quantity; write a number with a unit Ki, Mi, Gi, Ti or k, M, G, T, such as 32Gi"
        )
    if match["unit"] is None and len(text) < _LEAST_PLAIN_DIGITS:
        raise ValueError(f"{text!r} has no unit; write 32Gi for gibibytes or the number of bytes in full")
    size = Decimal(match["number"]) * _UNIT_BYTES[match["unit"]]
    if size != int(size):
        raise ValueError(f"{text!r} is no whole number of bytes")
    return int(size)


Quantity = Annotated[int, BeforeValidator(parse_quantity)]
"""A size in bytes, written as a Kubernetes quantity."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CpuTierConfig(_Strict):
    """The tier in host memory."""

    capacity: Quantity = Field(default=1 << 30, ge=1 << 20, le=1 << 50)
    """Bytes of payload for each rank process."""
    eviction: Literal["LRU"] = "LRU"
    pinning: Literal["Required", "Preferred", "Disabled"] = "Preferred"
    """Page-locked memory where there is a GPU: `Preferred` goes on with pageable memory when the limit of
    locked memory forbids it, `Required` turns the cache off with that reason."""


class TiersConfig(_Strict):
    cpu: CpuTierConfig = CpuTierConfig()


class LMCacheEngineConfig(_Strict):
    """Everything the connector and the engine can be told. Names follow LMCache's where it has one."""

    chunk_size: int = Field(default=256, ge=16, le=4096)
    """Tokens that are stored and looked up as one; a power of two and a multiple of vLLM's block size."""
    use_layerwise: bool = False
    """Move KV layer by layer between the layers' attention instead of all layers at once."""
    save_decode_cache: bool = False
    """Store the KV of generated tokens too."""
    save_unfull_chunk: bool = False
    """Store the last, partial chunk of a prompt too, in whole blocks of vLLM."""
    min_retrieve_tokens: int = Field(default=0, ge=0)
    """A hit of fewer tokens than this is left to vLLM to compute."""
    skip_last_n_tokens: int = Field(default=0, ge=0)
    """Tokens at the end of a prompt that are neither looked up nor stored."""
    hash_seed: str = Field(default="", max_length=256)
    """Mixed into every key. Equal on all processes that share a tier; a secret value keeps others from
    crafting tokens whose keys collide."""
    async_loading: Literal["Auto", "Always", "Never"] = "Auto"
    """Whether a request waits for its load outside of the batch. `Auto`: where others would be held up by
    it."""
    lookup_timeout_ms: int = Field(default=500, ge=1, le=60_000)
    """The longest that the scheduler waits for all ranks to answer; after it the answer is a miss."""
    lease_timeout_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """The longest that a chunk stays protected for a request that was never heard of again."""
    runtime_dir: str | None = Field(default=None, min_length=1, max_length=80)
    """Folder of the unix sockets (their whole path may have 107 bytes), shared with the admin sidecar. One
    engine a folder. Without it each engine makes one of its own below the system's temporary folder."""
    tiers: TiersConfig = TiersConfig()

    @field_validator("chunk_size")
    @classmethod
    def _chunk_is_power_of_two(cls, chunk_size: int) -> int:
        if chunk_size & (chunk_size - 1):
            raise ValueError(f"{chunk_size} is no power of two; take 256")
        return chunk_size

    def check_block_size(self, block_size: int) -> None:
        """Raises ConfigError unless a chunk is a whole number of vLLM's blocks of `block_size` tokens."""
        if self.chunk_size % block_size:
            raise ConfigError(
                f"chunk_size: {self.chunk_size} tokens are no multiple of vLLM's block size of {block_size} "
                f"tokens; set it to a multiple, or vLLM's --block-size to a divisor of {self.chunk_size}"
            )


def _field_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _field_names(field.annotation, f"{prefix}{name}.")
        yield f"{prefix}{name}"


def explain(
    error: ValidationError, model: type[BaseModel], source: str, spell: Callable[[str], str] = str
) -> str:
    """One sentence a problem: the field, what was read and, for an unknown key, the nearest known one.

    `spell` turns the dotted path of a field into what the source calls it.
    """
    known = [spell(name) for name in _field_names(model)]
    sentences = []
    for problem in error.errors():
        path = spell(".".join(str(part) for part in problem["loc"]))
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(path, known, n=1, cutoff=0.0)
            sentences.append(f"{path}: unknown key; the nearest known one is {near[0]}")
        elif problem["type"] == "value_error":
            text = str(problem["ctx"]["error"])
            sentences.append(text if not path or text.startswith(f"{path}:") else f"{path}: {text}")
        else:
            sentences.append(f"{path}: {problem['msg']}, got {problem['input']!r}")
    return f"{source}: " + "; ".join(sentences)


def _nested(flat: Mapping[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        node = tree
        *parents, leaf = name.lower().split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(
                    f"environment: {ENV_PREFIX}{name} lies below a key that has a value; drop one of them"
                )
        node[leaf] = value
    return tree


def _merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(
            f"{CONFIG_FILE_KEY}: {path!r} cannot be read ({reason}); name a readable YAML file"
        ) from error
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise ConfigError(f"{CONFIG_FILE_KEY}: {path} is no YAML ({str(error).splitlines()[0]})") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"{CONFIG_FILE_KEY}: {path} holds a {type(data).__name__}; write a mapping of keys to values"
        )
    return data


def _variable(path: str) -> str:
    return ENV_PREFIX + path.replace(".", "__").upper()


def _validated(data: Mapping[str, Any], source: str, spell: Callable[[str], str] = str) -> dict[str, Any]:
    try:
        LMCacheEngineConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, LMCacheEngineConfig, source, spell)) from error
    return dict(data)


def load_config(
    extra_config: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> LMCacheEngineConfig:
    """The configuration from all sources, each checked by itself so that an error names where it stands.

    Args:
        extra_config: vLLM's `kv_connector_extra_config`. Keys may carry the prefix `lmcache.`; `config_file`
            names the YAML file (else the environment variable LMCACHE_CONFIG_FILE does).
        environ: The environment.

    Raises:
        ConfigError: an unknown key, a value that does not fit, or an unreadable file.
    """
    extra = {str(key).removeprefix("lmcache."): value for key, value in (extra_config or {}).items()}
    path = extra.pop(CONFIG_FILE_KEY, None) or environ.get(CONFIG_FILE_ENV)
    flat = {
        name.removeprefix(ENV_PREFIX): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and name != CONFIG_FILE_ENV
    }
    merged = _validated(_nested(flat), "environment", _variable)
    if path:
        merged = _merge(merged, _validated(_read_yaml(str(path)), str(path)))
    return LMCacheEngineConfig.model_validate(_merge(merged, _validated(extra, "kv_connector_extra_config")))
