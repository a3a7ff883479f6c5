# SPDX-License-Identifier: Apache-2.0
"""Where the configuration comes from: vLLM's `kv_connector_extra_config`, a YAML file, the environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from kvcache.config.base import ConfigError
from kvcache.config.engine import LMCacheEngineConfig

ENV_PREFIX = "LMCACHE_"
CONFIG_FILE_ENV = "LMCACHE_CONFIG_FILE"
CONFIG_FILE_KEY = "config_file"


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field's type is, or may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _field_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        for below in _models_in(field.annotation):
            yield from _field_names(below, f"{prefix}{name}.")
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


def read_config_file(path: str | Path) -> dict[str, Any]:
    """What a configuration file says, checked by itself.

    Raises:
        ConfigError: it cannot be read, is no YAML, or has an unknown key or a value that does not fit.
    """
    return _validated(_read_yaml(str(path)), str(path))


def config_file(
    extra_config: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """The path of the configuration file that these sources name; None without one."""
    extra = {str(key).removeprefix("lmcache."): value for key, value in (extra_config or {}).items()}
    path = extra.get(CONFIG_FILE_KEY) or environ.get(CONFIG_FILE_ENV)
    return str(path) if path else None


def load_config(
    extra_config: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    file: Mapping[str, Any] | None = None,
) -> LMCacheEngineConfig:
    """The configuration from all sources, each checked by itself so that an error names where it stands.

    Args:
        extra_config: vLLM's `kv_connector_extra_config`. Keys may carry the prefix `lmcache.`; `config_file`
            names the YAML file (else the environment variable LMCACHE_CONFIG_FILE does).
        environ: The environment.
        file: What the YAML file says, in its place: none is read then.

    Raises:
        ConfigError: an unknown key, a value that does not fit, or an unreadable file.
    """
    extra = {str(key).removeprefix("lmcache."): value for key, value in (extra_config or {}).items()}
    path = config_file(extra_config, environ)
    extra.pop(CONFIG_FILE_KEY, None)
    flat = {
        name.removeprefix(ENV_PREFIX): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and name != CONFIG_FILE_ENV
    }
    merged = _validated(_nested(flat), "environment", _variable)
    if file is not None:
        merged = _merge(merged, _validated(file, path or CONFIG_FILE_KEY))
    elif path:
        merged = _merge(merged, read_config_file(path))
    return LMCacheEngineConfig.model_validate(_merge(merged, _validated(extra, "kv_connector_extra_config")))
