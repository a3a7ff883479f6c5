# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvcache_operator.__main__ import main
from kvcache_operator.errors import ResourceError
from kvcache_operator.models import KVCacheSpec
from kvcache_operator.models.engine import FIELDS_OF_FLAGS
from kvcache_operator.parse import field_paths, parse_resource
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
    assert kinds == [
        *("Secret", "ConfigMap", "Service"),
        *("ConfigMap", "Service", "NetworkPolicy", "Deployment"),
    ]


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


def test_a_reader_that_has_enough_ends_it_quietly() -> None:
    """As `... | head -1` does."""
    program = [sys.executable, "-m", "kvcache_operator", "crd"]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as output:
        ran = subprocess.run(program, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.parametrize(("flag", "field"), FIELDS_OF_FLAGS.items())
def test_a_flag_that_the_operator_sets_is_refused_with_the_field_for_it(flag: str, field: str) -> None:
    with pytest.raises(ResourceError, match=re.escape(f"remove it and set {field}")):
        parse_resource(with_value(SMALLEST, "spec.engine.args", [flag]))
    assert field.removeprefix("spec.") in set(field_paths(KVCacheSpec))


def test_a_flag_without_a_field_is_refused_too() -> None:
    with pytest.raises(ResourceError, match="remove it, there is no field for it"):
        parse_resource(with_value(SMALLEST, "spec.engine.args", ["--ssl-keyfile=key.pem"]))
