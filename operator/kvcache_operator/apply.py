# SPDX-License-Identifier: Apache-2.0
"""Writes the children of a resource to the API server."""

from __future__ import annotations

import asyncio
import secrets

from kvcache_operator.cluster import Cluster
from kvcache_operator.render import Manifest, Rendered
from kvcache_operator.render.secret import with_token

TOKEN_BYTES = 32


def draw_token() -> str:
    """A new admin token: 256 random bits as 43 characters that need no quoting anywhere."""
    return secrets.token_urlsafe(TOKEN_BYTES)


async def apply(cluster: Cluster, rendered: Rendered) -> Manifest:
    """Applies all children, what a pod mounts before the pod; applying twice changes nothing.

    Returns:
        The Deployment as the API server has it now.

    Raises:
        ClusterError: a child was refused or the server did not answer; the children before it stand.
    """
    await asyncio.to_thread(cluster.create_if_absent, with_token(rendered.token_secret, draw_token()))
    answer: Manifest = {}
    for manifest in rendered.applied:
        answer = await asyncio.to_thread(cluster.apply, manifest)
    return answer
