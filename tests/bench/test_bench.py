# SPDX-License-Identifier: Apache-2.0
"""The bench runs, moves the bytes that it says, and writes what it prints. No judgement by the clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvcache.bench import __main__ as command
from kvcache.bench.alloc import alloc_results, metadata_results
from kvcache.bench.decoding import decoding_results
from kvcache.bench.hashing import hash_results
from kvcache.bench.shapes import CPU_SHAPES, SHAPES, Shape
from kvcache.bench.transfer import Bench, transfer_results
from kvcache.gpu_connector.layout import describe_layers

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [*SHAPES, *CPU_SHAPES], ids=lambda shape: f"{shape.name} {shape.axes}")
def test_shapes_are_what_engines_register(shape: Shape) -> None:
    tensors = shape.tensors(3, CPU)
    pages = describe_layers(tensors, shape.spec(3))
    assert pages.num_layers == shape.layers
    assert pages.layout.token_bytes * shape.layers == shape.token_bytes


@pytest.mark.parametrize("shape", CPU_SHAPES, ids=lambda shape: f"{shape.name} {shape.axes} {shape.coded}")
def test_a_measurement_moves_all_bytes(shape: Shape) -> None:
    bench = Bench.of(shape, CPU, 2 << 20)
    chunks = bench.chunks(256)
    assert chunks.ends[-1] == len(bench.slots)
    bench.memory.zero_()
    bench.transfer.store(chunks)
    pages = [tensor.clone() for tensor in bench.tensors]
    for tensor in bench.tensors:
        tensor.view(torch.uint8).zero_()
    bench.transfer.load(chunks)
    moved = sum(int((tensor.view(torch.uint8) != 0).sum()) for tensor in bench.tensors)
    whole = sum(int((tensor.view(torch.uint8) != 0).sum()) for tensor in pages)
    filled = int((bench.memory != 0).sum())
    if shape.coded:
        assert 0.6 * bench.memory.nbytes < filled < 0.8 * bench.memory.nbytes
        assert 0.9 * bench.memory.nbytes < moved
    else:
        assert moved == filled > 0.9 * bench.memory.nbytes
    assert moved < whole, "as many pages as chunks: nothing was left out"


def test_results() -> None:
    (one, *rest) = transfer_results(CPU, shapes=CPU_SHAPES[:1], total_bytes=1 << 20)
    assert (one.direction, one.way, one.blocks) == ("store", "host", 0)
    assert [result.direction for result in rest] == ["load"]
    assert one.bytes > 0.5 * (1 << 20)
    assert one.ratio == one.rate / one.plain_rate > 0


def test_loads_beside_products() -> None:
    results = list(decoding_results(CPU, total_bytes=4 << 20))
    assert [(result.coded, result.way) for result in results] == [
        (False, "plain"),
        (False, "host"),
        (True, "host"),
    ]
    for result in results:
        assert min(result.load_rate, result.step_ms, result.busy_ms) > 0
        assert result.loss == result.busy_ms / result.step_ms - 1


def test_hashes_and_allocations() -> None:
    assert [result.chunk_tokens for result in hash_results(4096, runs=3)] == [16, 32, 64, 256, 1024]
    assert [result.chunks for result in alloc_results((10, 100), pairs=4000)] == [10, 100]


def test_the_index_costs_more_than_the_memory_objects_and_the_default_more_than_lru() -> None:
    plain, default = metadata_results(2_000)
    # Five fields and a number of Python's own; a key has a tuple and a hash of its own beside that.
    assert 5 * 8 < plain.object_bytes < 200
    assert plain.object_bytes + 100 < plain.index_bytes < default.index_bytes


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    arguments = ["transfer", "--device", "cpu", "--shape", "MLA", "--bytes", "4000000", "--json", str(file)]
    assert command.main(arguments) == 0
    report = json.loads(file.read_text())
    assert report["machine"]["cores"]
    assert {row["shape"] for row in report["transfer"]} == {"MLA"}
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + len(report["transfer"])


def test_an_unknown_shape_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["transfer", "--device", "cpu", "--shape", "9B"]) == 1
    assert "no shape is named 9B; there are ['70B-TP4', '8B', '8B-fp8', 'MLA']" in capsys.readouterr().err
