# SPDX-License-Identifier: Apache-2.0
"""Runs the steps, in the namespaces of a cluster: `python -m tests.e2e.inside REPORTS.json`."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.e2e import kubectl
from tests.e2e.appliance import NAMESPACE, OPERATOR_NAMESPACE, NotHereError, World
from tests.e2e.report import Outcome, StepReport, save
from tests.e2e.steps import STEPS

Step = Callable[[World], str]


def run(steps: Sequence[tuple[str, Step, bool]], world: World, file: Path) -> list[StepReport]:
    """Runs steps in order; after one that fails only those go on that clean up.

    Args:
        steps: name, function, and whether it is done in any case.
        file: where reports are kept, after each step anew.
    """
    reports: list[StepReport] = []
    failed = ""
    for name, step, always in steps:
        started = time.monotonic()
        if failed and not always:
            outcome, detail = Outcome.SKIPPED, f"since the step before failed: {failed}"
        else:
            outcome, detail = _outcome(step, world)
        report = StepReport(name, outcome, time.monotonic() - started, detail)
        reports.append(report)
        sys.stdout.write(f"{report}\n")
        sys.stdout.flush()
        save(reports, file)
        if outcome is Outcome.FAILED and not failed:
            failed = name
            kubectl.diagnostics((NAMESPACE, OPERATOR_NAMESPACE), file.with_name("diagnostics.txt"))
    return reports


def _outcome(step: Step, world: World) -> tuple[Outcome, str]:
    try:
        return Outcome.PASSED, step(world)
    except NotHereError as reason:
        return Outcome.SKIPPED, str(reason)
    except Exception as error:
        traceback.print_exc()
        return Outcome.FAILED, f"{type(error).__name__}: {error}"


def main() -> int:
    file = Path(sys.argv[1])
    world = World()
    try:
        reports = run(STEPS, world, file)
    finally:
        world.close()
    return 1 if any(report.outcome is Outcome.FAILED for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
