# SPDX-License-Identifier: Apache-2.0
"""The chain parse -> plan -> render -> apply -> observe -> summarise, free of kopf and of queues."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from kvcache_operator import API_VERSION, KIND, events, flush
from kvcache_operator.apply import Applied, apply
from kvcache_operator.cache_numbers import (
    cache_status,
    config_trouble,
    connector_trouble,
    pending_restart,
    tier_trouble,
)
from kvcache_operator.cluster import CONFLICT, Cluster, ClusterError
from kvcache_operator.errors import CLAIM_NOT_SHAREABLE, Problem, ResourceError
from kvcache_operator.observe import Observed, observe
from kvcache_operator.parse import parse_resource
from kvcache_operator.plan import TOKEN_KEY, Plan, make_plan
from kvcache_operator.pods import Pods, PodStats, Ports
from kvcache_operator.queue import Key
from kvcache_operator.reclaim import (
    FORCE_ANNOTATION,
    MAX_TRIES,
    delete_claims,
    has_finalizer,
    sharer,
    sync_finalizer,
)
from kvcache_operator.render import Kinds, Manifest, render
from kvcache_operator.render.common import selector_labels
from kvcache_operator.settings import Settings
from kvcache_operator.status import Findings, Told, rejected, stamp, summarise
from kvcache_operator.verdicts import SECRET_INVALID, SECRET_NOT_FOUND, Sight

log = logging.getLogger(__name__)

_PUBLISH_TRIES = 5
_RECLAIM_PODS = 3
"""That are asked to empty a remote tier, one after the other."""
SECRET_RECHECK_S = 10.0
"""Secrets are not watched, since that would need the right to list them all."""

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """The time."""
    return datetime.now(UTC)


@dataclass
class Memory:
    """What is known of a resource beyond what the API server keeps. Losing it costs time and nothing else."""

    applied: Applied = field(default_factory=Applied)
    told: Told | None = None
    stats: list[PodStats] = field(default_factory=list)
    asked_at: datetime | None = None
    """When pods were last asked."""
    reclaim_tries: int = 0
    written_version: str = ""
    """`resourceVersion` of the resource after this process last wrote to it."""


@dataclass(frozen=True)
class Outcome:
    """What came of a reconcile."""

    again_in_s: float | None = None
    """When to look again without being asked."""
    failure: ClusterError | None = None
    """What the API server did not take; the status tells of it."""
    generation: int = 0


class Reconciler:
    """Brings resources to what their specs say. Belongs to one event loop.

    Args:
        cluster: Where they live.
        settings: The operator's own.
        pods: Asks the pods.
        clock: Tells the time, with its zone.
    """

    def __init__(self, cluster: Cluster, settings: Settings, pods: Pods, clock: Clock = utc_now) -> None:
        self._cluster = cluster
        self._settings = settings
        self._pods = pods
        self._clock = clock
        self._memories: dict[Key, Memory] = {}
        self.kinds = Kinds()

    def forget_applied(self, key: Key) -> None:
        """Has the next reconcile apply every child, in case somebody has changed one that is not watched."""
        if key in self._memories:
            self._memories[key].applied = Applied()

    def has_written(self, key: Key, version: str) -> bool:
        """Whether this version of the resource is this process's own work, so that there is nothing new."""
        memory = self._memories.get(key)
        return memory is not None and bool(version) and memory.written_version == version

    async def reconcile(self, key: Key) -> Outcome:
        """One pass over a resource. Idempotent: where nothing has changed, nothing is written.

        What is wrong with the spec becomes a condition and no error.

        Raises:
            ClusterError: the API server did not answer, or refused what is not the spec's fault.
        """
        resource = await asyncio.to_thread(self._cluster.get, API_VERSION, KIND, *key)
        if resource is None:
            self._memories.pop(key, None)
            return Outcome()
        memory = self._memories.setdefault(key, Memory())
        generation = resource["metadata"].get("generation", 0)
        # Deletion does not raise the generation, so it is looked at first.
        is_going = resource["metadata"].get("deletionTimestamp") is not None
        if is_going and not has_finalizer(resource):
            return Outcome(generation=generation)
        try:
            plan = make_plan(parse_resource(resource), self._settings)
            if is_going:
                return await self._reclaim(resource, plan, memory)
            await self._check_claims(plan)
            resource = await sync_finalizer(self._cluster, resource, plan.spec.reclaim_policy == "Delete")
            return await self._bring_about(resource, plan, memory)
        except ResourceError as error:
            if is_going:
                # A spec that cannot be read names nothing to remove.
                await sync_finalizer(self._cluster, resource, False)
                return Outcome(generation=generation)
            reason = error
            await self._publish(
                resource, lambda entry: rejected(reason, _status(entry), generation, self._clock())
            )
            return Outcome(generation=generation)

    async def _bring_about(self, resource: Manifest, plan: Plan, memory: Memory) -> Outcome:
        generation, failure, observed = resource["metadata"].get("generation", 0), None, None
        try:
            workload = await apply(self._cluster, plan, render(plan, self.kinds), memory.applied)
            pods = await asyncio.to_thread(
                self._cluster.list, "v1", "Pod", plan.namespace, selector_labels(plan)
            )
            observed = observe(workload, pods)
        except ClusterError as error:
            failure = error
        sight = Sight(observed, str(failure) if failure is not None else "")
        told, last_flush = memory.told or Told.of(_status(resource)), _status(resource).get("lastFlush")
        again: float | None = None
        if observed is not None:
            secrets = None if observed.is_complete else await self._secret_trouble(plan)
            sight = replace(sight, secret_trouble=secrets)
            again = SECRET_RECHECK_S if secrets is not None else None
            told = await self._ask(plan, observed, memory, told)
            last_flush = await self._flush(resource, plan, observed) or last_flush
            if any(pod.address and not pod.is_going for pod in observed.pods):
                again = min(again or self._settings.stats_s, self._settings.stats_s)
            here = {pod.name for pod in observed.pods if not pod.is_going}
            stats = [answer for answer in memory.stats if answer.pod in here]
            ready = {pod.name for pod in observed.pods if pod.ready}
            sight = replace(
                sight,
                tier_trouble=tier_trouble(
                    [answer for answer in stats if answer.pod in ready], plan.tier_names
                ),
                connector_trouble=connector_trouble(stats),
                config_trouble=config_trouble(stats),
            )
        flush_status = last_flush or {}
        if flush_status.get("completedAt") and not flush_status.get("complete"):
            sight = replace(
                sight, flush_trouble=f"flush {flush_status['requestID']}: {flush_status.get('message', '')}"
            )
        findings = Findings(sight, told, last_flush)
        await self._publish(
            resource, lambda entry: summarise(plan, findings, _status(entry), generation, self._clock())
        )
        return Outcome(again, failure, generation)

    async def _check_claims(self, plan: Plan) -> None:
        """Raises ResourceError where several pods would need a claim that only one node may mount."""
        disk = plan.spec.cache.tiers.disk
        name = disk.volume.claim_name if disk is not None else None
        if name is None or (plan.spec.replicas_mode == "Managed" and plan.spec.replicas < 2):
            return
        claim = await asyncio.to_thread(
            self._cluster.get, "v1", "PersistentVolumeClaim", plan.namespace, name
        )
        modes = claim["spec"].get("accessModes", []) if claim is not None else ["ReadWriteMany"]
        if "ReadWriteMany" not in modes:
            text = (
                f"the claim {name} is {', '.join(modes)}, and several replicas need ReadWriteMany; "
                "write claimTemplate for a claim of each replica, or replicas: 1"
            )
            path = "spec.cache.tiers.disk.volume.claimName"
            raise ResourceError([Problem(path, text, reason=CLAIM_NOT_SHAREABLE)])

    async def _secret_trouble(self, plan: Plan) -> tuple[str, str] | None:
        """The first key of a Secret that is not as it must be."""
        for use in plan.secret_uses:
            secret = await asyncio.to_thread(self._cluster.get, "v1", "Secret", plan.namespace, use.secret)
            if secret is None:
                text = f"{use.field}: there is no Secret {use.secret}; make it with the key {use.key}"
                return SECRET_NOT_FOUND, text
            data = secret.get("data") or {}
            if use.key not in data:
                text = f"{use.field}: the Secret {use.secret} has no key {use.key}; add it"
                return SECRET_NOT_FOUND, text
            if not _decoded(data[use.key]).strip():
                text = f"{use.field}: the key {use.key} of the Secret {use.secret} is empty; write it"
                return SECRET_INVALID, text
        return None

    async def _token(self, plan: Plan) -> str:
        """The admin token; empty where there is none yet."""
        own = plan.spec.admin.token_secret_ref
        key = own.key if own is not None else TOKEN_KEY
        name = plan.names.token_secret
        secret = await asyncio.to_thread(self._cluster.get, "v1", "Secret", plan.namespace, name)
        return _decoded(((secret or {}).get("data") or {}).get(key, "")).strip()

    async def _ask(self, plan: Plan, observed: Observed, memory: Memory, told: Told) -> Told:
        """Asks the pods, at most as often as the settings say; silence leaves the numbers as they are."""
        now, candidates = self._clock(), [pod for pod in observed.pods if pod.address and not pod.is_going]
        is_due = (
            memory.asked_at is None or (now - memory.asked_at).total_seconds() >= self._settings.stats_s * 0.9
        )
        if not candidates:
            return replace(told, pending_restart=())
        if not is_due:
            return told
        memory.asked_at = now
        token = await self._token(plan)
        ports = Ports(plan.spec.engine.port, plan.spec.admin.port)
        memory.stats = await self._pods.stats(candidates, ports, token)
        if not memory.stats:
            return told
        first = memory.stats[0]
        ranks = first.stats.ranks
        memory.told = Told(
            cache=cache_status(memory.stats, told.cache or {}, stamp(now)),
            engine_version=first.engine_version or told.engine_version,
            connector_version=first.connector_version or told.connector_version,
            cache_namespace=ranks[0].namespace if ranks else told.cache_namespace,
            pending_restart=pending_restart(memory.stats),
        )
        return memory.told

    async def _flush(self, resource: Manifest, plan: Plan, observed: Observed) -> dict[str, Any] | None:
        """Does the flush that the annotations ask for; None where they ask for none."""
        annotations = resource["metadata"].get("annotations") or {}
        request = flush.requested(annotations, _status(resource), plan)
        if request is None:
            return None
        begun = flush.started(request, stamp(self._clock()))
        # A flush that the operator's end interrupts stands there unfinished, and is done again.
        await self._publish(resource, lambda _: {"lastFlush": begun})
        pods = [pod for pod in observed.pods if pod.address and not pod.is_going]
        ports = Ports(plan.spec.engine.port, plan.spec.admin.port)
        token = await self._token(plan)
        results = []
        if request.tiers:
            results = await self._pods.flush(
                pods, ports, token, request.tiers, f"annotation {request.request_id}", plan.shared_tiers
            )
        return flush.finished(request, begun["requestedAt"], stamp(self._clock()), results, plan)

    async def _reclaim(self, resource: Manifest, plan: Plan, memory: Memory) -> Outcome:
        """Removes what `reclaimPolicy: Delete` promises, then lets the resource go."""
        annotations = resource["metadata"].get("annotations") or {}
        shared_with = "" if plan.spec.cache.tiers.remote is None else await self._sharer(resource)
        problem = "" if shared_with else await self._purge_remote(plan)
        memory.reclaim_tries += 1
        if problem and FORCE_ANNOTATION not in annotations:
            if memory.reclaim_tries == MAX_TRIES:
                advice = f"{problem}; annotate the resource with {FORCE_ANNOTATION}=yes to let it go"
                await self._post(events.Event("Warning", "ReclaimFailed", advice), resource)
            delay = self._settings.retry_s * 2 ** min(memory.reclaim_tries, 6)
            return Outcome(again_in_s=delay)
        claims = await delete_claims(self._cluster, plan)
        await sync_finalizer(self._cluster, resource, False)
        kept = f"the remote tier's chunks stay: {shared_with} reads them too" if shared_with else problem
        text = f"{claims} claims were deleted" + (f"; {kept}" if kept else "")
        await self._post(events.Event("Normal", "Reclaimed", text), resource)
        return Outcome()

    async def _purge_remote(self, plan: Plan) -> str:
        """Empties the remote tier of this cache's chunks through a pod; why that failed, or empty."""
        if plan.spec.cache.tiers.remote is None:
            return ""
        found = await asyncio.to_thread(
            self._cluster.list, "v1", "Pod", plan.namespace, selector_labels(plan)
        )
        states = observe({"spec": {}, "metadata": {}}, found).pods
        ports = Ports(plan.spec.engine.port, plan.spec.admin.port)
        token, problem = await self._token(plan), "no pod is ready that could empty the remote tier"
        # Each one reaches all of the tier: the first that can is enough.
        for pod in [pod for pod in states if pod.ready][:_RECLAIM_PODS]:
            (result,) = await self._pods.flush(
                [pod], ports, token, ["remote"], "reclaimPolicy Delete", plan.shared_tiers
            )
            if not result.problem:
                return ""
            problem = f"{result.pod}: {result.problem}"
        return problem

    async def _sharer(self, resource: Manifest) -> str:
        """Another resource whose pods read the same objects of a remote tier; empty where there is none."""
        entries = []
        for namespace in self._settings.namespaces or (None,):
            entries += await asyncio.to_thread(self._cluster.list, API_VERSION, KIND, namespace)
        return sharer(resource, entries)

    async def _publish(self, resource: Manifest, compute: Callable[[Manifest], Mapping[str, Any]]) -> None:
        """Writes the status that `compute` makes of the resource as it is now, if it is another one.

        The write holds only for the version that was read: after a conflict it is read again.
        """
        entry: Manifest | None = resource
        meta = resource["metadata"]
        for attempt in range(1, _PUBLISH_TRIES + 1):
            if entry is None or entry["metadata"].get("uid") != resource["metadata"].get("uid"):
                return
            status, previous = compute(entry), _status(entry)
            change = _change(previous, status)
            if not change:
                return
            try:
                answer = await asyncio.to_thread(self._cluster.patch_status, entry, change)
            except ClusterError as error:
                if error.status != CONFLICT or attempt == _PUBLISH_TRIES:
                    raise
                entry = await asyncio.to_thread(
                    self._cluster.get, API_VERSION, KIND, meta["namespace"], meta["name"]
                )
                continue
            resource["metadata"]["resourceVersion"] = answer["metadata"]["resourceVersion"]
            memory = self._memories.get(Key(meta["namespace"], meta["name"]))
            if memory is not None:
                memory.written_version = answer["metadata"]["resourceVersion"]
            resource["status"] = answer.get("status") or {}
            lost = sorted(status.keys() - resource["status"].keys())
            if lost:
                log.warning(
                    "the server drops %s of a status: its definition of KVCache is older than this operator; "
                    "apply manifests/crd",
                    ", ".join(lost),
                )
            for event in events.transitions(previous, {**previous, **status}):
                log.info("%s/%s: %s: %s", meta["namespace"], meta["name"], event.reason, event.message)
                await self._post(event, resource)
            return

    async def _post(self, event: events.Event, resource: Manifest) -> None:
        """Events are for people: one that is lost changes nothing."""
        try:
            await asyncio.to_thread(self._cluster.create, events.manifest(event, resource, self._clock()))
        except ClusterError as error:
            if error.status != CONFLICT:
                log.warning("event %s is lost: %s", event.reason, error)


def _change(previous: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, Any]:
    """The merge patch from one status to another, of the keys that `status` names; empty where they agree."""
    change: dict[str, Any] = {}
    for key, value in status.items():
        before = previous.get(key)
        if before == value:
            continue
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            gone = dict.fromkeys(before.keys() - value.keys())
            change[key] = {**gone, **value}
        else:
            change[key] = value
    return change


def _status(resource: Mapping[str, Any]) -> dict[str, Any]:
    return resource.get("status") or {}


def _decoded(text: str) -> str:
    try:
        return base64.b64decode(text).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
