# SPDX-License-Identifier: Apache-2.0
"""Flushes on demand: what an annotation asks for, and what came of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache_operator import GROUP
from kvcache_operator.models import FlushStatus
from kvcache_operator.plan import Plan
from kvcache_operator.pods import FlushResult

FLUSH_ANNOTATION = f"{GROUP}/flush-requested-at"
"""Any new value has all pods drop what their tiers hold."""
TIERS_ANNOTATION = f"{GROUP}/flush-tiers"
"""Tiers, separated by commas; without it all that the resource has, vLLM's own included."""
GPU_TIER = "gpu"
_MESSAGE_LENGTH = 1024
_ID_LENGTH = 256
_MAX_PODS = 64
_MAX_TIERS = 16


@dataclass(frozen=True)
class Request:
    """A flush that was asked for."""

    request_id: str
    tiers: tuple[str, ...]
    unknown: tuple[str, ...]
    """Tiers that the resource has not."""


def requested(annotations: Mapping[str, str], status: Mapping[str, Any], plan: Plan) -> Request | None:
    """The flush that the annotations ask for; None where there is none or it is done already."""
    request_id = annotations.get(FLUSH_ANNOTATION, "")[:_ID_LENGTH]
    last = status.get("lastFlush") or {}
    if not request_id or (last.get("requestID") == request_id and last.get("completedAt")):
        return None
    known = (GPU_TIER, *plan.tier_names)
    asked = [tier.strip() for tier in annotations.get(TIERS_ANNOTATION, "").split(",") if tier.strip()]
    tiers = tuple(dict.fromkeys(asked or known))
    return Request(
        request_id,
        tuple(tier for tier in tiers if tier in known),
        tuple(tier for tier in tiers if tier not in known),
    )


def started(request: Request, at: str) -> dict[str, Any]:
    """The status `lastFlush` while it runs."""
    return _status(request, requestedAt=at)


def finished(
    request: Request, requested_at: str, completed_at: str, results: Sequence[FlushResult], plan: Plan
) -> dict[str, Any]:
    """The status `lastFlush` when all pods have answered, or failed to."""
    problems = [f"the resource has no tier {tier}" for tier in request.unknown]
    if not results and plan.replicas != 0:
        problems.append("no pod was there that could be flushed")
    failed = [result for result in results if result.problem]
    problems += [f"{result.pod}: {result.problem}" for result in failed]
    return _status(
        request,
        requestedAt=requested_at,
        completedAt=completed_at,
        complete=not problems,
        message="; ".join(problems)[:_MESSAGE_LENGTH] or None,
        failedPods=[result.pod for result in failed][:_MAX_PODS],
    )


def _status(request: Request, **values: Any) -> dict[str, Any]:
    tiers = [*request.tiers, *request.unknown][:_MAX_TIERS]
    return FlushStatus.model_validate({"requestID": request.request_id, "tiers": tiers, **values}).model_dump(
        by_alias=True, mode="json", exclude_none=True
    )
