# SPDX-License-Identifier: Apache-2.0
"""docs/lessons.md names a test for each symptom, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.operator.resources import ROOT

PAGE = ROOT / "docs" / "lessons.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_CELLS = re.compile(r"^\| (?P<symptom>[^|]+) \| (?P<here>[^|]+) \| (?P<held>[^|]+) \|$")


def rows() -> list[str]:
    """The rows of all tables, without their heads."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [line for line in lines if not line.startswith(("| symptom", "|---"))]


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[2:40].strip())
def test_each_symptom_is_held_by_tests_that_exist(row: str) -> None:
    cells = _CELLS.match(row)
    assert cells is not None
    named = _TEST.findall(cells["held"])
    assert named
    assert _TEST.sub("", cells["held"]).strip(" ,") == ""
    for path, test in named:
        assert test in names_in(path), f"{path} has no {test}"


def test_no_symptom_is_there_twice() -> None:
    symptoms = [row.split("|")[1] for row in rows()]
    assert len(symptoms) == len(set(symptoms)) > 40
