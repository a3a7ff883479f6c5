# SPDX-License-Identifier: Apache-2.0
"""Tiers below host memory that answer late, badly or not at all, and the time that passes meanwhile."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcache.config.tiers import WriteMode
from kvcache.storage.lane import Lane
from tests.storage.doubles import Call, DoubleTier

DEADLINE_S = 0.3


@dataclass
class SlowTiers:
    """Of all ranks."""

    now: float = 0.0
    """Seconds."""
    tiers: list[DoubleTier] = field(default_factory=list)
    soon: deque[Callable[[], None]] = field(default_factory=deque)
    """What the background has to do."""
    _hanging: dict[Call, None] = field(default_factory=dict)
    _of_rank: dict[int, list[DoubleTier]] = field(default_factory=dict)
    """By the rank that names the objects: ranks that hold the same bytes meet in the same tiers."""

    def clock(self) -> float:
        return self.now

    def lanes(self, below: tuple[tuple[WriteMode, bool], ...], named_by: int) -> list[Lane]:
        """Of one more rank, whose objects the rank `named_by` names."""
        if named_by not in self._of_rank:
            names = ("disk", "remote")
            made = [DoubleTier(names[at], indexed=indexed) for at, (_, indexed) in enumerate(below)]
            self._of_rank[named_by] = made
            self.tiers.extend(made)
        return [
            Lane(index, tier, write, deadline_s=DEADLINE_S, clock=self.clock)
            for index, (tier, (write, _)) in enumerate(zip(self._of_rank[named_by], below, strict=True))
        ]

    def advance(self, dice: random.Random, fails: Callable[[], bool], hangs: Callable[[], bool]) -> None:
        """Some time passes: some of what is to be done is done, some calls are answered."""
        self.now += dice.choice((0.0, 0.001, 0.05, 0.4))
        for _ in range(dice.choice((0, 1, 4))):
            if self.soon:
                self.soon.popleft()()
        if self._hanging and dice.random() < 0.1:
            del self._hanging[dice.choice(list(self._hanging))]  # it will be answered after all
        for _ in range(dice.choice((0, 1, 1, 3))):
            calls = [(tier, call) for tier in self.tiers for call in tier.calls if call not in self._hanging]
            if not calls:
                return
            tier, call = dice.choice(calls)
            if hangs():
                self._hanging[call] = None
            else:
                tier.answer_call(call, well=not fails())

    def finish(self) -> None:
        """All is answered and done."""
        while self.soon or any(tier.calls for tier in self.tiers):
            while self.soon:
                self.soon.popleft()()
            for tier in self.tiers:
                tier.answer_all()
