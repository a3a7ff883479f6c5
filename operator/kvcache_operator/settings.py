# SPDX-License-Identifier: Apache-2.0
"""Settings of the operator's own process, from environment variables with the prefix KVCACHE_OPERATOR_."""

from __future__ import annotations

from typing import Literal

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
    namespace: str = ""
    """Namespace that the operator itself runs in: of its lease, and let through to the admin API of pods."""
    monitoring_namespace: str = ""
    """Namespace that Prometheus scrapes from; empty lets every namespace scrape."""
    api_timeout_s: float = Field(default=15.0, gt=0)
    """The longest that one request to the API server may take, in seconds."""
    retry_s: float = Field(default=1.0, gt=0)
    """Delay before a failed reconcile is tried again, in seconds: doubled each time, and a random part of
    the same size is added, so that many resources do not come back in the same moment."""
    retry_max_s: float = Field(default=120.0, gt=0)
    """Largest such delay."""
    resync_s: float = Field(default=600.0, gt=0)
    """Time between two looks at all resources, whether anything was heard of them or not, in seconds."""
    stats_s: float = Field(default=30.0, gt=0)
    """Least time between two questions to the pods of a resource, in seconds."""
    stats_timeout_s: float = Field(default=2.0, gt=0)
    """The longest that a pod may take for an answer, in seconds."""
    flush_timeout_s: float = Field(default=60.0, gt=0)
    """The longest that a pod may take for a flush, in seconds."""
    workers: int = Field(default=4, ge=1, le=64)
    """Resources that are worked on at the same time."""
    health_host: str = "0.0.0.0"  # noqa: S104
    """Address of /healthz, /readyz and /metrics."""
    health_port: int = Field(default=8080, ge=0, le=65535)
    """Their port; 0 for any free one, which the log names."""
    leader_election: bool = False
    """Wait for the lease `kvcache-operator` in `namespace` before working, so that of several replicas one
    works."""
    lease_s: float = Field(default=15.0, ge=1)
    """Life of the lease after its last renewal; it is renewed three times as often."""
    log_format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object a line."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severity that is logged."""
