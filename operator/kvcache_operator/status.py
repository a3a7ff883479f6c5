# SPDX-License-Identifier: Apache-2.0
"""From what was decided and seen to the status of a resource. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from kvcache_operator.models import BudgetStatus, Condition, Status
from kvcache_operator.observe import Observed
from kvcache_operator.plan import Plan, in_mebibytes
from kvcache_operator.render.common import selector_labels

APPLY_FAILED = "ApplyFailed"
"""Reason of conditions when the API server refused a child."""

_MESSAGE_LENGTH = 1024


@dataclass(frozen=True)
class _Verdict:
    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


def rejected(
    reason: str, message: str, previous: Mapping[str, Any], generation: int, now: datetime
) -> dict[str, Any]:
    """The status of a resource whose spec cannot be used. What runs goes on, and its numbers stay."""
    verdicts = [_Verdict("Accepted", "False", reason, message), _Verdict("Ready", "False", reason, message)]
    return {
        "observedGeneration": generation,
        "conditions": _dump(_conditions(verdicts, previous, generation, now, keep_others=True)),
    }


def summarise(
    plan: Plan,
    observed: Observed | None,
    apply_error: str,
    previous: Mapping[str, Any],
    generation: int,
    now: datetime,
) -> dict[str, Any]:
    """The status of a resource that was accepted.

    Args:
        plan: What is to be.
        observed: What is; None where nothing was seen yet.
        apply_error: Why the children could not be written; empty where they were.
        previous: The status so far, for the times of transition.
        generation: The resource's `metadata.generation`.
        now: The time, with its zone.
    """
    verdicts = [
        _Verdict("Accepted", "True", "Valid", "the spec is valid"),
        *_about_pods(observed, apply_error),
    ]
    verdicts.append(_ready(verdicts))
    host = f"{plan.names.service}.{plan.namespace}.svc"
    return Status(
        observed_generation=generation,
        replicas=observed.replicas if observed else 0,
        ready_replicas=observed.ready if observed else 0,
        updated_replicas=observed.updated if observed else 0,
        selector=",".join(f"{key}={value}" for key, value in selector_labels(plan).items()),
        image=plan.image,
        endpoint=f"http://{host}:{plan.spec.engine.port}/v1",
        admin_endpoint=f"http://{host}:{plan.spec.admin.port}",
        budget=BudgetStatus(
            gpus=plan.budget.gpus,
            memory=in_mebibytes(plan.budget.engine_request + plan.budget.admin_request),
            shared_memory=in_mebibytes(plan.budget.shm),
            cpu_tier_per_rank=in_mebibytes(plan.budget.tier_per_rank),
        ),
        conditions=_conditions(verdicts, previous, generation, now),
    ).model_dump(by_alias=True, mode="json")


def _about_pods(observed: Observed | None, apply_error: str) -> list[_Verdict]:
    if observed is None:
        reason, message = (
            (APPLY_FAILED, apply_error) if apply_error else ("NotObserved", "nothing was seen yet")
        )
        unknown = [_Verdict(kind, "Unknown", reason, message) for kind in ("Available", "CacheTiersReady")]
        failing: Literal["True", "Unknown"] = "True" if apply_error else "Unknown"
        return [
            _Verdict("Progressing", "False" if apply_error else "Unknown", reason, message),
            *unknown,
            _Verdict("Degraded", failing, reason, message),
        ]
    count = f"{observed.ready} of {observed.wanted} pods are ready, {observed.updated} of the newest template"
    if observed.is_complete:
        progressing = _Verdict("Progressing", "False", "RolloutComplete", count)
    elif observed.stuck:
        progressing = _Verdict("Progressing", "False", "RolloutStuck", observed.stuck)
    else:
        progressing = _Verdict("Progressing", "True", "RolloutUnderWay", count)
    if observed.ready:
        available = _Verdict("Available", "True", "PodsReady", count)
        # A pod's readiness asks its admin container, which asks the connector of every rank.
        tiers = _Verdict("CacheTiersReady", "True", "PodsReady", "every ready pod has its cache")
    else:
        available = _Verdict("Available", "False", "NoReadyPods", count)
        tiers = _Verdict("CacheTiersReady", "Unknown", "NoReadyPods", count)
    trouble = observed.failure or observed.stuck
    if trouble:
        degraded = _Verdict("Degraded", "True", "PodsFail", trouble)
    else:
        degraded = _Verdict("Degraded", "False", "AsExpected", "no trouble was seen")
    return [progressing, available, tiers, degraded]


def _ready(verdicts: Sequence[_Verdict]) -> _Verdict:
    """Ready with the reason of the first condition that stands in its way."""
    by_type = {verdict.type: verdict for verdict in verdicts}
    wanted = {
        "Accepted": "True",
        "Degraded": "False",
        "Available": "True",
        "Progressing": "False",
        "CacheTiersReady": "True",
    }
    for kind, status in wanted.items():
        if by_type[kind].status != status:
            return _Verdict("Ready", "False", by_type[kind].reason, by_type[kind].message)
    return _Verdict("Ready", "True", "AllPodsReady", by_type["Progressing"].message)


def _conditions(
    verdicts: Sequence[_Verdict],
    previous: Mapping[str, Any],
    generation: int,
    now: datetime,
    keep_others: bool = False,
) -> tuple[Condition, ...]:
    """Conditions whose time of transition moves only when their status does."""
    before = {entry["type"]: entry for entry in previous.get("conditions") or ()}
    stamp = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    conditions = []
    for verdict in verdicts:
        last = before.pop(verdict.type, {})
        since = last["lastTransitionTime"] if last.get("status") == verdict.status else stamp
        conditions.append(
            Condition(
                type=verdict.type,
                status=verdict.status,
                reason=verdict.reason,
                message=verdict.message[:_MESSAGE_LENGTH],
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    if keep_others:
        conditions += [Condition.model_validate(entry) for entry in before.values()]
    return tuple(conditions)


def _dump(conditions: Sequence[Condition]) -> list[dict[str, Any]]:
    return [condition.model_dump(by_alias=True, mode="json") for condition in conditions]
