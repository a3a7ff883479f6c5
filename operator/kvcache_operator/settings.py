# SPDX-License-Identifier: Apache-2.0
"""Settings of the operator's own process, from environment variables with the prefix KVCACHE_OPERATOR_."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """What the person who installs the operator decides, not the person who writes a KVCache."""

    model_config = SettingsConfigDict(env_prefix="KVCACHE_OPERATOR_", frozen=True, extra="forbid")

    image_cuda: str = "kvcache/vllm:0.1.0-cuda"
    """Image of both containers where a KVCache names none and its device is CUDA."""
    image_cpu: str = "kvcache/vllm:0.1.0-cpu"
    """The same where its device is CPU."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty for the whole cluster. In the environment: a JSON list."""
    api_timeout_s: float = Field(default=15.0, gt=0)
    """The longest that one request to the API server may take, in seconds."""
    retry_s: float = Field(default=5.0, gt=0)
    """Least delay before a failed reconcile is tried again, in seconds; a random part of the same size is
    added, so that many resources do not come back in the same moment."""
