# SPDX-License-Identifier: Apache-2.0
"""The Secret with the admin token."""

from __future__ import annotations

import base64

from kvcache_operator.plan import TOKEN_KEY, Plan
from kvcache_operator.render.common import Manifest, metadata


def token_secret(plan: Plan) -> Manifest:
    """The Secret without its token: that one is random, and drawn once by who creates the object."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(plan, plan.names.token_secret),
        "type": "Opaque",
    }


def with_token(secret: Manifest, token: str) -> Manifest:
    """`secret` holding `token`."""
    return secret | {"data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()}}
