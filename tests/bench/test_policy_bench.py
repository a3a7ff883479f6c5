# SPDX-License-Identifier: Apache-2.0
"""The policy bench on the command line: what it reads, prints and writes, and what it says to bad input."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from kvcache.bench import __main__ as command
from kvcache.bench.policy_traces import read_trace
from kvcache.config.tiers import CpuTierConfig, DiskTierConfig
from kvcache.storage.policies import ADMISSIONS, POLICIES

DEFAULT = "Adaptive+Adaptive"


def lines_of(requests: list[list[int]]) -> str:
    rows = [{"timestamp": at, "input_length": 1, "hash_ids": ids} for at, ids in enumerate(requests)]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_is_replayed(packed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random()
    requests = [[10 * prompt + place for place in range(rng.randint(1, 9))] for prompt in range(40)]
    requests = [rng.choice(requests[:15] if rng.random() < 0.6 else requests) for _ in range(300)]
    file = tmp_path / ("trace.jsonl" + ".gz" * packed)
    with gzip.open(file, "wt") if packed else file.open("w") as out:
        out.write(lines_of(requests))
    assert read_trace(file) == requests
    figures = tmp_path / "figures.json"
    arguments = ["policy", "--trace", str(file), "--capacity", "12,30%", "--json", str(figures)]
    assert command.main([*arguments, "--policies", f"{DEFAULT},LRU+Always,ARC+TinyLFU"]) == 0
    different = len({block for request in requests for block in request})
    report = json.loads(figures.read_text())
    assert (report["requests"], report["blocks"]) == (300, different)
    assert report["reads"] == sum(map(len, requests))
    rates = {(row["policy"], row["capacity"]): row["hit_rate"] for row in report["policy"]}
    capacities = (12, int(0.3 * different))
    names = [DEFAULT, "LRU+Always", "ARC+TinyLFU", "clairvoyant", "unbounded"]
    assert list(rates) == [(name, capacity) for name in names for capacity in capacities]
    for place, capacity in enumerate(capacities):
        ours, lru = rates[DEFAULT, capacity], rates["LRU+Always", capacity]
        best = max(ours, lru, rates["ARC+TinyLFU", capacity])
        assert report["default_of_best"][place] == pytest.approx(ours / best)
        assert report["default_of_lru"][place] == pytest.approx(ours / lru)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in printed[3:]] == [
        *names,
        f"{DEFAULT} of best",
        f"{DEFAULT} of LRU",
    ]
    cell = printed[3].split("\t")[1]
    assert cell.startswith(f"{100 * rates[DEFAULT, 12]:.2f}/")


def test_a_trace_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["policy", "--synthetic", "loop", "--capacity", "50%", "--policies", "MRU+Always"]
    outputs = []
    for seed in ("1", "1", "2"):
        assert command.main([*arguments, "--seed", seed]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_all_pairs_have_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(lines_of([[1, 2], [1, 3], [1, 2]]))
    assert command.main(["policy", "--trace", str(file), "--capacity", "2", "--policies", "all"]) == 0
    rows = capsys.readouterr().out.splitlines()[3:]
    assert len(rows) == len(POLICIES) * (len(ADMISSIONS) + 1) + 4


def test_the_default_is_that_of_the_configuration() -> None:
    disk = DiskTierConfig(directories=["/var/cache/kv"], capacity=1 << 30)
    for config in (CpuTierConfig(), disk):
        assert f"{config.eviction}+{config.admission}" == DEFAULT


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no requests"),
        ('{"hash_ids": [1]}\n{"hash_ids": "1"}\n', "line 2: no list of integers `hash_ids`"),
        ('{"hash_ids": [1, true]}\n', "line 1: no list of integers `hash_ids`"),
        ("[1, 2]\n", "line 1: no list of integers `hash_ids`"),
        ("not json\n", "line 1: "),
        ('{"hash_ids": [1, 2]}\n{"hash_ids": [3, 2]}\n', "line 2: block 2 follows 3, and 1 elsewhere"),
        ('{"hash_ids": [1, 1]}\n', "line 1: block 1 follows 1, and None elsewhere"),
    ],
)
def test_a_bad_trace_is_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    assert command.main(["policy", "--trace", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"bench policy: {file}")
    assert said in error


@pytest.mark.parametrize(
    ("name", "content"), [("missing.jsonl", None), ("plain.gz", b"no gzip"), ("binary", b"\xff\xfe\n")]
)
def test_a_trace_that_cannot_be_read_is_named(
    name: str, content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    assert command.main(["policy", "--trace", str(file)]) == 1
    assert f"{file} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--policies", "LRU", "'LRU' is no pair such as Adaptive+Adaptive"),
        ("--policies", "LRU+Never", "of admissions Always, Adaptive, SecondUse, TinyLFU"),
        ("--capacity", "many", "'many' is no number of blocks"),
        ("--capacity", "nan%", "'nan%' is no number of blocks"),
        ("--capacity", "0", "0 is 0 of 3 blocks; give 1 to 3"),
        ("--capacity", "200%", "200% is 6 of 3 blocks; give 1 to 3"),
        ("--capacity", "7", "7 is 7 of 3 blocks; give 1 to 3"),
    ],
)
def test_a_bad_option_is_named(
    option: str, value: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(lines_of([[1, 2, 3]]))
    assert command.main(["policy", "--trace", str(file), option, value]) == 1
    error = capsys.readouterr().err
    assert f"{option}: " in error
    assert said in error
