# SPDX-License-Identifier: Apache-2.0
"""The one configuration model of the cache: typed, strict, and free of torch and vLLM.

The operator renders exactly this model into a ConfigMap; the connector reads it. Sources, the first one that
names a key wins: `kv_connector_extra_config` of vLLM, a YAML file, environment variables
(`LMCACHE_CHUNK_SIZE`, nested keys joined by two underscores: `LMCACHE_TIERS__CPU__CAPACITY`). An unknown key
is an error that names the nearest known one.
"""

from kvcache.config.base import ConfigError
from kvcache.config.engine import LMCacheEngineConfig
from kvcache.config.quantity import Quantity, parse_quantity
from kvcache.config.source import CONFIG_FILE_ENV, CONFIG_FILE_KEY, ENV_PREFIX, explain, load_config

__all__ = [
    "CONFIG_FILE_ENV",
    "CONFIG_FILE_KEY",
    "ENV_PREFIX",
    "ConfigError",
    "LMCacheEngineConfig",
    "Quantity",
    "explain",
    "load_config",
    "parse_quantity",
]
