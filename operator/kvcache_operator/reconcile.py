# SPDX-License-Identifier: Apache-2.0
"""The chain parse -> plan -> render -> apply -> observe -> summarise, free of kopf."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from kvcache_operator import API_VERSION, KIND
from kvcache_operator.apply import apply
from kvcache_operator.cluster import Cluster, ClusterError
from kvcache_operator.errors import ResourceError
from kvcache_operator.observe import Observed, observe
from kvcache_operator.parse import parse_resource
from kvcache_operator.plan import Plan, make_plan
from kvcache_operator.render import Manifest, render
from kvcache_operator.settings import Settings
from kvcache_operator.status import APPLY_FAILED, rejected, summarise

_CONFLICT = 409
_PUBLISH_TRIES = 5

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """The time."""
    return datetime.now(UTC)


async def reconcile(
    body: Mapping[str, Any], cluster: Cluster, settings: Settings, clock: Clock = utc_now
) -> None:
    """Brings the children of a resource to what its spec says, and the status to what is so.

    Idempotent: a second call changes nothing. What is wrong with the spec becomes a condition and no error.

    Args:
        body: The resource as the API server gives it.
        cluster: Where it lives.
        settings: The operator's own.
        clock: Tells the time, with its zone.

    Raises:
        ClusterError: a child or the status could not be written; if it was a child, the status says so.
    """
    generation = body["metadata"].get("generation", 0)
    plan = _plan(body, settings)
    if isinstance(plan, ResourceError):
        reason = str(plan)
        await _publish(
            body,
            cluster,
            lambda resource, _: rejected("InvalidSpec", reason, _status(resource), generation, clock()),
        )
        return
    accepted, failure = plan, None
    try:
        await apply(cluster, render(accepted))
    except ClusterError as error:
        failure = error

    def status(resource: Manifest, seen: Observed | None) -> dict[str, Any]:
        text = str(failure) if failure is not None else ""
        return summarise(accepted, None if failure else seen, text, _status(resource), generation, clock())

    await _publish(body, cluster, status)
    if failure is not None:
        raise failure


async def refresh(
    namespace: str, name: str, cluster: Cluster, settings: Settings, clock: Clock = utc_now
) -> None:
    """Writes the status anew after a child has changed, if it is another one; changes nothing else.

    Raises:
        ClusterError: the API server did not answer or refused.
    """

    def status(resource: Manifest, seen: Observed | None) -> dict[str, Any] | None:
        previous, generation = _status(resource), resource["metadata"].get("generation", 0)
        plan = _plan(resource, settings)
        reasons = {condition["reason"] for condition in previous.get("conditions") or ()}
        # Of a generation that is not reconciled yet, or could not be, its own handler writes.
        is_settled = previous.get("observedGeneration") == generation and APPLY_FAILED not in reasons
        if isinstance(plan, ResourceError) or not is_settled:
            return None
        return summarise(plan, seen, "", previous, generation, clock())

    await _publish({"metadata": {"namespace": namespace, "name": name}}, cluster, status)


async def _publish(
    body: Mapping[str, Any],
    cluster: Cluster,
    compute: Callable[[Manifest, Observed | None], dict[str, Any] | None],
) -> None:
    """Writes the status that `compute` makes of the resource and its Deployment as they are now.

    Handlers of a resource and of its children run side by side. So the write holds only for the version of
    the resource that was read: after a conflict all is read again, and what was read last wins.
    """
    meta = body["metadata"]
    namespace, name = meta["namespace"], meta["name"]
    for attempt in range(1, _PUBLISH_TRIES + 1):
        resource = await asyncio.to_thread(cluster.get, API_VERSION, KIND, namespace, name)
        if resource is None or ("uid" in meta and resource["metadata"].get("uid") != meta["uid"]):
            return
        deployment = await asyncio.to_thread(cluster.get, "apps/v1", "Deployment", namespace, name)
        status = compute(resource, observe(deployment) if deployment is not None else None)
        previous = _status(resource)
        if status is None or {**previous, **status} == previous:
            return
        try:
            await asyncio.to_thread(cluster.patch_status, resource, status)
        except ClusterError as error:
            if error.status != _CONFLICT or attempt == _PUBLISH_TRIES:
                raise
        else:
            return


def _status(resource: Mapping[str, Any]) -> dict[str, Any]:
    return resource.get("status") or {}


def _plan(body: Mapping[str, Any], settings: Settings) -> Plan | ResourceError:
    try:
        return make_plan(parse_resource(body), settings)
    except ResourceError as error:
        return error
