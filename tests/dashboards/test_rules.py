# SPDX-License-Identifier: Apache-2.0
"""Recording and alert rules: promtool's own tests of them, and that none is without one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dashboards.generate import FOLDER
from tests.dashboards.queries import RULES, exported, metrics_in, read, rules

ROOT = FOLDER.parent
TESTS = sorted((FOLDER / "rules" / "tests").glob("*.yaml"))
ALERTS = rules("alert")
RECORDED = rules("record")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)


def promtool(*arguments: str | Path, folder: Path = FOLDER) -> str:
    ran = subprocess.run(["promtool", *map(str, arguments)], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@needs_promtool
def test_rules_are_rules() -> None:
    assert promtool("check", "rules", *RULES).count("SUCCESS") == len(RULES)


@needs_promtool
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_rules_do_what_their_tests_say(path: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", path.name, folder=path.parent)


@needs_promtool
def test_promtool_would_find_a_wrong_rule(tmp_path: Path) -> None:
    for name in ("alerts.yaml", "recording.yaml"):
        text = (FOLDER / "rules" / name).read_text()
        (tmp_path / name).write_text(text.replace("kvcache_process_up == 0", "kvcache_process_up == 1"))
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "alerts.yaml").write_text((FOLDER / "rules" / "tests" / "alerts.yaml").read_text())
    ran = subprocess.run(["promtool", "test", "rules", "alerts.yaml"], cwd=folder, capture_output=True)
    assert ran.returncode != 0


@pytest.mark.parametrize("rule", ALERTS + RECORDED, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_name_only_metrics_that_exist(rule: dict[str, Any]) -> None:
    assert metrics_in(rule["expr"]) <= exported().keys()


def _alert_tests() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in TESTS:
        for test in read(path)["tests"]:
            found += test.get("alert_rule_test", [])
    return found


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_each_alert_is_shown_to_fire(rule: dict[str, Any]) -> None:
    fired = [test for test in _alert_tests() if test["alertname"] == rule["alert"] and test.get("exp_alerts")]
    assert fired


@pytest.mark.parametrize("rule", RECORDED, ids=lambda rule: rule["record"])
def test_each_recorded_series_is_tested(rule: dict[str, Any]) -> None:
    expressions = [
        test["expr"]
        for path in TESTS
        for group in read(path)["tests"]
        for test in group.get("promql_expr_test", [])
    ]
    assert any(rule["record"] in expression for expression in expressions)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_each_alert_leads_to_a_page_that_is_there(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    path, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
    assert anchor in {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
