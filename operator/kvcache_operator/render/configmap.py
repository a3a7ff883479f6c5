# SPDX-License-Identifier: Apache-2.0
"""The ConfigMap with the connector's configuration."""

from __future__ import annotations

from kvcache_operator.plan import CONFIG_KEY, Plan
from kvcache_operator.render.common import Manifest, metadata


def config_map(plan: Plan) -> Manifest:
    """`config.yaml` is a whole `kvcache.config.LMCacheEngineConfig`."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(plan, plan.names.config_map),
        "data": {CONFIG_KEY: plan.config_yaml},
    }
