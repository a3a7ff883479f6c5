# SPDX-License-Identifier: Apache-2.0
"""Which parts of a configuration take effect in a running process, and what a change of it means there.

Everything else is built into what was made at the start (the shape of chunks and keys, memory regions,
servers, connections) and waits for the next one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from pydantic import BaseModel

from kvcache.config.engine import LMCacheEngineConfig

LIVE_FIELDS = (
    "async_loading",
    "log_level",
    "lookup_timeout_ms",
    "min_retrieve_tokens",
    "save_decode_cache",
    "tiers.*.admission",
    "tiers.*.deadline_ms",
    "tiers.*.role",
    "tiers.*.ttl_s",
    "tiers.*.write",
    "tiers.*.write_queue",
    "tiers.cpu.capacity",
    "tiers.cpu.eviction",
    "tiers.disk.capacity",
    "tiers.disk.eviction",
    "tiers.tenants",
)
"""Dotted names; `*` stands for any tier. A tier that is added or removed as a whole is none of these."""

ModelT = TypeVar("ModelT", bound=BaseModel)

_WHOLE = ("tiers.plugins", "tiers.tenants")
"""Compared as one: their keys are the user's."""


@dataclass(frozen=True)
class ConfigChange:
    """What a wanted configuration means for a process that runs another one.

    Attributes:
        config: what the process can run from now on: what it ran, with the live fields as wanted.
        live: fields that differ and take effect now.
        restart: fields that differ and wait for the next start.
    """

    config: LMCacheEngineConfig
    live: tuple[str, ...]
    restart: tuple[str, ...]


def is_live(field: str) -> bool:
    """Whether a change of the field (dotted name) takes effect without a restart."""
    return any(fnmatchcase(field, pattern) for pattern in LIVE_FIELDS)


def change(
    running: LMCacheEngineConfig, wanted: LMCacheEngineConfig, waiting: Collection[str] = ()
) -> ConfigChange:
    """How to get from one configuration to the other.

    Args:
        waiting: live fields that cannot take effect in this process all the same, such as more memory than it
            has set aside.
    """
    old, new = _values(running), _values(wanted)
    differ = sorted(
        {
            _unit(field, old, new)
            for field in old.keys() | new.keys()
            if old.get(field, _NONE) != new.get(field, _NONE)
        }
    )
    live = tuple(field for field in differ if is_live(field) and field not in waiting)
    config = running
    for field in live:
        config = _grafted(config, wanted, field.split("."))
    restart = tuple(field for field in differ if field not in live)
    return ConfigChange(config, live, restart)


def restart_digest(data: Mapping[str, Any]) -> str:
    """Hex; equal for two configuration files that a running process can go between without a restart.

    For a pod's annotation, so that a change of live fields alone starts no pod anew. Over what a file says
    and not over all that there is, so that a field that a later version adds, at its default, starts none
    either.

    Args:
        data: what the file says.
    """
    return _digest({field: value for field, value in _leaves(data, "") if not is_live(field)})


def file_digest(data: Mapping[str, Any]) -> str:
    """Hex; of what a configuration file says, whatever its order and comments."""
    return _digest(data)


_NONE = object()


def _digest(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _values(config: LMCacheEngineConfig) -> dict[str, Any]:
    """Dotted name to value."""
    return dict(_leaves(config.model_dump(mode="json"), ""))


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in _WHOLE:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _unit(field: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The field, or the whole of which it is a part if that whole is only in one of the two."""
    parts = field.split(".")
    for end in range(1, len(parts)):
        whole = ".".join(parts[:end])
        if (whole in old and old[whole] is None) or (whole in new and new[whole] is None):
            return whole
    return field


def _grafted(model: ModelT, source: ModelT, path: Sequence[str]) -> ModelT:
    """The model with one field, at the end of the path, as in the other."""
    name, *below = path
    value = getattr(source, name)
    if below:
        value = _grafted(getattr(model, name), value, below)
    return model.model_copy(update={name: value})
