# SPDX-License-Identifier: Apache-2.0
"""Ranks of tensor and pipeline parallelism, and MLA, where a stage's tensor-parallel ranks hold one thing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcache.lookup.client import LookupResult
from kvcache.lookup.wire import LookupReply
from tests.models import tiny_llama
from tests.simulator.checks import sides
from tests.simulator.engine import Shape
from tests.simulator.world import Faults, World

OPERATIONS = 250
LIVES = 8
SLOW = Shape(ranks=2, behind=True, tier_chunks=8, below=(("Through", True), ("Back", False)))
STAGES = Shape(ranks=2, layers=(1, 3), behind=True, tier_chunks=20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.make(folder)
    return folder


def live(
    model: Path,
    shape: Shape,
    faults: Faults = Faults(),  # noqa: B008 -- frozen
    prepare: Callable[[World], None] = lambda world: None,
    lives: int = LIVES,
) -> Counter[str]:
    """What happened in some lives of an engine; whatever must not happen raises."""
    seen: Counter[str] = Counter()
    for seed in range(lives):
        world = World(shape, faults, random.Random(seed), model)
        prepare(world)
        workers = sides(world.engine)
        try:
            world.run(OPERATIONS)
        finally:
            world.close()
        seen += world.seen
        for rank, worker in enumerate(workers):
            engine = worker.engine
            seen[f"failed on {rank}"] += engine.counters.load_failed_tokens
            seen[f"from below on {rank}"] += sum(lane.count.hit_tokens for lane in engine.storage.lanes)
            seen[f"loaded on {rank}"] += engine.counters.loaded_tokens
    return seen


@pytest.mark.parametrize("layers", [(2,), (1, 3)], ids=["one stage", "two stages"])
def test_mla_is_written_below_once_and_loaded_by_all_ranks(model: Path, layers: tuple[int, ...]) -> None:
    """`checks` hold that only a stage's first rank writes, and look at every byte that arrives in another."""
    shape = replace(SLOW, mla=True, layers=layers)
    tiers: list[int] = []
    seen = live(
        model, shape, Faults(slow=0.1), lambda world: tiers.append(len(world.engine.slow.tiers)), lives=20
    )
    assert set(tiers) == {len(layers) * len(shape.below)}, "the ranks of a stage meet in the same tiers"
    for rank in range(shape.workers):
        assert seen[f"from below on {rank}"] > 0
        assert seen[f"loaded on {rank}"] > 0


def test_ranks_that_are_not_mla_write_each_its_own(model: Path) -> None:
    tiers: list[int] = []
    lives = 4 * LIVES
    seen = live(model, SLOW, prepare=lambda world: tiers.append(len(world.engine.slow.tiers)), lives=lives)
    assert tiers == [SLOW.ranks * len(SLOW.below)] * lives
    assert all(seen[f"from below on {rank}"] > 0 for rank in range(SLOW.workers))


@pytest.mark.parametrize("shape", [SLOW, STAGES], ids=["ranks", "stages"])
def test_a_hit_is_what_the_rank_with_the_least_has(model: Path, shape: Shape) -> None:
    differed = 0

    def watch(world: World) -> None:
        answer = world.engine.lookups._answer

        def watched(replies: list[LookupReply]) -> LookupResult:
            nonlocal differed
            result: LookupResult = answer(replies)
            held = [reply.chunks for reply in replies]
            assert len(held) == shape.workers
            assert result.timed_out or result.chunks == min(held)
            differed += len(set(held)) > 1
            return result

        world.engine.lookups._answer = watched  # type: ignore[method-assign]

    live(model, shape, Faults(copy=0.1, vanish=0.1), watch)
    assert differed > 0


@pytest.mark.parametrize("loading", ["Never", "Always"])
@pytest.mark.parametrize("failing", [0, 3])
def test_what_one_stage_fails_to_load_all_compute(model: Path, failing: int, loading: str) -> None:
    """Pages of the stages that did load are computed again too: no wrong token, no wrong page."""
    shape = replace(STAGES, extra=(("async_loading", loading),))

    def spare_the_others(world: World) -> None:
        for number, rank in enumerate(world.engine.ranks):
            if number != failing and rank.streams is not None:
                rank.streams.fails = lambda: False

    seen = live(model, shape, Faults(copy=0.3), spare_the_others)
    assert seen["failed loads"] > 0
    failed: dict[Any, int] = {rank: seen[f"failed on {rank}"] for rank in range(shape.workers)}
    assert failed.pop(failing) > 0
    assert set(failed.values()) == {0}
    assert all(seen[f"loaded on {rank}"] > 0 for rank in range(shape.workers))
