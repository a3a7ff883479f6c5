# SPDX-License-Identifier: Apache-2.0
"""The ConfigMaps: the connector's configuration, and all that someone needs who runs a vLLM of their own."""

from __future__ import annotations

import json

from kvcache_operator.plan import CONFIG_KEY, CONFIG_MOUNT, RUNTIME_MOUNT, Plan
from kvcache_operator.render.common import Manifest, metadata
from kvcache_operator.render.containers import kv_transfer_config


def config_map(plan: Plan) -> Manifest:
    """`config.yaml` is part of a `kvcache.config.LMCacheEngineConfig`: the rest is at its default."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(plan, plan.names.config_map),
        "data": {CONFIG_KEY: plan.config_yaml},
    }


def connection(plan: Plan) -> Manifest:
    """For a vLLM that no operator made: mount it at /etc/kvcache and hand the flag over as it stands.

    Secrets are not in it; `secrets.json` says which ones to mount where.
    """
    secrets = {entry.mount: {"secret": entry.secret, "keys": list(entry.keys)} for entry in plan.secret_files}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(plan, plan.names.connection),
        "data": {
            CONFIG_KEY: plan.config_yaml,
            "kv-transfer-config.json": kv_transfer_config(plan),
            "mount-path": CONFIG_MOUNT,
            "runtime-path": RUNTIME_MOUNT,
            "secrets.json": json.dumps(secrets, sort_keys=True),
            "vllm.env": "PYTHONHASHSEED=0\nVLLM_PLUGINS=kvcache\n",
        },
    }
