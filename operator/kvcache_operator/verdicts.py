# SPDX-License-Identifier: Apache-2.0
"""The conditions of a resource: what holds, and the reason why. Each reason stands in docs/conditions.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvcache_operator.observe import (
    BLOCKED,
    CONNECTOR_MISMATCH,
    HUMAN_NEEDED,
    MODEL_LOADING,
    OOM_KILLED,
    STARTING,
    Observed,
)
from kvcache_operator.plan import Plan, in_mebibytes

Answer = Literal["True", "False", "Unknown"]

TYPES = (
    *("Accepted", "Progressing", "Available", "CacheTiersReady"),
    *("Degraded", "Suspended", "Ready"),
)
"""Every resource has all of them, in this order."""

APPLY_FAILED = "ApplyFailed"
CONFIG_REFUSED = "ConfigRefused"
FLUSH_INCOMPLETE = "FlushIncomplete"
QUOTA_EXCEEDED = "QuotaExceeded"
SECRET_NOT_FOUND = "SecretNotFound"  # noqa: S105
SECRET_INVALID = "SecretInvalid"  # noqa: S105


@dataclass(frozen=True)
class Verdict:
    """One condition."""

    type: str
    status: Answer
    reason: str
    message: str


@dataclass(frozen=True)
class Sight:
    """What was seen of a resource that was accepted."""

    observed: Observed | None = None
    """None where nothing was seen yet."""
    apply_error: str = ""
    """Why the children could not be written; empty where they were."""
    secret_trouble: tuple[str, str] | None = None
    """Reason and message of a Secret that is absent or empty."""
    tier_trouble: tuple[str, str] | None = None
    """Reason and message of a tier that a ready pod has not."""
    connector_trouble: tuple[str, str] | None = None
    """Reason and message of a connector that does not work, as a pod tells."""
    config_trouble: str = ""
    """Why a pod goes on with an older configuration."""
    flush_trouble: str = ""
    """Why the last flush is not complete."""


def verdicts(plan: Plan, sight: Sight) -> list[Verdict]:
    """All conditions of a resource that was accepted, in the order of `TYPES`."""
    advice = "".join(f"; {text}" for text in plan.warnings)
    accepted = Verdict("Accepted", "True", "Valid", f"the spec is valid{advice}")
    observed = sight.observed
    if observed is None:
        return _unseen(accepted, plan, sight)
    count = f"{observed.ready} of {observed.wanted} pods are ready, {observed.updated} of the newest template"
    found = [
        accepted,
        _progressing(plan, observed, count),
        _available(observed, count),
        _tiers(observed, sight, count),
        _degraded(plan, observed, sight),
        _suspended(plan, observed),
    ]
    return [*found, _ready(found, count)]


def _unseen(accepted: Verdict, plan: Plan, sight: Sight) -> list[Verdict]:
    failed = bool(sight.apply_error)
    reason, message = (APPLY_FAILED, sight.apply_error) if failed else ("NotObserved", "nothing was seen yet")
    return [
        accepted,
        Verdict("Progressing", "False" if failed else "Unknown", reason, message),
        Verdict("Available", "Unknown", reason, message),
        Verdict("CacheTiersReady", "Unknown", reason, message),
        Verdict("Degraded", "True" if failed else "Unknown", reason, message),
        Verdict("Suspended", "Unknown" if plan.spec.suspend else "False", "NotObserved", message),
        Verdict("Ready", "False", reason, message),
    ]


def _progressing(plan: Plan, observed: Observed, count: str) -> Verdict:
    def verdict(status: Answer, reason: str, message: str) -> Verdict:
        return Verdict("Progressing", status, reason, message)

    if observed.is_complete:
        return verdict("False", "RolloutComplete", count)
    if plan.spec.suspend:
        return verdict("True", "Suspending", f"{observed.replicas} pods are still there")
    if observed.failure:
        reason = QUOTA_EXCEEDED if "quota" in observed.failure.lower() else "PodsFail"
        return verdict("False", reason, observed.failure)
    reasons = {pod.reason: pod.message for pod in reversed(observed.pods) if not pod.is_going}
    for reason in BLOCKED:
        if reason in reasons:
            return verdict("False", reason, reasons[reason])
    if observed.stuck:
        return verdict("False", "RolloutStuck", observed.stuck)
    for reason in (MODEL_LOADING, STARTING):
        if reason in reasons:
            return verdict("True", reason, f"{count}: {reasons[reason]}")
    return verdict("True", "RolloutUnderWay", count)


def _available(observed: Observed, count: str) -> Verdict:
    if observed.ready:
        return Verdict("Available", "True", "PodsReady", count)
    return Verdict("Available", "False", "ScaledToZero" if observed.wanted == 0 else "NoReadyPods", count)


def _tiers(observed: Observed, sight: Sight, count: str) -> Verdict:
    if sight.connector_trouble is not None:
        return Verdict("CacheTiersReady", "False", *sight.connector_trouble)
    if sight.tier_trouble is not None:
        return Verdict("CacheTiersReady", "False", *sight.tier_trouble)
    if observed.ready:
        # A pod's readiness asks its admin container, which asks the connector of every rank.
        return Verdict("CacheTiersReady", "True", "PodsReady", "every ready pod has its cache")
    return Verdict("CacheTiersReady", "Unknown", "NoReadyPods", count)


def _degraded(plan: Plan, observed: Observed, sight: Sight) -> Verdict:
    def verdict(reason: str, message: str) -> Verdict:
        return Verdict("Degraded", "True", reason, message)

    if sight.apply_error:
        return verdict(APPLY_FAILED, sight.apply_error)
    if sight.secret_trouble is not None:
        return verdict(*sight.secret_trouble)
    reasons = {pod.reason: f"pod {pod.name}: {pod.message}" for pod in reversed(observed.pods)}
    if sight.connector_trouble is not None and sight.connector_trouble[0] == CONNECTOR_MISMATCH:
        reasons[CONNECTOR_MISMATCH] = sight.connector_trouble[1]
    if OOM_KILLED in reasons:
        budget = plan.budget
        tiers = in_mebibytes(budget.ranks * budget.tier_per_rank)
        computed = in_mebibytes(budget.computed)
        reasons[OOM_KILLED] += f"; of the {computed} that vLLM was reckoned to need, {tiers} are the cpu tier"
    for reason in HUMAN_NEEDED:
        if reason in reasons:
            return verdict(reason, reasons[reason])
    if observed.failure or observed.stuck:
        return verdict("PodsFail", observed.failure or observed.stuck)
    if sight.config_trouble:
        return verdict(CONFIG_REFUSED, sight.config_trouble)
    if sight.flush_trouble:
        return verdict(FLUSH_INCOMPLETE, sight.flush_trouble)
    return Verdict("Degraded", "False", "AsExpected", "no trouble was seen")


def _suspended(plan: Plan, observed: Observed) -> Verdict:
    if not plan.spec.suspend:
        return Verdict("Suspended", "False", "NotSuspended", "spec.suspend is false")
    left = len(observed.pods) or observed.replicas
    if left:
        return Verdict("Suspended", "False", "Suspending", f"{left} pods are still there")
    return Verdict("Suspended", "True", "Suspended", "all pods have ended; claims and settings are kept")


def _ready(found: Sequence[Verdict], count: str) -> Verdict:
    """Ready with the most telling reason of what stands in its way."""
    by_type = {verdict.type: verdict for verdict in found}
    if by_type["Suspended"].reason != "NotSuspended":
        return Verdict("Ready", "False", "Suspended", by_type["Suspended"].message)
    wanted: dict[str, Answer] = {
        "Accepted": "True",
        "Progressing": "False",
        "Available": "True",
        "CacheTiersReady": "True",
    }
    missing = [by_type[kind] for kind, status in wanted.items() if by_type[kind].status != status]
    blocked = by_type["Progressing"].reason not in ("RolloutComplete",)
    if not missing and not blocked:
        return Verdict("Ready", "True", "AllPodsReady", count)
    degraded = by_type["Degraded"]
    tells = degraded.status == "True" and degraded.reason != FLUSH_INCOMPLETE
    if by_type["Accepted"].status == "True" and tells:
        return Verdict("Ready", "False", degraded.reason, degraded.message)
    first = missing[0] if missing else by_type["Progressing"]
    if first.type == "Available" and blocked:
        first = by_type["Progressing"]
    return Verdict("Ready", "False", first.reason, first.message)
