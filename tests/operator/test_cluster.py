# SPDX-License-Identifier: Apache-2.0
"""The client without a server."""

from __future__ import annotations

import kubernetes
import pytest

from kvcache_operator.cluster import Cluster, ClusterError


def test_no_server_is_an_error_without_status() -> None:
    configuration = kubernetes.client.Configuration()
    configuration.host = "http://127.0.0.1:9"
    configuration.retries = False
    with pytest.raises(ClusterError, match="discovery") as caught:
        Cluster(kubernetes.client.ApiClient(configuration), timeout_s=2)
    assert caught.value.status is None
    assert not caught.value.is_final
