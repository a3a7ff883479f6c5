# SPDX-License-Identifier: Apache-2.0
"""From what was decided and seen to the status of a resource. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kvcache_operator.errors import ResourceError
from kvcache_operator.models import BudgetStatus, Condition, PodStatus, Status
from kvcache_operator.observe import Observed
from kvcache_operator.plan import Plan, in_mebibytes
from kvcache_operator.render.common import selector_labels
from kvcache_operator.render.containers import CONNECTOR
from kvcache_operator.verdicts import TYPES, Sight, Verdict, verdicts

_MESSAGE_LENGTH = 1024
_MAX_PODS = 64


@dataclass(frozen=True)
class Told:
    """What pods have told lately; it stays when they are silent."""

    cache: dict[str, Any] | None = None
    """The status `cache`."""
    engine_version: str = ""
    connector_version: str = ""
    cache_namespace: str = ""
    pending_restart: tuple[str, ...] = ()
    """Fields of the configuration that some pod does not run before its next start."""

    @classmethod
    def of(cls, previous: Mapping[str, Any]) -> Told:
        """What a status says that was written before."""
        return cls(
            cache=previous.get("cache"),
            engine_version=previous.get("engineVersion", ""),
            connector_version=previous.get("connectorVersion", ""),
            cache_namespace=previous.get("cacheNamespace", ""),
            pending_restart=tuple(previous.get("pendingRestart") or ()),
        )


@dataclass(frozen=True)
class Findings:
    """All that a status is made of."""

    sight: Sight
    told: Told = field(default_factory=Told)
    last_flush: dict[str, Any] | None = None


def stamp(now: datetime) -> str:
    """A time as Kubernetes writes it."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rejected(
    error: ResourceError, previous: Mapping[str, Any], generation: int, now: datetime
) -> dict[str, Any]:
    """The status of a resource whose spec cannot be used. What runs goes on, and its numbers stay."""
    text = str(error)
    found = [
        Verdict("Accepted", "False", error.reason, text),
        Verdict("Ready", "False", error.reason, text),
    ]
    return {
        "observedGeneration": generation,
        "conditions": _dump(_conditions(found, previous, generation, now, keep_others=True)),
    }


def summarise(
    plan: Plan, findings: Findings, previous: Mapping[str, Any], generation: int, now: datetime
) -> dict[str, Any]:
    """The status of a resource that was accepted.

    Args:
        plan: What is to be.
        findings: What is.
        previous: The status so far, for the times of transition.
        generation: The resource's `metadata.generation`.
        now: The time, with its zone.
    """
    observed, told = findings.sight.observed, findings.told
    found = verdicts(plan, findings.sight)
    host = f"{plan.names.service}.{plan.namespace}.svc"
    status = Status(
        observed_generation=generation,
        replicas=observed.replicas if observed else 0,
        ready_replicas=observed.ready if observed else 0,
        updated_replicas=observed.updated if observed else 0,
        selector=",".join(f"{key}={value}" for key, value in selector_labels(plan).items()),
        image=plan.image,
        engine_version=told.engine_version or None,
        connector_version=told.connector_version or None,
        connector=CONNECTOR,
        cache_namespace=told.cache_namespace or None,
        endpoint=f"http://{host}:{plan.spec.engine.port}/v1",
        admin_endpoint=f"http://{host}:{plan.spec.admin.port}",
        pods=_pods(observed),
        pending_restart=told.pending_restart,
        budget=_budget(plan),
        conditions=_conditions(found, previous, generation, now),
    ).model_dump(by_alias=True, mode="json", exclude_none=True)
    if told.cache is not None:
        status["cache"] = told.cache
    if findings.last_flush is not None:
        status["lastFlush"] = findings.last_flush
    return status


def _pods(observed: Observed | None) -> tuple[PodStatus, ...]:
    return tuple(
        PodStatus(
            name=pod.name,
            node=pod.node or None,
            ready=pod.ready,
            reason=pod.reason or None,
            message=pod.message[:_MESSAGE_LENGTH] or None,
        )
        for pod in (observed.pods if observed else ())[:_MAX_PODS]
    )


def _budget(plan: Plan) -> BudgetStatus:
    budget = plan.budget
    memory = budget.engine_request + budget.admin_request
    return BudgetStatus(
        gpus=budget.gpus,
        ranks=budget.ranks,
        memory=in_mebibytes(memory),
        shared_memory=in_mebibytes(budget.shm),
        ephemeral_storage=in_mebibytes(budget.disk_request) if budget.disk_request is not None else None,
        cpu_tier_per_rank=in_mebibytes(budget.tier_per_rank),
        total_memory=in_mebibytes(memory * plan.spec.replicas),
    )


def _conditions(
    found: Sequence[Verdict],
    previous: Mapping[str, Any],
    generation: int,
    now: datetime,
    keep_others: bool = False,
) -> tuple[Condition, ...]:
    """Conditions whose time of transition moves only when their status does, in the order of `TYPES`."""
    before = {entry["type"]: entry for entry in previous.get("conditions") or ()}
    conditions = {}
    for verdict in found:
        last = before.pop(verdict.type, {})
        since = last["lastTransitionTime"] if last.get("status") == verdict.status else stamp(now)
        conditions[verdict.type] = Condition(
            type=verdict.type,
            status=verdict.status,
            reason=verdict.reason,
            message=verdict.message[:_MESSAGE_LENGTH],
            last_transition_time=since,
            observed_generation=generation,
        )
    if keep_others:
        conditions |= {kind: Condition.model_validate(entry) for kind, entry in before.items()}
        for kind in TYPES:
            conditions.setdefault(
                kind,
                Condition(
                    type=kind,
                    status="Unknown",
                    reason="NotObserved",
                    message="the spec was never accepted",
                    last_transition_time=stamp(now),
                    observed_generation=generation,
                ),
            )
    return tuple(conditions[kind] for kind in TYPES)


def _dump(conditions: Sequence[Condition]) -> list[dict[str, Any]]:
    return [condition.model_dump(by_alias=True, mode="json") for condition in conditions]
