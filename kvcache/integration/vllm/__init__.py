# SPDX-License-Identifier: Apache-2.0
"""The connector for vLLM."""

CONNECTOR = "LMCacheConnectorV1Dynamic"


def register() -> None:
    """Entry point of `vllm.general_plugins`: names the connector. vLLM may call it twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kvcache.integration.vllm.connector", CONNECTOR)
