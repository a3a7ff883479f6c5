# SPDX-License-Identifier: Apache-2.0
"""The Service in front of the pods."""

from __future__ import annotations

from kvcache_operator.plan import Plan
from kvcache_operator.render.common import Manifest, metadata, selector_labels


def service(plan: Plan) -> Manifest:
    """Both ports under the resource's name; target ports go by name, so that they may differ between pods."""
    ports = {"http": plan.spec.engine.port, "admin": plan.spec.admin.port}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(plan, plan.names.service),
        "spec": {
            "type": "ClusterIP",
            "selector": selector_labels(plan),
            "ports": [
                {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
                for name, port in ports.items()
            ],
        },
    }
