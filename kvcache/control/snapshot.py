# SPDX-License-Identifier: Apache-2.0
"""What all processes of one vLLM reported at one time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcache.control.wire import SCHEDULER, rank_name
from kvcache.stats import RankStats, SchedulerStats


@dataclass(frozen=True)
class Snapshot:
    """Reports of the processes that answered, and why the others did not."""

    taken_at: float
    """Seconds since the epoch."""
    scheduler: SchedulerStats | None = None
    ranks: Mapping[int, RankStats] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    """Name of the process (`scheduler`, `rank0`) to the reason."""

    def not_ready(self) -> dict[str, str]:
        """Every process that is missing or not ready, with the reason; `ranks` if no rank was ever there."""
        reasons = dict(self.missing)
        if self.scheduler is not None and not self.scheduler.ready:
            reasons[SCHEDULER] = self.scheduler.reason or "not ready"
        for rank, stats in self.ranks.items():
            if not stats.ready:
                reasons[rank_name(rank)] = stats.reason or "not ready"
        if not self.ranks and not any(name != SCHEDULER for name in self.missing):
            reasons["ranks"] = "no rank has opened its control socket yet"
        return reasons

    def tier_names(self) -> list[str]:
        """Tiers of all ranks, in the order in which the ranks name them."""
        return list(
            dict.fromkeys(tier.name for _, stats in sorted(self.ranks.items()) for tier in stats.tiers)
        )
