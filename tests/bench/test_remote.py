# SPDX-License-Identifier: Apache-2.0
"""The bench of remote tiers moves the bytes that it says, on a server that it starts itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcache.bench import __main__ as command
from kvcache.bench import remote
from tests.storage.remote.servers import valkey_binaries


@pytest.mark.skipif(not valkey_binaries(), reason="there is neither valkey-server nor redis-server here")
def test_results_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "remote.json"
    words = ["remote", "--mib", "3", "--object-mib", "1", "--rounds", "2", "--json", str(file)]
    assert command.main(words) == 0
    put, get = json.loads(file.read_text())["remote"]
    assert (put["what"], get["what"]) == ("put", "get")
    for row in (put, get):
        assert (row["objects"], row["object_bytes"]) == (3, (1 << 20) + 4096)
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
        assert row["reference"].startswith("valkey client")
    assert "reference_rate" in capsys.readouterr().out


def test_a_store_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "DEADLINE_MS", 1000)
    assert command.main(["remote", "--url", "valkey://127.0.0.1:1", "--mib", "1", "--object-mib", "1"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
    assert command.main(["remote", "--url", "file:///x"]) == 1
    assert "no remote store is known by file" in capsys.readouterr().err
