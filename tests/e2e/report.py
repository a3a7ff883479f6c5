# SPDX-License-Identifier: Apache-2.0
"""What a run came to: outcomes of steps, as a log for people and as a file between processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path


class Outcome(StrEnum):
    """How a step ended."""

    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class StepReport:
    """One step of a run.

    Attributes:
        seconds: how long it took.
        detail: what was seen, or why it was skipped or failed; a sentence.
    """

    name: str
    outcome: Outcome
    seconds: float
    detail: str

    def __str__(self) -> str:
        first = self.detail.splitlines()[0] if self.detail else ""
        return f"{self.outcome:<8} {self.seconds:6.1f} s  {self.name}{f': {first}' if first else ''}"


def save(reports: Sequence[StepReport], file: Path) -> None:
    """Writes reports for `load`."""
    file.write_text(json.dumps([asdict(report) for report in reports], indent=1))


def load(file: Path) -> list[StepReport]:
    """Reads reports; none where there is no file, since the run ended before its first step."""
    if not file.exists():
        return []
    entries = json.loads(file.read_text())
    return [StepReport(**{**entry, "outcome": Outcome(entry["outcome"])}) for entry in entries]


def to_markdown(reports: Sequence[StepReport], machine: str) -> str:
    """The log of a run as a page of the documentation.

    Args:
        machine: what the run had, in a few words.
    """
    lines = [
        "# The whole appliance on a real cluster",
        "",
        "Written by `make e2e`: etcd, the API server, the controller manager, the scheduler, containerd,",
        "the kubelet and kube-proxy on one machine, the operator as a pod, and real vLLM on the CPU in the",
        "pods of the sample.",
        "",
        f"Machine: {machine}.",
        "",
        "| step | outcome | seconds | what was seen |",
        "|---|---|---:|---|",
    ]
    for report in reports:
        detail = " ".join(report.detail.split()).replace("|", "\\|")
        cells = (report.name, report.outcome, f"{report.seconds:.1f}", detail)
        lines.append(f"| {' | '.join(cells)} |")
    total = sum(report.seconds for report in reports)
    lines += ["", f"All steps together: {total:.0f} seconds.", ""]
    return "\n".join(lines)
