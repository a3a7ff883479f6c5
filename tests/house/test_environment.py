# SPDX-License-Identifier: Apache-2.0
"""The set-up script: what is done again and what not, and which torch is taken."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image import environment


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_digests_differ_as_their_parts_do(one: list[bytes], other: list[bytes]) -> None:
    assert (environment.digest(one) == environment.digest(other)) == (one == other)


def test_work_is_done_once_for_a_key(tmp_path: Path) -> None:
    stamp, done = tmp_path / "stamp", list[str]()
    assert environment.once(stamp, "a", lambda: done.append("a"))
    assert not environment.once(stamp, "a", lambda: done.append("again"))
    assert environment.once(stamp, "b", lambda: done.append("b"))
    assert environment.once(stamp, "b", lambda: done.append("forced"), force=True)
    assert done == ["a", "b", "forced"]


def test_failed_work_is_taken_up_again(tmp_path: Path) -> None:
    stamp, done = tmp_path / "stamp", list[str]()
    environment.once(stamp, "a", lambda: None)

    def fail() -> None:
        raise environment.SetupError("no network")

    with pytest.raises(environment.SetupError, match="no network"):
        environment.once(stamp, "b", fail)
    assert environment.once(stamp, "a", lambda: done.append("a")), (
        "the old stamp must not outlive the failure"
    )


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "setup.log"
    monkeypatch.setattr(environment, "LOG", path)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    return path


def test_a_failing_step_shows_its_last_lines(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "import sys; print(*range(40), sep='\\n', flush=True); sys.exit('disk full')"
    with pytest.raises(environment.SetupError, match=r"^unpacking failed; .* setup\.log$"):
        environment.step("unpacking", [sys.executable, "-c", script])
    shown = capsys.readouterr()
    assert shown.out == "==> unpacking\n"
    assert "disk full" in shown.err
    assert "\n15\n" not in shown.err


def test_a_step_reads_no_input_and_says_that_it_lives(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "HEARTBEAT_S", 0.05)
    script = (
        "import sys, time; print('Downloading x', flush=True); time.sleep(1); sys.exit(len(sys.stdin.read()))"
    )
    assert environment.succeeds("fetching", [sys.executable, "-c", script])
    assert "s: Downloading x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("on_index", "named", "taken"),
    [
        (True, None, ["--no-deps torch==2.13.0+cpu"]),
        (True, "named/simple", ["--no-deps torch==2.13.0+cpu"]),
        (
            False,
            "named/simple",
            ["--no-deps torch==2.13.0+cpu", "--no-deps --index-url named/simple torch==2.13.0"],
        ),
        (
            False,
            None,
            ["--no-deps torch==2.13.0+cpu", f"--constraint {environment.LOCK} torch==2.13.0", "triton"],
        ),
    ],
)
def test_the_small_torch_is_preferred(
    on_index: bool,
    named: str | None,
    taken: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []
    installed: list[str | None] = [None]

    def succeeds(title: str, command: Sequence[str | Path]) -> bool:
        line = " ".join(str(part) for part in command)
        asked.append(line.partition("--progress-bar off ")[2] or line.partition("uninstall --yes ")[2])
        small = asked[-1].endswith("+cpu")
        if small and not on_index:
            return False
        if "torch" in asked[-1]:
            installed[0] = "2.13.0+cpu" if small or "--index-url" in asked[-1] else "2.13.0+cu130"
        return True

    monkeypatch.setattr(environment, "succeeds", succeeds)
    monkeypatch.setattr(environment, "installed_torch", lambda: installed[0])
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    if named is not None:
        monkeypatch.setenv("TORCH_INDEX_URL", named)
    environment.install_torch()
    assert asked == taken
    assert f"torch {installed[0]}" in capsys.readouterr().out

    environment.install_torch()
    assert asked == taken, "a torch that is there already is kept"
