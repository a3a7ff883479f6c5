# SPDX-License-Identifier: Apache-2.0
"""Who reaches a replica: the admin sidecar, what scrapes it, and the network policy."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from kvcache_operator.models.base import Part
from kvcache_operator.models.measures import Duration, ScrapeInterval
from kvcache_operator.models.refs import TokenSecret

LabelKey = Annotated[str, Field(min_length=1, max_length=316)]
LabelValue = Annotated[str, Field(max_length=63)]


class AdminSpec(Part):
    """The admin sidecar: health, metrics, statistics and flushes."""

    port: int = Field(default=8081, ge=1024, le=65535)
    """Port of the admin API, /metrics included."""
    token_secret_ref: TokenSecret | None = None
    """The token of the admin API. Without it the operator makes the Secret NAME-admin-token once and keeps
    it. The file is read again when it changes."""


class MonitorMode(StrEnum):
    """What makes Prometheus scrape the pods."""

    AUTO = "Auto"
    POD_MONITOR = "PodMonitor"
    SERVICE_MONITOR = "ServiceMonitor"
    DISABLED = "Disabled"


class MonitorSpec(Part):
    """The monitor for Prometheus' operator."""

    mode: MonitorMode = Field(default=MonitorMode.AUTO, strict=False)
    """Auto makes a PodMonitor, else a ServiceMonitor, where the cluster knows the kind."""
    interval: ScrapeInterval = Duration.parse("30s")
    """Time between two scrapes."""
    labels: dict[LabelKey, LabelValue] = Field(default={}, max_length=32)
    """Labels of the monitor, by which a Prometheus selects it."""


class MetricsSpec(Part):
    """How metrics are collected."""

    monitor: MonitorSpec = MonitorSpec()
    """The monitor for Prometheus' operator."""


class NetworkPolicySpec(Part):
    """Who may connect to the pods."""

    mode: Literal["Enabled", "Disabled"] = "Enabled"
    """Enabled: the completions API and events are open to `allowedNamespaces`, admin and metrics to the
    operator's and the monitoring namespace alone."""
    allowed_namespaces: dict[LabelKey, LabelValue] = Field(default={}, max_length=32)
    """Labels of the namespaces whose pods may use the completions API and events; without any, all."""
