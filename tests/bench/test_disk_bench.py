# SPDX-License-Identifier: Apache-2.0
"""The disk bench compares like with like, and cleans up. No judgement by the clock."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvcache.bench import __main__ as command
from kvcache.bench.disk import disk_results
from kvcache.storage.tiers.disk.engine import uring_unavailable
from kvcache.storage.tiers.disk.names import file_bytes


@pytest.mark.parametrize("tool", ["fio", "loop"])
def test_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    if tool == "fio" and shutil.which("fio") is None:
        pytest.skip("there is no fio here")
    if tool == "loop":
        if uring_unavailable():
            pytest.skip("there is no io_uring here")
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        monkeypatch.setattr("kvcache.bench.disk.uring_unavailable", lambda: "not in this test")
    found = list(disk_results(tmp_path, total_bytes=2 << 20, rounds=2, sizes=(256 << 10, 2 << 20)))
    references = {"fio": {("write", "fio"), ("write", "fio-dsync"), ("read", "fio")}}.get(
        tool, {("write", "loop"), ("read", "loop")}
    )
    for size, objects in ((256 << 10, 8), (2 << 20, 1)):
        mine = [result for result in found if result.object_bytes == file_bytes(size)]
        assert {(result.what, result.reference) for result in mine} == references
        for result in mine:
            assert result.objects == objects
            assert 1 <= result.depth <= objects
            assert 0 < result.low <= result.ratio <= result.high
            assert min(result.rate, result.reference_rate) > 0
    assert list(tmp_path.iterdir()) == []


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("fio") is None and uring_unavailable():
        pytest.skip("there is nothing to compare with here")
    file = tmp_path / "figures.json"
    place = tmp_path / "place"
    place.mkdir()
    arguments = ["disk", "--directory", str(place), "--mib", "2", "--rounds", "1", "--object-mib", "1"]
    assert command.main([*arguments, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["disk"]
    assert {row["what"] for row in rows} == {"read", "write"}
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--directory", "/nowhere/at/all"], "/nowhere/at/all is no folder"),
        (["--rounds", "0"], "must be above 0"),
        (["--mib", str(1 << 40)], "bytes free, and"),
    ],
)
def test_what_cannot_be_is_named(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["disk", *arguments]) == 1
    assert problem in capsys.readouterr().err


def test_the_index_is_opened_on_all_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "index.json"
    words = ["index", "--directory", str(tmp_path), "--objects", "1500", "--rounds", "2", "--json", str(file)]
    assert command.main(words) == 0
    rows = json.loads(file.read_text())["index"]
    assert [row["objects"] for row in rows] == [1500, 1500]
    assert all(0 < row["open_s"] <= row["usable_s"] <= row["all_s"] for row in rows)
    assert "usable_s" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"], "what was written is gone"
