# SPDX-License-Identifier: Apache-2.0
"""The runner of the steps: order, failures, what is always done, and the page that comes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import inside, kubectl
from tests.e2e.appliance import NotHereError, World
from tests.e2e.report import Outcome, StepReport, load, to_markdown
from tests.e2e.steps import STEPS


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """There is no cluster: what would be asked of it is noted."""
    asked: list[Path] = []
    monkeypatch.setattr(kubectl, "diagnostics", lambda namespaces, file: asked.append(file))
    return asked


def step(outcome: str | Exception) -> Callable[[World], str]:
    def work(_: World) -> str:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return work


def test_after_a_failure_only_what_cleans_up_is_done(tmp_path: Path, no_cluster: list[Path]) -> None:
    steps = (
        ("one", step("seen"), False),
        ("two", step(NotHereError("no valkey")), False),
        ("three", step(kubectl.StepError("no hit")), False),
        ("four", step("never"), False),
        ("five", step("cleaned"), True),
    )
    file = tmp_path / "reports.json"
    reports = inside.run(steps, World(), file)
    assert [report.outcome for report in reports] == ["passed", "skipped", "failed", "skipped", "passed"]
    assert reports[1].detail == "no valkey"
    assert "no hit" in reports[2].detail
    assert "three" in reports[3].detail
    assert load(file) == reports
    assert no_cluster == [tmp_path / "diagnostics.txt"]


def test_all_steps_have_names_of_their_own_and_the_last_ones_clean_up() -> None:
    names = [name for name, _, _ in STEPS]
    assert len(set(names)) == len(names)
    assert [always for _, _, always in STEPS][-2:] == [True, True]


def test_the_page_has_a_row_a_step_and_cells_stay_cells() -> None:
    reports = [
        StepReport("a hit", Outcome.PASSED, 1.25, "1024 of 1200 tokens | quick\nand right"),
        StepReport("an upgrade", Outcome.SKIPPED, 0.0, "no image"),
    ]
    page = to_markdown(reports, "2 cores")
    rows = [line for line in page.splitlines() if line.startswith("| a")]
    assert rows == [
        "| a hit | passed | 1.2 | 1024 of 1200 tokens \\| quick and right |",
        "| an upgrade | skipped | 0.0 | no image |",
    ]
    assert "2 cores" in page


def test_no_reports_are_read_where_no_step_was_done(tmp_path: Path) -> None:
    assert load(tmp_path / "nosuch.json") == []
