# SPDX-License-Identifier: Apache-2.0
"""What the documents promise about `make` and `.ci/run` is there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from demo import report
from kvcache_operator.parse import parse_file

ROOT = Path(__file__).resolve().parents[2]
PROMISED = {"help", "setup", "lint", "format", "build", "test", "demo", "model", "clean"}


def _makefile_targets() -> set[str]:
    found = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return set(found[1].split())


def _make(*arguments: str) -> str:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_help_documents_each_target() -> None:
    documented = dict(re.findall(r"^  make (\S+) +(\S.*)$", _make("help"), re.MULTILINE))
    assert set(documented) == _makefile_targets() >= PROMISED


@pytest.mark.parametrize("target", sorted(_makefile_targets()))
def test_targets_resolve(target: str) -> None:
    assert _make("--dry-run", target)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documents_name_only_targets_that_exist(document: str) -> None:
    named = set(re.findall(r"\bmake ([a-z]+)\b", _code(ROOT / document)))
    assert named
    assert named <= _makefile_targets()


def _code(document: Path) -> str:
    """All that the Markdown sets as code, in blocks or within a line."""
    pattern = re.compile(r"^```\w*\n(.*?)^```|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
    return "\n".join(match[1] or match[2] for match in pattern.finditer(document.read_text()))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documents_link_to_files_that_exist(document: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_the_resource_in_the_readme_is_one(tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block)
        parse_file(file)


def test_the_readme_shows_what_the_demo_prints() -> None:
    shown = re.search(r"^```\n(  prompt .*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    printed = report.table(report.Result(3101, 3072, 5.8218, 0.1298, True, 3072, 0.2172))
    assert re.sub(r"\d", "#", shown[1]).splitlines() == re.sub(r"\d", "#", printed).splitlines()


@pytest.mark.parametrize("script", [".ci/run", ".ci/prerequisites"])
def test_scripts_are_executable_bash(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_prerequisites_name_what_an_old_python_lacks(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text(
        "#!/bin/sh\n"
        'case "$2" in *version_info*) exit 1;; *sysconfig*) exec python3 "$@";; esac\n'
        '[ "$1" = -V ] && echo Python 3.9.2\n'
        "exit 0\n"
    )
    old.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(old)}
    done = subprocess.run(
        [ROOT / ".ci" / "prerequisites"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {old} is Python 3.9.2, and 3.11 or newer is needed")


def _sources() -> list[Path]:
    folders = (".ci", "csrc", "demo", "image", "kvcache", "operator", "tests")
    suffixes = {"", ".py", ".pyi", ".cpp", ".cu", ".cuh", ".h"}
    below = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    top = [ROOT / name for name in ("CMakeLists.txt", "Makefile", "pyproject.toml")]
    return [*top, *(path for path in below if path.suffix in suffixes)]


def test_each_source_names_its_licence_first() -> None:
    lacking = []
    for path in _sources():
        lines = path.read_text().splitlines()
        first = lines[1] if lines and lines[0].startswith("#!") else "".join(lines[:1])
        if "SPDX-License-Identifier: Apache-2.0" not in first:
            lacking.append(str(path.relative_to(ROOT)))
    assert lacking == []
