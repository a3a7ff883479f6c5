# SPDX-License-Identifier: Apache-2.0
"""The connector under sequences of vLLM's scheduler that nobody chose."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.models import tiny_llama
from tests.simulator.__main__ import simulate
from tests.simulator.cases import random_case
from tests.simulator.checks import Broken
from tests.simulator.engine import Shape
from tests.simulator.world import Faults, World

OPERATIONS = 250


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.make(folder)
    yield folder


# A seed has no smaller one: a failure is looked at with `python -m tests.simulator --seed`.
@settings(max_examples=150, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(seed=st.integers(0, 1 << 48))
def test_no_sequence_leaves_a_wrong_byte_or_anything_else(model: Path, seed: int) -> None:
    simulate(seed, OPERATIONS, model)


def test_all_that_can_happen_happens(model: Path) -> None:
    """Else the test above might see nothing."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += simulate(seed, OPERATIONS, model)
    expected = {
        *("requests", "loads", "loads ahead", "loaded tokens", "stored chunks", "evictions"),
        *("preempted", "resumed", "all preempted"),
        *("aborted WAITING", "aborted RUNNING", "aborted WAITING_FOR_REMOTE_KVS"),
        *("failed loads", "fault copy", "fault lookup", "fault plan", "fault slow", "fault hang"),
        *("fault hooks", "fault report"),
        *("waits", "waits that expired", "fetched chunks", "hits below", "written below"),
    }
    assert expected - set(seen) == set()


def test_over_sockets(model: Path, socket_dir: Path) -> None:
    loaded = 0
    for seed in range(6):
        dice = random.Random(seed)
        shape, faults = random_case(dice)
        # One vLLM a folder.
        folder = socket_dir / str(seed)
        extra = (*shape.extra, ("runtime_dir", str(folder)), ("lookup_timeout_ms", 10_000))
        shape = replace(shape, sockets=True, role="kv_both", broken_rank=None, extra=extra)
        world = World(shape, replace(faults, lookup=0.0), dice, model)
        try:
            world.run(OPERATIONS)
        finally:
            world.close()
        loaded += world.seen["loaded tokens"]
    assert loaded > 0


def test_vllm_goes_on_with_the_token_of_a_step_whose_load_failed(model: Path) -> None:
    """A defect of vLLM 0.32: with asynchronous scheduling, when a load fails that the request did not wait
    for outside of the batch. Once this test fails, vLLM has mended it, and `cases` need not avoid it."""
    shape = Shape(depth=2, behind=True, extra=(("async_loading", "Never"),))
    with pytest.raises(Broken, match="is wrong"):
        for seed in range(200):
            world = World(shape, Faults(vanish=0.3), random.Random(seed), model)
            try:
                world.run(OPERATIONS)
            finally:
                world.close()


@pytest.mark.parametrize(("more", "loads"), [(4, 0), (16, 0), (20, 1), (24, 1)])
def test_a_few_tokens_behind_vllms_own_are_computed(model: Path, more: int, loads: int) -> None:
    """Up to 16 of a prompt whose others vLLM has, the last one among them, which is computed in any case."""
    shape = Shape(block_size=4, chunk_size=16)
    world = World(shape, Faults(), random.Random(1), model)
    prompt = [random.randrange(3, 60) for _ in range(64)]
    for tokens, forgets in ((64, True), (64 - more, False), (64, False)):
        world._add("", prompt[:tokens], 1)
        while world._requests:
            world.step()
        if forgets:
            world.forget_everything_on_the_gpu()
    world.finish()
    world.close()
    assert world.seen["loads"] == 1 + loads, "the second one's, and the last one's or none"


def test_joined_rows_have_a_namespace_of_their_own(model: Path) -> None:
    namespaces = set()
    for heads in (1, 2):
        world = World(Shape(heads=heads, ranks=2), Faults(), random.Random(1), model)
        for impl in world.engine.rank_impls:
            assert impl._worker is not None
            assert impl._worker.engine.gpu_connector.kv_planes == 3 - heads
            assert impl._worker.engine.database.namespace == impl._namespace
            namespaces.add(impl._namespace)
        world.close()
    assert len(namespaces) == 2


@pytest.mark.parametrize("beside_another", [False, True])
def test_a_request_alone_goes_into_the_batch_at_once(model: Path, beside_another: bool) -> None:
    """Also right after another one has ended: waiting outside of the batch costs a step, and until its end is
    seen. Beside a request that goes on, a long load waits outside."""
    shape = Shape(behind=True, extra=(("async_loading", "Auto"),))
    world = World(shape, Faults(), random.Random(1), model)
    side = world.engine.scheduler_impl._scheduler
    assert side is not None
    side._copies.rate = 1.0  # bytes a second: every load is long
    prompt = [random.randrange(3, 60) for _ in range(4 * shape.chunk_size)]
    world._add("", prompt, 1)
    while world._requests:
        world.step()
    if beside_another:
        world._add("a", prompt[:5], 40)
        for _ in range(6):
            world.step()
        assert world._requests
    world.poll()
    world.forget_everything_on_the_gpu()
    steps: list[bool] = []
    plan = side._load

    def planned(tracker: Any, chain: Any, load: Any) -> Any:
        steps.append(load.load_async)
        return plan(tracker, chain, load)

    side._load = planned  # type: ignore[method-assign]
    world._add("", prompt, 1)
    world.finish()
    world.close()
    assert steps == [beside_another]
