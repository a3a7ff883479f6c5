# SPDX-License-Identifier: Apache-2.0
"""`kvcache doctor`: from what was read to what to do, and that this machine can be read."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcache.commands.checkup import checkup
from kvcache.commands.facts import Facts, FolderFacts, read_facts
from kvcache.config import LMCacheEngineConfig
from tests.commands.conftest import Run

GIB = 1 << 30
REMOTE = {"valkey": {"endpoints": ["valkey:6379"]}}


def config(**tiers: Any) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.model_validate({"tiers": tiers})


def facts(**changed: Any) -> Facts:
    """A GPU machine on which all is well."""
    well = Facts(
        python="3.12.1",
        machine="Linux x86_64",
        vllm="0.32.0",
        vllm_tested=True,
        vllm_range="0.26 to 0.32",
        torch="2.13.0",
        native="",
        native_cuda=True,
        gpu="NVIDIA H200",
        gpu_problem="",
        memlock=None,
        may_lock=False,
        memory=64 * GIB,
        shm=8 * GIB,
        io_uring="",
        config=config(cpu={"capacity": "16Gi"}),
        config_problem="",
        config_file="/etc/kvcache/config.yaml",
    )
    return dataclasses.replace(well, **changed)


def states(**changed: Any) -> dict[str, str]:
    """What is not in order, by check; each with a remedy."""
    findings = checkup(facts(**changed))
    assert all(finding.remedy for finding in findings if finding.state in ("warning", "wrong"))
    return {finding.check: finding.state for finding in findings if finding.state != "ok"}


def test_all_is_well() -> None:
    assert states() == {}


DISK = {"directories": ["/d"], "capacity": "10Gi"}
FOLDER = FolderFacts("/d", True, 20 * GIB, True)


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"gpu": ""}, {"GPU": "note"}),
        ({"gpu_problem": "no driver"}, {"GPU": "wrong"}),
        ({"native": "no such file"}, {"native module": "wrong"}),
        ({"vllm": None}, {"vLLM": "wrong"}),
        ({"vllm": "0.19.0", "vllm_tested": False}, {"vLLM": "wrong"}),
        (
            {"vllm": "0.99.0", "vllm_tested": False, "config": LMCacheEngineConfig(allow_untested_vllm=True)},
            {"vLLM": "warning"},
        ),
        ({"memory": 8 * GIB}, {"memory": "wrong"}),
        ({"memory": 18 * GIB}, {"memory": "warning"}),
        ({"memory": None}, {}),
        ({"memlock": 8 << 20}, {"pinning": "note"}),
        ({"memlock": 8 << 20, "may_lock": True}, {}),
        ({"memlock": 8 << 20, "gpu": ""}, {"GPU": "note"}),
        (
            {"memlock": 8 << 20, "config": config(cpu={"capacity": "16Gi", "pinning": "Required"})},
            {"pinning": "warning"},
        ),
        ({"memlock": 8 << 20, "config": config(cpu={"capacity": "1Gi", "pinning": "Disabled"})}, {}),
        ({"shm": None}, {"shared memory": "wrong"}),
        ({"shm": 64 << 10}, {"shared memory": "wrong"}),
        ({"config_problem": "chunk_sise: unknown key"}, {"configuration": "wrong"}),
        ({"config": config(disk=DISK), "folders": (FOLDER,)}, {}),
        (
            {"config": config(disk=DISK), "folders": (FolderFacts("/d", problem="Permission denied"),)},
            {"disk tier /d": "wrong"},
        ),
        (
            {"config": config(disk=DISK), "folders": (dataclasses.replace(FOLDER, free_bytes=GIB),)},
            {"disk tier": "warning"},
        ),
        (
            {"config": config(disk=DISK), "folders": (dataclasses.replace(FOLDER, direct_io=False),)},
            {"disk tier /d": "note"},
        ),
        (
            {
                "config": config(disk={**DISK, "direct_io": "Enabled"}),
                "folders": (dataclasses.replace(FOLDER, direct_io=False),),
            },
            {"disk tier /d": "wrong"},
        ),
        (
            {"config": config(disk=DISK), "folders": (FOLDER,), "io_uring": "switched off"},
            {"io_uring": "note"},
        ),
        (
            {
                "config": config(disk={**DISK, "engine": "Uring"}),
                "folders": (FOLDER,),
                "io_uring": "switched off",
            },
            {"io_uring": "wrong"},
        ),
        ({"config": config(remote=REMOTE), "endpoints": (("valkey:6379", ""),)}, {}),
        (
            {"config": config(remote=REMOTE), "endpoints": (("valkey:6379", "refused"),)},
            {"remote tier": "wrong"},
        ),
    ],
)
def test_what_is_not_is_named_with_what_to_do(changed: dict[str, Any], wrong: dict[str, str]) -> None:
    assert states(**changed) == wrong


def test_this_machine(run: Run, tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        file = tmp_path / "config.yaml"
        tiers = {
            "cpu": {"capacity": "16Mi"},
            "disk": {"directories": [str(tmp_path)], "capacity": "1Mi"},
            "remote": {"valkey": {"endpoints": [address]}},
        }
        file.write_text(yaml.safe_dump({"tiers": tiers}))
        result = run("doctor", "--config", file, "--json")
    found = {finding["check"]: finding for finding in json.loads(result.stdout)}
    assert found["vLLM"]["state"] == found["native module"]["state"] == found["memory"]["state"] == "ok"
    assert found["remote tier"]["found"] == f"{address} accepts connections"
    assert "writable" in found[f"disk tier {tmp_path}"]["found"]
    assert found["configuration"]["found"] == f"{file}: tiers cpu, disk, remote"
    assert list(tmp_path.iterdir()) == [file]


def test_what_is_wrong_ends_with_a_status(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("tiers: {cpu: {capcity: 1Gi}}\n")
    result = run("doctor", "--config", file)
    assert result.exit_code == 1
    assert "tiers.cpu.capacity" in result.stdout
    assert result.stderr == "error: not in order: configuration\n"


def test_a_remote_that_nobody_serves(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"tiers": {"remote": {"valkey": {"endpoints": [address]}}}}))
    assert read_facts(file).endpoints == ((address, "Connection refused"),)
