# SPDX-License-Identifier: Apache-2.0
"""The configuration of a process that lives: loaded at its start, changed in part by the admin sidecar."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from kvcache.config.engine import LMCacheEngineConfig
from kvcache.config.live import ConfigChange, change, file_digest
from kvcache.config.source import config_file, load_config, read_config_file


class RunningConfig:
    """What a process runs, and what of the last configuration file waits for its next start.

    Args:
        extra_config: vLLM's `kv_connector_extra_config`; it stays above every file.
        environ: the environment, below every file.

    Raises:
        ConfigError: as `load_config`.
    """

    def __init__(
        self, extra_config: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._extra = dict(extra_config or {})
        self._environ = dict(environ)
        path = config_file(self._extra, self._environ)
        data: dict[str, Any] = {} if path is None else read_config_file(path)
        self.config: LMCacheEngineConfig = load_config(self._extra, self._environ, data)
        self.file_digest = file_digest(data)
        """Of the file that was last taken in, the one of the start or one that came later."""
        self.restart: tuple[str, ...] = ()
        """Fields of that file that are not in effect yet."""

    def offer(self, data: Mapping[str, Any], waiting: Collection[str] = ()) -> ConfigChange:
        """What a new configuration file would change here. Nothing is changed by asking.

        Args:
            data: what the file says.
            waiting: live fields that cannot take effect in this process all the same.

        Raises:
            ConfigError: it cannot be used, alone or together with the other sources.
        """
        return change(self.config, load_config(self._extra, self._environ, data), waiting)

    def commit(self, data: Mapping[str, Any], accepted: ConfigChange) -> None:
        """The process runs what `offer` answered."""
        self.config = accepted.config
        self.restart = accepted.restart
        self.file_digest = file_digest(data)
