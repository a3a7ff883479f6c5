# SPDX-License-Identifier: Apache-2.0
"""Events for `kubectl describe`: one for each transition, none for a repetition. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from kvcache_operator import API_VERSION, FIELD_MANAGER, KIND
from kvcache_operator.render import Manifest
from kvcache_operator.status import stamp

_MESSAGE_LENGTH = 1000


@dataclass(frozen=True)
class Event:
    """Something that happened to a resource."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def transitions(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Event]:
    """What happened between two statuses."""
    old, new = _conditions(before), _conditions(after)
    found: list[Event] = []

    def became(kind: str, status: str) -> bool:
        return new.get(kind, ("", "", ""))[0] == status and old.get(kind, ("", "", ""))[0] != status

    def message(kind: str) -> str:
        return new[kind][2]

    if became("Accepted", "False") or (
        new.get("Accepted", ("",))[0] == "False"
        and old.get("Accepted") not in (None, new["Accepted"])
        and before.get("observedGeneration") != after.get("observedGeneration")
    ):
        found.append(Event("Warning", "ConfigRejected", message("Accepted")))
    if became("Accepted", "True"):
        found.append(Event("Normal", "Applied", message("Accepted")))
    if became("Progressing", "True"):
        found.append(Event("Normal", "RolloutStarted", message("Progressing")))
    if (
        old.get("Progressing", ("",))[0] == "True"
        and new.get("Progressing", ("", ""))[1] == "RolloutComplete"
    ):
        found.append(Event("Normal", "RolloutFinished", message("Progressing")))
    if became("CacheTiersReady", "False"):
        found.append(Event("Warning", "TierUnavailable", message("CacheTiersReady")))
    if old.get("CacheTiersReady", ("",))[0] == "False" and new.get("CacheTiersReady", ("",))[0] == "True":
        found.append(Event("Normal", "TierRecovered", message("CacheTiersReady")))
    degraded = new.get("Degraded", ("", "", ""))
    if degraded[0] == "True" and old.get("Degraded", ("", "", ""))[:2] != degraded[:2]:
        found.append(Event("Warning", degraded[1], degraded[2]))
    if became("Suspended", "True"):
        found.append(Event("Normal", "Suspended", message("Suspended")))
    if new.get("Suspended", ("", ""))[1] == "NotSuspended" and old.get("Suspended", ("",))[0] == "True":
        found.append(Event("Normal", "Resumed", "spec.suspend is false again"))
    waiting = after.get("pendingRestart") or []
    if set(waiting) - set(before.get("pendingRestart") or ()):
        text = f"pods do not run all of their configuration before their next start: {', '.join(waiting)}"
        found.append(Event("Normal", "RestartNeeded", text))
    return [*found, *_flushes(before, after)]


def _conditions(status: Mapping[str, Any]) -> dict[str, tuple[str, str, str]]:
    return {
        entry["type"]: (entry["status"], entry["reason"], entry["message"])
        for entry in status.get("conditions") or ()
    }


def _flushes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Event]:
    flush = after.get("lastFlush") or {}
    if not flush.get("completedAt") or flush == before.get("lastFlush"):
        return []
    tiers = ", ".join(flush["tiers"])
    if flush["complete"]:
        return [Event("Normal", "FlushCompleted", f"flush {flush['requestID']} emptied {tiers} of all pods")]
    return [Event("Warning", "FlushFailed", f"flush {flush['requestID']}: {flush.get('message', '')}")]


def manifest(event: Event, resource: Mapping[str, Any], now: datetime) -> Manifest:
    """The object of the core API. Its name follows from its content and time, so that none is made twice."""
    meta, at = resource["metadata"], stamp(now)
    content = f"{meta['uid']} {event.reason} {event.message} {at}"
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{meta['name']}.{digest}", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
            "resourceVersion": meta.get("resourceVersion", ""),
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:_MESSAGE_LENGTH],
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
