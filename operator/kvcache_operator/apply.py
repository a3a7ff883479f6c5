# SPDX-License-Identifier: Apache-2.0
"""Writes the children of a resource to the API server, and only what is not there already."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcache_operator import FIELD_MANAGER, KIND
from kvcache_operator.cluster import Cluster, ClusterError
from kvcache_operator.errors import Problem, ResourceError
from kvcache_operator.models.measures import Quantity
from kvcache_operator.plan import Plan
from kvcache_operator.render import Manifest, Reference, Rendered
from kvcache_operator.render.common import selector_labels
from kvcache_operator.render.secret import with_token

TOKEN_BYTES = 32
NAME_TAKEN = "NameTaken"
IMMUTABLE = "Immutable"
"""Reasons of the condition Accepted."""
_HANDOVER_MANAGER = f"{FIELD_MANAGER}-replicas"
_WORKLOADS = ("Deployment", "StatefulSet")


@dataclass
class Applied:
    """What this process has written for one resource, so that nothing is written twice.

    Lost with the process: a new one applies everything once, which changes nothing on the server.
    """

    digests: dict[tuple[str, str], str] = field(default_factory=dict)
    """Of each child as it was applied, by kind and name."""
    workload_generation: int | None = None
    """Of the workload after it was applied; another one means that somebody has changed it."""

    def is_current(self, manifest: Manifest) -> bool:
        return self.digests.get(_key(manifest)) == _digest(manifest)

    def note(self, manifest: Manifest) -> None:
        self.digests[_key(manifest)] = _digest(manifest)


def draw_token() -> str:
    """A new admin token: 256 random bits as 43 characters that need no quoting anywhere."""
    return secrets.token_urlsafe(TOKEN_BYTES)


async def apply(cluster: Cluster, plan: Plan, rendered: Rendered, applied: Applied) -> Manifest:
    """Brings all children to what was rendered, what a pod mounts before the pod.

    The workload is checked by the server first, so that a refused one leaves nothing half applied.

    Returns:
        The workload as the API server has it now.

    Raises:
        ResourceError: the server refuses the workload, or a name belongs to somebody else.
        ClusterError: a child was refused or the server did not answer; the children before it stand.
    """
    wanted = rendered.workload
    live = await _get(cluster, wanted)
    if live is not None:
        _check_owner(live, plan)
    await _check_other_kind(cluster, plan, wanted, live)
    wanted = _with_live_claims(wanted, live)
    is_new = live is None or not applied.is_current(wanted)
    if is_new:
        await _dry_run(cluster, wanted)
        await _check_names(cluster, plan, rendered, applied)
    if rendered.token_secret is not None and not applied.is_current(rendered.token_secret):
        secret = with_token(rendered.token_secret, draw_token())
        await asyncio.to_thread(cluster.create_if_absent, secret)
        applied.note(rendered.token_secret)
    for manifest in rendered.applied[:-1]:
        if not applied.is_current(manifest):
            await asyncio.to_thread(cluster.apply, manifest)
            applied.note(manifest)
    await _remove(cluster, plan, rendered, applied)
    if live is not None and plan.replicas is None:
        await _hand_over_replicas(cluster, plan, live)
    if is_new or live is None or live["metadata"].get("generation") != applied.workload_generation:
        live = await asyncio.to_thread(cluster.apply, wanted)
        applied.note(wanted)
        applied.workload_generation = live["metadata"].get("generation")
    await _grow_claims(cluster, plan)
    return live


async def _get(cluster: Cluster, manifest: Manifest) -> Manifest | None:
    meta = manifest["metadata"]
    return await asyncio.to_thread(
        cluster.get, manifest["apiVersion"], manifest["kind"], meta["namespace"], meta["name"]
    )


async def _dry_run(cluster: Cluster, workload: Manifest) -> None:
    try:
        await asyncio.to_thread(cluster.apply, workload, True)
    except ClusterError as error:
        if error.is_final:
            problem = Problem("spec", f"the API server refuses the pods: {error}; correct the field it names")
            raise ResourceError([problem]) from error
        raise


async def _check_names(cluster: Cluster, plan: Plan, rendered: Rendered, applied: Applied) -> None:
    """Raises ResourceError where a child's name belongs to an object that is not ours."""
    for manifest in rendered.applied[:-1]:
        if _key(manifest) not in applied.digests:
            live = await _get(cluster, manifest)
            if live is not None:
                _check_owner(live, plan)


def _check_owner(live: Manifest, plan: Plan) -> None:
    if not is_ours(live, plan):
        meta = live["metadata"]
        text = (
            f"the {live['kind']} {meta['name']} is there already and is not this resource's; "
            "rename the resource or remove the object"
        )
        raise ResourceError([Problem("metadata.name", text, reason=NAME_TAKEN)])


