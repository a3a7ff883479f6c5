# SPDX-License-Identifier: Apache-2.0
"""A serving bench as its user runs it, on the CPU: its rows, and by which ways the bytes went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcache.bench import __main__ as command_line
from kvcache.bench import serving
from kvcache.stats import WayStats


def test_requests_that_decode_beside_a_hit(
    smollm2_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--modes", "ours", "--tokens", "600", "--requests", "1", "--repetitions", "1"]
    place = ["--model", str(smollm2_model), "--device", "cpu", "--cache-gib", "0.5", "--json", str(file)]
    assert command_line.main(["interfere", *arguments, *place]) == 0
    figures, ways = json.loads(file.read_text())["interfere"]
    assert figures["mode"] == ways["mode"] == "ours"
    assert figures["growth_low"] == figures["growth"] == figures["growth_high"] > 0
    assert 0 < figures["beside_p50_ms"] <= figures["beside_max_ms"]
    assert ways["ways"] == ["store host", "load host", "short_load host", "quiet_load host"]
    assert "ways: store host; load host" in capfd.readouterr().out


def test_a_measured_way_in_words() -> None:
    way = WayStats(
        direction="load", way="staged", multiprocessors=8, bytes_per_second=53.2e9, link_bytes_per_second=55e9
    )
    assert serving._in_words(way) == "load staged 8, 53.2 of 55.0 GB/s"
