# SPDX-License-Identifier: Apache-2.0
"""The KVCache resource as a whole."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from kvcache_operator.models.base import Part
from kvcache_operator.models.cache import AdminSpec, CacheSpec
from kvcache_operator.models.engine import EngineSpec, ModelSpec

MAX_NAME = 45
"""So that `<name>-admin-token` and the names of pods, with their hashes, fit into 63 characters."""


def _check_name(name: str) -> str:
    # A Service of this name needs a DNS-1035 label: a letter first.
    if len(name) > MAX_NAME or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise ValueError(
            f"{name!r} cannot name the resource's Service; "
            f"use at most {MAX_NAME} lower-case letters, digits and dashes, a letter first"
        )
    return name


def _check_namespace(name: str) -> str:
    if len(name) > 63 or not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
        raise ValueError(f"{name!r} names no namespace; use at most 63 lower-case letters, digits and dashes")
    return name


class Metadata(Part):
    """The parts of Kubernetes' metadata that the operator reads; the rest passes by."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, AfterValidator(_check_name)]
    namespace: Annotated[str, AfterValidator(_check_namespace)] = "default"
    uid: str | None = None
    generation: int | None = None


class KVCacheSpec(Part):
    """What is asked for."""

    replicas: int = Field(default=1, ge=0, le=64)
    """Pods that serve the model, each with a cache of its own."""
    model: ModelSpec
    """What is served."""
    engine: EngineSpec = EngineSpec()
    """How it is served."""
    cache: CacheSpec
    """What is kept of the prompts."""
    admin: AdminSpec = AdminSpec()
    """The sidecar that answers for the cache."""


class KVCache(Part):
    """One KVCache resource."""

    api_version: Literal["kvcache.dev/v1alpha1"]
    kind: Literal["KVCache"]
    metadata: Metadata
    spec: KVCacheSpec
    status: dict[str, Any] | None = None
    """Written by the operator and never read from here."""
