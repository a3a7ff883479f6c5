# SPDX-License-Identifier: Apache-2.0
"""Commands that ask a running admin sidecar."""

from __future__ import annotations

import json
import re
import secrets
import time
from pathlib import Path

import pytest

from kvcache.control.wire import FlushScope, Part
from tests.commands.conftest import TOKEN, Run
from tests.control.processes import Process


def rows(text: str) -> list[list[str]]:
    """The cells of tables, line by line."""
    return [[cell.strip() for cell in re.split("[│┃]", line)] for line in text.splitlines()]


def test_stats_as_tables(run: Run, admin: dict[str, str]) -> None:
    result = run("stats", **admin)
    assert (result.exit_code, result.stderr) == (0, "")
    found = rows(result.stdout)
    assert ["hit rate", "75.0%", "-"] in found
    assert ["given back by this cache", "600", "0"] in found
    assert ["cpu", "Ready", "1.0 GiB", "4.0 GiB", "4,096", "700", "5"] in found
    assert ["disk", "Unwritable: no space left", "0 B", "-", "0", "0", "0"] in found
    assert ["rank0", "ready", "StoreNoRoom 3"] in found


def test_stats_as_json(run: Run, admin: dict[str, str]) -> None:
    report = json.loads(run("stats", "--json", **admin).stdout)
    assert report["totals"]["hit_rate"] == 0.75
    assert [tier["name"] for tier in report["tiers"]] == ["cpu", "disk"]


def test_a_process_that_is_missing_is_named(run: Run, admin: dict[str, str], rank: Process) -> None:
    rank.go.clear()
    time.sleep(0.2)  # what was asked just before answers for a moment
    found = rows(run("stats", **admin).stdout)
    assert ["rank0", "missing: it did not answer within 2 s", ""] in found


def test_flush(run: Run, admin: dict[str, str], rank: Process) -> None:
    result = run("flush", "cpu", "--reason", "new weights", **admin)
    assert result.exit_code == 0
    assert ["rank0", "cpu", "yes", "3", "99 B", "0", ""] in rows(result.stdout)
    assert rank.flushed == [["cpu"]]


def test_flush_of_a_part(run: Run, admin: dict[str, str], rank: Process) -> None:
    rank.scopes.clear()
    namespace = secrets.token_hex(16)
    part = ["--salt", "one tenant", "--namespace", namespace, "--force"]
    assert run("flush", "cpu", *part, **admin).exit_code == 0
    assert rank.scopes == [FlushScope(namespace=bytes.fromhex(namespace), salt="one tenant", force=True)]
    refused = run("flush", "cpu", "--namespace", "short", **admin)
    assert (refused.exit_code, len(rank.scopes)) == (1, 1)
    assert "namespace" in refused.stderr


def test_flush_as_json_and_without_waiting(run: Run, admin: dict[str, str]) -> None:
    report = json.loads(run("flush", "cpu", "--json", **admin).stdout)
    assert (report["state"], report["complete"]) == ("Done", True)
    assert re.fullmatch(r"[0-9a-f]{16}\n", run("flush", "cpu", "--no-wait", **admin).stdout)


def test_a_flush_that_leaves_something_fails(run: Run, admin: dict[str, str]) -> None:
    # This sidecar was not told where vLLM is.
    result = run("flush", "gpu", **admin)
    assert result.exit_code == 1
    assert "--vllm-url" in result.stdout
    assert result.stderr.strip().endswith("its results say what is left and why")


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_what_the_admin_refuses_is_one_sentence(run: Run, admin: dict[str, str], as_json: list[str]) -> None:
    result = run("flush", "nvme", *as_json, **admin)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"error: the admin answered 422 to /v1/flush: tiers: nvme .*\n", result.stderr)


def test_the_token(run: Run, admin: dict[str, str], tmp_path: Path) -> None:
    url = {"KVCACHE_ADMIN_URL": admin["KVCACHE_ADMIN_URL"]}
    assert run("stats", KVCACHE_ADMIN_TOKEN=TOKEN, **url).exit_code == 0
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    for arguments, said in (
        ([], "no admin token is given"),
        (["--token-file", tmp_path / "none"], "No such file"),
        (["--token-file", empty], "is empty"),
        (["--token-file", tmp_path], "directory"),
    ):
        result = run("stats", *arguments, **url)
        assert result.exit_code == 1
        assert said in result.stderr
        assert len(result.stderr.splitlines()) == 1
    wrong = tmp_path / "wrong"
    wrong.write_text("another")
    assert "401" in run("stats", "--token-file", wrong, **url).stderr


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:8081", "http://[", "ftp://x"])
def test_nobody_there(run: Run, url: str) -> None:
    result = run("stats", "--url", url, KVCACHE_ADMIN_TOKEN=TOKEN)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "does not answer" in result.stderr
    assert "Traceback" not in result.stderr


def test_lookup(run: Run, admin: dict[str, str], rank: Process) -> None:
    rank.parts = [Part(tier="cpu", tokens=3), Part(tier="disk", tokens=2)]
    result = run("lookup", "--tokens", "1,2 3,4,5,6,7,8", "--salt", "s", **admin)
    assert result.exit_code == 0
    assert "5 of 8 tokens are cached" in result.stdout
    found = rows(result.stdout)
    assert ["cpu", "0", "3", "37.5%"] in found
    assert ["disk", "3", "2", "25.0%"] in found
    report = json.loads(run("lookup", "--tokens", "1,2", "--json", **admin).stdout)
    assert report["tokens"] == 2


def test_lookup_of_what_is_not_there(run: Run, admin: dict[str, str], rank: Process) -> None:
    rank.parts = []
    assert run("lookup", "--tokens", "9", **admin).stdout == "0 of 1 tokens are cached\n"


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        ([], "needed once", 2),
        (["a text", "--tokens", "1"], "needed once", 2),
        (["--tokens", "1,x"], "'x' is no token id", 2),
        (["--file", "/no/such/file"], "No such file", 1),
        # This sidecar was not told where vLLM is, which reads texts.
        (["a text"], "--vllm-url", 1),
    ],
)
def test_a_lookup_that_cannot_be_made(
    run: Run, admin: dict[str, str], arguments: list[str], said: str, status: int
) -> None:
    result = run("lookup", *arguments, **admin)
    assert (result.exit_code, result.stdout) == (status, "")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
