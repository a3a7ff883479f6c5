# SPDX-License-Identifier: Apache-2.0
"""From the answers of pods to the few rounded numbers in a status, and to what they say about tiers. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvcache_operator.models import CacheStatus, TierStatus
from kvcache_operator.observe import CONNECTOR_MISMATCH
from kvcache_operator.pods import PodStats, TierAnswer

IDLE = "-"
REMOTE_UNREACHABLE = "RemoteUnreachable"
DISK_NOT_MOUNTED = "DiskNotMounted"
PINNING_UNAVAILABLE = "PinnedMemoryUnavailable"
TIER_UNAVAILABLE = "TierUnavailable"
CONNECTOR_NOT_READY = "ConnectorNotReady"

_SERVING = ("Ready", "Pinning")
"""States of a tier that serves; `Pinning` still locks its memory meanwhile."""
_MISMATCH = re.compile(r"not tested with|connector interface|do(es)? not fit", re.IGNORECASE)
_MIB, _GIB, _TIB = 1 << 20, 1 << 30, 1 << 40
_DIGITS = 3
_MAX_FIELDS = 64


def cache_status(answers: Sequence[PodStats], previous: Mapping[str, Any], stamp: str) -> dict[str, Any]:
    """The status `cache` of all pods together. The time is the old one as long as the numbers are.

    Args:
        answers: of all pods that gave one; not empty.
        previous: the status `cache` so far.
        stamp: the time now.
    """
    windows = [answer.stats.window for answer in answers]
    wanted = sum(window.prompt_tokens - window.hit_gpu_tokens for window in windows)
    hits = sum(window.hit_cache_tokens for window in windows)
    by_name: dict[str, list[TierAnswer]] = {}
    for answer in answers:
        for tier in answer.stats.tiers:
            by_name.setdefault(tier.name, []).append(tier)
    status = CacheStatus(
        hit_rate=f"{100 * hits / wanted:.1f}" if wanted > 0 else IDLE,
        lookup_tokens=rounded(wanted),
        hit_tokens=rounded(hits),
        updated_at=stamp,
        tiers=tuple(
            TierStatus(
                name=name,
                state=next((tier.state for tier in tiers if tier.state not in _SERVING), tiers[0].state),
                capacity=size_text(sum(tier.capacity_bytes for tier in tiers)),
                used=size_text(sum(tier.used_bytes for tier in tiers)),
                hit_tokens=rounded(sum(tier.hit_tokens for tier in tiers)),
            )
            for name, tiers in sorted(by_name.items())
        ),
    ).model_dump(by_alias=True, mode="json")
    same = {**status, "updatedAt": previous.get("updatedAt")} == dict(previous)
    return dict(previous) if same else status


def tier_trouble(answers: Sequence[PodStats], configured: Sequence[str]) -> tuple[str, str] | None:
    """Reason and message of the first tier that some pod has not, None where all have all."""
    for answer in answers:
        there = {tier.name: tier for tier in answer.stats.tiers}
        for name in configured:
            tier = there.get(name)
            if tier is None:
                if answer.stats.ranks:
                    return _reason(name, ""), f"pod {answer.pod} has no tier {name}"
            elif tier.state not in _SERVING:
                detail = f": {tier.detail}" if tier.detail else ""
                return _reason(name, tier.state), f"tier {name} of pod {answer.pod} is {tier.state}{detail}"
    return None


def connector_trouble(answers: Sequence[PodStats]) -> tuple[str, str] | None:
    """Reason and message of the first pod whose connector does not work, None where all do."""
    for answer in answers:
        scheduler = answer.stats.scheduler
        processes = {f"rank {rank.rank}": (rank.ready, rank.reason) for rank in answer.stats.ranks}
        if scheduler is not None:
            processes = {"the scheduler": (scheduler.ready, scheduler.reason), **processes}
        for name, (ready, text) in processes.items():
            if not ready and text:
                reason = CONNECTOR_MISMATCH if _MISMATCH.search(text) else CONNECTOR_NOT_READY
                return reason, f"{name} of pod {answer.pod}: {text}"
    return None


def pending_restart(answers: Sequence[PodStats]) -> tuple[str, ...]:
    """Fields of the configuration that some process of a pod does not run before its next start."""
    fields: set[str] = set()
    for answer in answers:
        scheduler = answer.stats.scheduler
        fields.update(*(rank.config_restart for rank in answer.stats.ranks))
        fields.update(scheduler.config_restart if scheduler is not None else ())
    return tuple(sorted(fields))[:_MAX_FIELDS]


def config_trouble(answers: Sequence[PodStats]) -> str:
    """Why the first of the pods that refuse their configuration does; empty where none does."""
    refused = (f"pod {answer.pod}: {answer.config_refusal}" for answer in answers if answer.config_refusal)
    return next(refused, "")


def _reason(tier: str, state: str) -> str:
    if tier == "cpu":
        return PINNING_UNAVAILABLE if "pin" in state.lower() else state or TIER_UNAVAILABLE
    if tier == "disk":
        return DISK_NOT_MOUNTED if state in ("", "DiskUnavailable") else state
    if tier == "remote":
        return state or REMOTE_UNREACHABLE
    return state or TIER_UNAVAILABLE


def rounded(number: int) -> int:
    """`number` with three digits, so that a busy cache does not change the resource all the time."""
    excess = len(str(abs(number))) - _DIGITS
    return round(number, -excess) if excess > 0 else number


def size_text(size: int) -> str:
    """Bytes as a quantity with one digit behind the point at most."""
    for unit, amount in (("Ti", _TIB), ("Gi", _GIB)):
        if size >= amount:
            return f"{size / amount:.1f}".removesuffix(".0") + unit
    return f"{round(size / _MIB)}Mi"
