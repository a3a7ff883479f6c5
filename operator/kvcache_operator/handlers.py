# SPDX-License-Identifier: Apache-2.0
"""kopf's handlers: what happens when a KVCache is created, changed, found again or deleted.

They decide nothing: user errors are conditions (`reconcile`), errors of the API server come back later with
some chance in the delay, and no finalizer is ever set: children go with their owner, operator or not.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import kopf

from kvcache_operator import GROUP, KIND, PLURAL, VERSION
from kvcache_operator.cluster import Cluster, ClusterError
from kvcache_operator.reconcile import reconcile, refresh
from kvcache_operator.settings import Settings

log = logging.getLogger(__name__)

_CHILDREN = {"app.kubernetes.io/managed-by": "kvcache-operator"}


class Handlers:
    """The handlers with what they share."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings

    async def configure(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        """kopf's own settings."""
        settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
        settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(
            prefix=GROUP, key="last-handled"
        )
        # Each log line of a handler would become an Event; only transitions are worth one.
        settings.posting.enabled = False

    async def changed(self, body: kopf.Body, **_: Any) -> None:
        """Create, update, and resume after the operator's start."""
        try:
            await reconcile(body, self._cluster, self._settings)
        except ClusterError as error:
            if not error.is_final:
                raise kopf.TemporaryError(f"{error}; trying again", delay=self._delay()) from error
            log.warning("%s; it would be refused again, so the resource's next change is awaited", error)

    async def deleted(self, name: str, namespace: str | None, **_: Any) -> None:
        """Says that there is nothing to do; called only where someone else's finalizer holds the resource."""
        log.info("%s/%s is going; the garbage collector removes its children", namespace, name)

    async def child_changed(self, meta: kopf.Meta, namespace: str | None, **_: Any) -> None:
        """A Deployment of ours: its numbers belong into its owner's status."""
        owners = meta.get("ownerReferences", ())
        name = next(
            (owner["name"] for owner in owners if owner["kind"] == KIND and owner.get("controller")), None
        )
        if name is None or namespace is None:
            return
        try:
            await refresh(namespace, name, self._cluster, self._settings)
        except ClusterError as error:
            # kopf does not repeat event handlers; the Deployment's next event brings the numbers again.
            log.warning("status of %s/%s is stale: %s", namespace, name, error)

    def registry(self) -> kopf.OperatorRegistry:
        """The handlers in a registry of their own, so that importing this module registers nothing."""
        registry = kopf.OperatorRegistry()
        kopf.on.startup(registry=registry)(self.configure)
        kopf.on.login(registry=registry)(login)
        kopf.on.create(GROUP, VERSION, PLURAL, registry=registry)(self.changed)
        kopf.on.update(GROUP, VERSION, PLURAL, registry=registry, field="spec")(self.changed)
        kopf.on.resume(GROUP, VERSION, PLURAL, registry=registry)(self.changed)
        kopf.on.delete(GROUP, VERSION, PLURAL, registry=registry, optional=True)(self.deleted)
        kopf.on.event("apps", "v1", "deployments", registry=registry, labels=_CHILDREN)(self.child_changed)
        return registry

    def _delay(self) -> float:
        """Seconds until the next try."""
        return self._settings.retry_s * (1 + random.random())  # noqa: S311


async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    """The same places that `Cluster.connect` looks into: the pod's service account, then KUBECONFIG."""
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


async def run(settings: Settings) -> None:
    """Runs the operator until it is told to stop.

    Raises:
        ClusterError: there is no cluster to connect to.
    """
    cluster = await asyncio.to_thread(Cluster.connect, settings.api_timeout_s)
    kopf.configure()
    await kopf.operator(
        registry=Handlers(cluster, settings).registry(),
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        standalone=True,
    )
