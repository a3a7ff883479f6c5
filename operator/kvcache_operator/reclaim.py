# SPDX-License-Identifier: Apache-2.0
"""`reclaimPolicy: Delete`: the claims and the remote chunks of a resource go with it.

The only use of a finalizer. Every other resource is gone at once, whether the operator runs or not, and the
garbage collector takes its children.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from kvcache_operator import GROUP
from kvcache_operator.cluster import Cluster
from kvcache_operator.plan import Plan
from kvcache_operator.render import Manifest
from kvcache_operator.render.common import selector_labels

FINALIZER = f"{GROUP}/reclaim"
FORCE_ANNOTATION = f"{GROUP}/force-delete"
"""With any value: let the resource go although not everything could be removed."""
MAX_TRIES = 5


def has_finalizer(resource: Mapping[str, Any]) -> bool:
    return FINALIZER in (resource["metadata"].get("finalizers") or ())


def sharer(resource: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> str:
    """Namespace and name of a resource that stays and reads the same objects of remote tiers; empty if none.

    Equal models share their objects unless `cache.namespace` keeps them apart, and two names may lead to one
    store: so equal digests and a remote tier are enough, and what is left behind only ages there.
    """
    own, digest = resource["metadata"], (resource.get("status") or {}).get("cacheNamespace")
    for other in others:
        meta, tiers = other["metadata"], other.get("spec", {}).get("cache", {}).get("tiers", {})
        if (
            digest
            and (other.get("status") or {}).get("cacheNamespace") == digest
            and meta["uid"] != own["uid"]
            and not meta.get("deletionTimestamp")
            and tiers.get("remote") is not None
        ):
            return f"{meta['namespace']}/{meta['name']}"
    return ""


async def sync_finalizer(cluster: Cluster, resource: Manifest, wanted: bool) -> Manifest:
    """Adds or removes our finalizer where that is needed; returns the resource as it is then.

    Raises:
        ClusterError: the resource has changed meanwhile (409), or the server did not answer.
    """
    if has_finalizer(resource) == wanted:
        return resource
    others = [name for name in resource["metadata"].get("finalizers") or () if name != FINALIZER]
    names = [*others, FINALIZER] if wanted else others
    return await asyncio.to_thread(cluster.patch, resource, {"metadata": {"finalizers": names}})


async def delete_claims(cluster: Cluster, plan: Plan) -> int:
    """Deletes the claims that the claim template made; returns how many. A claim stays until its pod is gone.

    Raises:
        ClusterError: the server did not answer or refused.
    """
    if not plan.is_stateful:
        return 0
    claims = await asyncio.to_thread(
        cluster.list, "v1", "PersistentVolumeClaim", plan.namespace, selector_labels(plan)
    )
    for claim in claims:
        name = claim["metadata"]["name"]
        await asyncio.to_thread(cluster.delete, "v1", "PersistentVolumeClaim", plan.namespace, name)
    return len(claims)
