# SPDX-License-Identifier: Apache-2.0
"""The configuration of one of vLLM's processes: what it started with, and what the sidecar made of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvcache.config import ConfigError, LMCacheEngineConfig
from kvcache.config.running import RunningConfig
from kvcache.control.wire import Configured

logger = logging.getLogger("vllm.kvcache")

Adapt = Callable[[LMCacheEngineConfig], Collection[str]]
"""Takes over the live fields of a configuration; returns those that wait for the next start after all."""


class LiveConfig:
    """Belongs to a process of the connector. Thread-safe.

    Args:
        extra_config: vLLM's `kv_connector_extra_config`.

    Raises:
        ConfigError: as `load_config`.
    """

    def __init__(self, extra_config: Mapping[str, Any]) -> None:
        self._running = RunningConfig(extra_config)
        self._lock = threading.Lock()
        self._set_log_level()

    @property
    def config(self) -> LMCacheEngineConfig:
        """What the process runs."""
        return self._running.config

    @property
    def digest(self) -> str:
        """Of the configuration file that was last taken in."""
        return self._running.file_digest

    @property
    def restart(self) -> list[str]:
        """Fields of it that wait for the next start."""
        return list(self._running.restart)

    def take_in(self, file: Mapping[str, Any], adapt: Adapt) -> Configured:
        """Goes on with what the configuration file says now, as far as that needs no restart."""
        with self._lock:
            try:
                offered = self._running.offer(file)
            except ConfigError as error:
                return Configured(refused=str(error))
            accepted = self._running.offer(file, adapt(offered.config) if offered.live else ())
            self._running.commit(file, accepted)
            self._set_log_level()
        logger.info(
            "KV cache: a new configuration; in effect: %s; after a restart: %s",
            ", ".join(accepted.live) or "nothing new",
            ", ".join(accepted.restart) or "nothing",
        )
        return Configured(applied=list(accepted.live), restart=list(accepted.restart))

    def _set_log_level(self) -> None:
        logger.setLevel(self.config.log_level)
