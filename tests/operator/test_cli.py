# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kvcache_operator.__main__ import main
from tests.operator.resources import ROOT, SAMPLES, SMALLEST, with_value


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, so that no run of somebody else is seen."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_crd_and_render_print_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd"]) == 0
    assert capsys.readouterr().out == (ROOT / "manifests" / "crd" / "kvcaches.yaml").read_text()
    assert main(["render", "-f", str(SAMPLES[0])]) == 0
    kinds = [entry["kind"] for entry in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds == ["Secret", "ConfigMap", "Service", "Deployment"]


@pytest.mark.parametrize("command", [["render"], ["local", "up"]])
def test_bad_input_is_one_line_and_an_exit_code(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    file = elsewhere / "bad.yaml"
    file.write_text(yaml.safe_dump(with_value(SMALLEST, "spec.cache.chunkToken", 256)))
    assert main([*command, "-f", str(file)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(
        "error: spec.cache.chunkToken: unknown key; did you mean chunkTokens? (line "
    )
    assert output.err.count("\n") == 1
    assert [entry.name for entry in elsewhere.iterdir()] == ["bad.yaml"]


def test_nothing_is_up(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["local", "status"]) == 1
    assert capsys.readouterr().out == "nothing is up\n"
    assert main(["local", "status", "-o", "json"]) == 1
    assert json.loads(capsys.readouterr().out) == []
    assert main(["local", "down"]) == 0
    assert capsys.readouterr().out == "nothing is up\n"
    assert main(["local", "down", "qwen"]) == 0
    assert capsys.readouterr().out == "qwen is not up\n"


def test_a_claim_is_a_name_and_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["local", "up", "-f", "x.yaml", "--claim", "models"])
    assert caught.value.code == 2
    assert "'models' is not NAME=FOLDER" in capsys.readouterr().err


def test_no_cluster_is_told(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(elsewhere / "none"))
    assert main(["run"]) == 1
    assert "error: no cluster to connect to" in capsys.readouterr().err
