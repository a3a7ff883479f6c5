# SPDX-License-Identifier: Apache-2.0
"""What a user can do wrong, as sentences that name the field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INVALID_SPEC = "InvalidSpec"
MEMORY_BUDGET_EXCEEDED = "MemoryBudgetExceeded"
CLAIM_NOT_SHAREABLE = "ClaimNotShareable"
"""Reasons of the condition Accepted."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a resource."""

    path: str
    """Dotted path of the field as the user writes it, e.g. `spec.cache.tiers.cpu.capacity`; may be empty."""
    text: str
    """What was read, what is wrong, what to do."""
    line: int | None = None
    """Line of the YAML file, from 1, where there is one."""
    reason: str = INVALID_SPEC
    """Of the condition that tells of it."""

    def __str__(self) -> str:
        place = f" (line {self.line})" if self.line is not None else ""
        return f"{self.path}: {self.text}{place}" if self.path else f"{self.text}{place}"


class ResourceError(ValueError):
    """A KVCache resource cannot be used. `str()` gives its problems, separated by semicolons."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = tuple(problems)

    @property
    def reason(self) -> str:
        """That of its first problem."""
        return self.problems[0].reason if self.problems else INVALID_SPEC

    @classmethod
    def at(cls, path: str, text: str) -> ResourceError:
        """The error of one problem."""
        return cls([Problem(path, text)])
