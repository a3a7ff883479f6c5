# SPDX-License-Identifier: Apache-2.0
"""The worker's side over a real engine and host pages: what goes wrong with one request stays with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvcache.integration.vllm.adapter import LMCacheConnectorV1Impl
from kvcache.integration.vllm.guard import Guard
from kvcache.integration.vllm.metadata import (
    LMCacheConnectorMetadata,
    LoadSpec,
    ReqMeta,
    SaveSpec,
    StepReport,
)
from kvcache.integration.vllm.worker import WorkerSide
from kvcache.plans import Loaded
from tests.test_engine import BLOCK, CHUNK, LAYERS, Rig, make_rig

TOKENS = 4 * CHUNK
GOOD, SHORT = list(range(16, 16 + TOKENS // BLOCK)), [1, 2, 3]


@dataclass
class Worker:
    rig: Rig
    side: WorkerSide
    report: StepReport
    caught: list[str] = field(default_factory=list)

    def step(self, *requests: ReqMeta) -> LMCacheConnectorMetadata:
        metadata = LMCacheConnectorMetadata("session", 1, requests=list(requests))
        self.side.begin_step(metadata, alone=True)
        return metadata


@pytest.fixture
def worker() -> Iterator[Worker]:
    rig, report, caught = make_rig(), StepReport(), list[str]()
    names = [f"layer{i}" for i in range(LAYERS)]
    side = WorkerSide(rig.engine, BLOCK, 0, report, lambda hook, error: caught.append(hook), names)
    yield Worker(rig, side, report, caught)
    assert rig.tier().stats().leases == 0
    rig.engine.close()


def request(name: str, blocks: list[int], digests: bytes, *, load: bool, save_id: int = 0) -> ReqMeta:
    """A load beside the model of all tokens, or their store."""
    return ReqMeta(
        name,
        0,
        TOKENS,
        digests,
        blocks,
        load_spec=LoadSpec(0, TOKENS, True, f"{name}/1", load_async=True) if load else None,
        save_spec=None if load else SaveSpec(0, True, save_id),
    )


def test_a_store_without_all_its_blocks_leaves_others_alone(worker: Worker) -> None:
    good, bad = os.urandom(16 * 4), os.urandom(16 * 4)
    metadata = worker.step(
        request("bad", SHORT, bad, load=False, save_id=1), request("good", GOOD, good, load=False, save_id=2)
    )
    worker.side.start_load_kv(metadata)
    worker.side.wait_for_save(metadata)
    worker.side.get_finished()
    assert worker.report.worker.saves == {1: (0, 1), 2: (TOKENS, 1)}
    assert worker.caught == ["store"]
    assert worker.rig.engine.lookup(digests=good) == TOKENS
    assert worker.rig.engine.lookup(digests=bad) == 0


@pytest.mark.parametrize("order", [("good", "bad"), ("bad", "good")])
def test_a_load_without_all_its_blocks_leaves_others_alone(worker: Worker, order: tuple[str, str]) -> None:
    stored = os.urandom(16 * 4)
    slots = torch.arange(GOOD[0] * BLOCK, GOOD[0] * BLOCK + TOKENS)
    worker.rig.engine.store(slot_mapping=slots, digests=stored)
    before = worker.rig.read(slots)
    worker.rig.fill()
    blocks = {"good": GOOD, "bad": SHORT}
    metadata = worker.step(*(request(name, blocks[name], stored, load=True) for name in order))
    worker.side.start_load_kv(metadata)
    assert worker.rig.engine.drain(10)
    assert worker.report.take_finished_recving() == {"good", "bad"}
    assert worker.caught == ["retrieve"]
    assert worker.report.take_invalid_block_ids() == set(SHORT)
    assert torch.equal(worker.rig.read(slots), before)
    assert not worker.side.runs_beside("good/1")


def test_a_load_that_runs_is_not_reported_before_it_has_ended(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the step's hook fails behind its start: vLLM gives the blocks of what was reported to others."""
    started: list[Any] = []
    monkeypatch.setattr(worker.rig.engine, "retrieve_beside", lambda **window: started.append(window))
    digests = os.urandom(16 * 4)
    runs = request("runs", GOOD, digests, load=True)
    waits = request("waits", SHORT, digests, load=True)
    impl = LMCacheConnectorV1Impl.__new__(LMCacheConnectorV1Impl)
    impl.guard, impl._report, impl._worker = Guard(), worker.report, worker.side
    impl._metadata = worker.step(runs, waits)
    monkeypatch.setattr(LMCacheConnectorV1Impl, "_block_size", BLOCK)
    worker.side._load(runs, runs.load_spec, "session/runs/1")  # type: ignore[arg-type]
    assert worker.side.runs_beside("runs/1")

    impl._lose_loads()
    assert worker.report.take_finished_recving() == {"waits"}
    assert worker.report.take_invalid_block_ids() == set(SHORT)
    started[0]["on_ready"](Loaded(TOKENS, slice(0, TOKENS)))
    assert worker.report.take_finished_recving() == {"runs"}
    assert not worker.report.take_invalid_block_ids()
