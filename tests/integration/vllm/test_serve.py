# SPDX-License-Identifier: Apache-2.0
"""The images' entry point: vLLM starts in any case, with the cache where that can work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache.integration.vllm.serve import CONNECTOR, without_cache

OURS = json.dumps({"kv_connector": "LMCacheConnectorV1Dynamic", "kv_connector_module_path": CONNECTOR})
OTHERS = json.dumps({"kv_connector": "NixlConnector"})


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["--model", "m", "--kv-transfer-config", OURS, "--port", "1"], ["--model", "m", "--port", "1"]),
        (["--kv-transfer-config=" + OURS, "--port", "1"], ["--port", "1"]),
        (["--kv_transfer_config", OURS], []),
        (["--kv-transfer-config", OTHERS, "--port", "1"], ["--kv-transfer-config", OTHERS, "--port", "1"]),
        (["--kv-transfer-config"], ["--kv-transfer-config"]),
        (["--model", "m"], ["--model", "m"]),
    ],
)
def test_only_the_flag_of_our_connector_is_taken_away(arguments: list[str], kept: list[str]) -> None:
    assert without_cache(arguments) == kept


def test_a_native_module_that_does_not_load_leaves_vllm_without_a_cache(tmp_path: Path) -> None:
    """vLLM is a program here that says with which arguments it was started; the broken module is real."""
    server = tmp_path / "vllm" / "entrypoints" / "openai"
    server.mkdir(parents=True)
    for folder in (server, *server.parents[:2]):
        (folder / "__init__.py").touch()
    (server / "api_server.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['kvcache._native'] = None\n")
    command = [
        sys.executable,
        "-m",
        "kvcache.integration.vllm.serve",
        "--port",
        "1",
        "--kv-transfer-config",
        OURS,
    ]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["--port", "1"]
    assert "kvcache: off, since its native module does not load" in done.stderr
    assert "vLLM serves on without it" in done.stderr