def is_ours(live: Manifest, plan: Plan) -> bool:
    """Whether an object is a child of the resource: owned by it, or left behind by one of its name."""
    owners = live["metadata"].get("ownerReferences") or []
    controllers = [owner for owner in owners if owner.get("controller")]
    if controllers:
        return any(
            owner["kind"] == KIND and owner["name"] == plan.name and owner["uid"] == plan.owner_uid
            for owner in controllers
        )
    labels = live["metadata"].get("labels") or {}
    return labels.get("app.kubernetes.io/managed-by") == FIELD_MANAGER and all(
        labels.get(key) == value for key, value in selector_labels(plan).items()
    )


async def _check_other_kind(cluster: Cluster, plan: Plan, wanted: Manifest, live: Manifest | None) -> None:
    """A claimTemplate that comes or goes would need another kind of workload: servers without rules let that
    through."""
    if live is not None:
        return
    other = next(kind for kind in _WORKLOADS if kind != wanted["kind"])
    found = await asyncio.to_thread(cluster.get, "apps/v1", other, plan.namespace, plan.name)
    if found is not None and is_ours(found, plan):
        text = (
            f"the pods are those of a {other}, and a claimTemplate cannot be added or removed; "
            "delete the resource and create it anew"
        )
        raise ResourceError([Problem("spec.cache.tiers.disk.volume.claimTemplate", text, reason=IMMUTABLE)])


def _with_live_claims(wanted: Manifest, live: Manifest | None) -> Manifest:
    """The claim templates of a StatefulSet cannot change; claims themselves can grow, see `_grow_claims`."""
    if live is None or "volumeClaimTemplates" not in wanted["spec"]:
        return wanted
    templates = []
    for template, there in zip(
        wanted["spec"]["volumeClaimTemplates"], live["spec"]["volumeClaimTemplates"], strict=True
    ):
        wish, fixed = template["spec"], there["spec"]
        for key in ("storageClassName", "accessModes"):
            if key in wish and wish[key] != fixed.get(key):
                text = f"{wish[key]!r} was {fixed.get(key)!r}; delete the resource and create it anew"
                path = f"spec.cache.tiers.disk.volume.claimTemplate.{key}"
                raise ResourceError([Problem(path, text, reason=IMMUTABLE)])
        size = {"resources": {"requests": fixed["resources"]["requests"]}}
        templates.append({**template, "spec": {**wish, **size}})
    return {**wanted, "spec": {**wanted["spec"], "volumeClaimTemplates": templates}}


async def _grow_claims(cluster: Cluster, plan: Plan) -> None:
    """Asks for more room where the template's size has grown.

    Raises:
        ResourceError: the size would shrink.
        ClusterError: the storage class does not let claims grow, or the server did not answer.
    """
    disk = plan.spec.cache.tiers.disk
    if disk is None or disk.volume.claim_template is None:
        return
    size = disk.volume.claim_template.size
    for claim in await asyncio.to_thread(
        cluster.list, "v1", "PersistentVolumeClaim", plan.namespace, selector_labels(plan)
    ):
        asked = Quantity.parse(claim["spec"]["resources"]["requests"]["storage"])
        if size < asked:
            path = "spec.cache.tiers.disk.volume.claimTemplate.size"
            text = (
                f"{size.text} are less than the {asked.text} of {claim['metadata']['name']}; claims only grow"
            )
            raise ResourceError([Problem(path, text, reason=IMMUTABLE)])
        if size > asked:
            body = {"spec": {"resources": {"requests": {"storage": size.text}}}}
            whole = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim}
            await asyncio.to_thread(cluster.patch, whole, body)


async def _remove(cluster: Cluster, plan: Plan, rendered: Rendered, applied: Applied) -> None:
    """Deletes what an earlier spec had made and this one does not want."""
    for entry in rendered.unwanted:
        key = (entry.kind, entry.name)
        if applied.digests.get(key) == "":
            continue
        live = await asyncio.to_thread(cluster.get, entry.api_version, entry.kind, plan.namespace, entry.name)
        if live is not None and is_ours(live, plan):
            await _delete(cluster, plan, entry)
        applied.digests[key] = ""


async def _delete(cluster: Cluster, plan: Plan, entry: Reference) -> None:
    await asyncio.to_thread(cluster.delete, entry.api_version, entry.kind, plan.namespace, entry.name)


async def _hand_over_replicas(cluster: Cluster, plan: Plan, live: Manifest) -> None:
    """Lets the number of replicas go without losing it: a field that its last manager leaves out falls back
    to its default, so another manager holds it until the autoscaler writes it."""
    if not _manages_replicas(live):
        return
    replicas = live["spec"].get("replicas") or max(1, plan.spec.replicas)
    meta = live["metadata"]
    held = {
        "apiVersion": "apps/v1",
        "kind": plan_kind(plan),
        "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
        "spec": {"replicas": replicas},
    }
    await asyncio.to_thread(cluster.apply, held, False, _HANDOVER_MANAGER)


def plan_kind(plan: Plan) -> str:
    """Kind of the workload."""
    return "StatefulSet" if plan.is_stateful else "Deployment"


def _manages_replicas(live: Manifest) -> bool:
    return any(
        entry.get("manager") == FIELD_MANAGER
        and "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
        for entry in live["metadata"].get("managedFields") or ()
    )


def _key(manifest: Mapping[str, Any]) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
