# SPDX-License-Identifier: Apache-2.0
"""The simulator finds what it is there to find: with any one protection taken away, it fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvcache.engine import LMCacheEngine
from kvcache.gpu_connector.feed import Feed
from kvcache.gpu_connector.interface import Completed, Completion
from kvcache.integration.vllm import adapter
from kvcache.integration.vllm.doubts import Doubts
from kvcache.integration.vllm.layerwise import LayerHooks
from kvcache.integration.vllm.metadata import StepReport
from kvcache.integration.vllm.scheduler import SchedulerSide
from kvcache.integration.vllm.windows import Windows
from kvcache.integration.vllm.worker import WorkerSide
from kvcache.lookup.client import LookupResult, combined
from kvcache.lookup.wire import LookupReply
from kvcache.memory.lease import LeaseBook
from kvcache.plans import StorePlan
from kvcache.storage.claims import Claims
from kvcache.storage.tiers.cpu import CpuTier
from tests.models import tiny_llama
from tests.simulator import lookups
from tests.simulator.checks import Broken
from tests.simulator.engine import Shape
from tests.simulator.world import Faults, World

BUSY = Shape(num_blocks=30, tier_chunks=8, behind=True, extra=(("save_decode_cache", True),))
"""Short of blocks and of memory."""
MOST_SEEDS = 200


@dataclass
class Mutation:
    """A protection that is taken away, and where that shows."""

    take_away: Callable[[pytest.MonkeyPatch], None]
    shape: Shape = BUSY
    faults: Faults = Faults()  # noqa: RUF009 -- frozen


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _leases_do_not_keep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseBook, "held", lambda self, entry: False)


def _lease_ends_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    plan_load = LMCacheEngine._plan_load

    def plan_and_release(self: LMCacheEngine, *arguments: Any) -> Any:
        plan = plan_load(self, *arguments)
        self.storage.release(plan.owner)
        return plan

    patch.setattr(LMCacheEngine, "_plan_load", plan_and_release)


def _visible_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    copies = StorePlan.copies

    def done_at_once(self: StorePlan, completion: Completion, *arguments: Any, **more: Any) -> Any:
        return copies(self, Completed(), *arguments, **more)

    patch.setattr(StorePlan, "copies", done_at_once)


def _blocks_of_finished_requests_go_at_once(patch: pytest.MonkeyPatch) -> None:
    finished = SchedulerSide.request_finished

    def do_not_hold(self: SchedulerSide, req_id: str) -> bool:
        finished(self, req_id)
        self._held.clear()
        return False

    patch.setattr(SchedulerSide, "request_finished", do_not_hold)


def _stores_from_preempted_requests_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LMCacheEngine, "order_after_stores", _nothing)


def _doubtful_blocks_are_stored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Doubts, "allow_storing", lambda self, table: True)


def _vllms_own_pages_are_written(patch: pytest.MonkeyPatch) -> None:
    load = WorkerSide._load

    def load_all(self: WorkerSide, request: Any, spec: Any, owner: str) -> None:
        load(self, request, replace(spec, vllm_cached_tokens=request.first_token), owner)

    patch.setattr(WorkerSide, "_load", load_all)


def _failed_loads_are_not_reported(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepReport, "lose", _nothing)


def _lost_promises_are_not_reported(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerSide, "_lose_promises", lambda self, *_, **__: self._promised.clear())


def _a_rank_without_a_cache_says_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepReport, "decline", _nothing)


def _parts_of_pages_are_stored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Windows, "storable", lambda self, tokens: max(0, tokens))


def _one_requests_failure_is_everybodys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerSide, "_attempt", lambda self, tracker, plan: plan())


def _preemption_is_noticed_late(patch: pytest.MonkeyPatch) -> None:
    ask = SchedulerSide.get_num_new_matched_tokens

    def ask_before_noticing(self: SchedulerSide, request: Any, computed: int) -> Any:
        notice, self._notice_preemption = self._notice_preemption, _nothing  # type: ignore[method-assign]
        try:
            return ask(self, request, computed)
        finally:
            self._notice_preemption = notice  # type: ignore[method-assign]

    patch.setattr(SchedulerSide, "get_num_new_matched_tokens", ask_before_noticing)


def _writers_do_not_lease(patch: pytest.MonkeyPatch) -> None:
    lend = CpuTier.lend

    def lend_without_lease(self: CpuTier, key: Any, owner: str) -> Any:
        lent = lend(self, key, owner)
        self.release(owner)
        return lent

    patch.setattr(CpuTier, "lend", lend_without_lease)


def _what_arrives_is_not_leased(patch: pytest.MonkeyPatch) -> None:
    end = Claims.end

    def forget_claims(self: Claims, key: Any, entry: Any) -> set[str]:
        end(self, key, entry)
        return set()

    def counts_as_leased(self: CpuTier, owner: str, keys: Any, start: int, end: int) -> tuple[int, bool]:
        while start < end and keys[start] in self:
            start += 1
        return start, start < end and self._claims.has(owner, keys[start])

    patch.setattr(Claims, "end", forget_claims)
    patch.setattr(CpuTier, "standing", counts_as_leased)


def _failed_reads_are_shown(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CpuTier, "failed", CpuTier.arrived)


def _what_is_computed_meanwhile_is_overwritten(patch: pytest.MonkeyPatch) -> None:
    arrived = CpuTier.arrived

    def in_any_case(self: CpuTier, key: Any, obj: Any) -> bool:
        entry = self._writing.get(key)
        if entry is not None and entry.obj is not obj:
            self._allocator.free(obj)
            del self._writing[key]
            return self._show(key, entry)
        return arrived(self, key, obj)

    patch.setattr(CpuTier, "arrived", in_any_case)


def _all_ranks_write_the_same_objects(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(adapter, "naming_rank", lambda rank, *_, **__: rank)


def _the_rank_with_the_most_says_what_is_there(patch: pytest.MonkeyPatch) -> None:
    def most(replies: list[LookupReply]) -> LookupResult:
        return combined([max(replies, key=lambda reply: reply.chunks)])

    patch.setattr(lookups, "combined", most)


def _a_load_has_ended_when_it_is_handed_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Feed, "done", lambda self: self._ended.is_set())


def _a_broken_load_has_ended_before_its_copies(patch: pytest.MonkeyPatch) -> None:
    stop = Feed.stop

    def stop_at_once(self: Feed, error: Exception) -> None:
        self._settle = Completed
        stop(self, error)

    patch.setattr(Feed, "stop", stop_at_once)


def _a_load_counts_as_whole_whatever_was_handed_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Feed, "moved", lambda self, chunks: chunks)


def _layers_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LMCacheEngine, "order_layer", _nothing)


def _layers_are_waited_for_one_late(patch: pytest.MonkeyPatch) -> None:
    order = LMCacheEngine.order_layer
    patch.setattr(
        LMCacheEngine, "order_layer", lambda self, layer: None if layer == 0 else order(self, layer - 1)
    )


def _hooks_are_counted_on_that_do_not_come(patch: pytest.MonkeyPatch) -> None:
    end = LayerHooks.end

    def complete(self: LayerHooks) -> bool:
        end(self)
        self._broken = False
        return True

    patch.setattr(LayerHooks, "end", complete)


def _failed_loads_go_on_beside_their_pages_next_owners(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LMCacheEngine, "order_layers", _nothing)


def _abandoned_loads_go_on_beside_what_is_computed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LMCacheEngine, "order_layers", _nothing)


def _last_copies_of_loads_beside_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerSide, "_order_joining", _nothing)


def _the_scheduler_does_not_hear_of_ready_loads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerSide, "heard_of_ready_loads", _nothing)


def _loads_start_before_the_step_before_theirs(patch: pytest.MonkeyPatch) -> None:
    load_ahead = WorkerSide.load_ahead

    def at_once(self: WorkerSide, session: str, step: int, request: Any) -> None:
        load_ahead(self, session, 1 + (self._begun or (0,))[0], request)

    patch.setattr(WorkerSide, "load_ahead", at_once)


def _loads_start_beside_stores_from_their_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LMCacheEngine, "stores_run", lambda self: False)


SLOW = replace(BUSY, below=(("Through", True), ("Back", False)))
ASYNC = replace(BUSY, extra=(("async_loading", "Always"),))
MUTATIONS = [
    Mutation(_leases_do_not_keep),
    Mutation(_lease_ends_before_the_copy, ASYNC),
    Mutation(_visible_before_the_copy),
    Mutation(_blocks_of_finished_requests_go_at_once),
    Mutation(_stores_from_preempted_requests_are_not_fenced, replace(BUSY, num_blocks=22)),
    Mutation(_doubtful_blocks_are_stored, faults=Faults(vanish=0.3)),
    Mutation(_vllms_own_pages_are_written, replace(BUSY, chunk_size=32)),
    Mutation(_failed_loads_are_not_reported, faults=Faults(vanish=0.3)),
    Mutation(_lost_promises_are_not_reported, faults=Faults(plan=0.1)),
    Mutation(_a_rank_without_a_cache_says_nothing, replace(BUSY, ranks=2, broken_rank=1)),
    Mutation(
        _parts_of_pages_are_stored,
        replace(BUSY, behind=False, whole_pages=True, extra=(("save_unfull_chunk", True),)),
    ),
    Mutation(_one_requests_failure_is_everybodys, faults=Faults(plan=0.1)),
    Mutation(_preemption_is_noticed_late, replace(ASYNC, num_blocks=26, tier_chunks=40)),
    Mutation(_writers_do_not_lease, SLOW),
    Mutation(_what_arrives_is_not_leased, SLOW),
    Mutation(_failed_reads_are_shown, SLOW, Faults(slow=0.3)),
    Mutation(_what_is_computed_meanwhile_is_overwritten, SLOW, Faults(hang=0.2)),
    Mutation(_layers_are_not_waited_for),
    Mutation(_layers_are_waited_for_one_late, replace(BUSY, layers=(5,))),
    Mutation(_hooks_are_counted_on_that_do_not_come, faults=Faults(hooks=0.2)),
    Mutation(
        _failed_loads_go_on_beside_their_pages_next_owners, replace(BUSY, layers=(5,)), Faults(hooks=0.3)
    ),
    Mutation(_abandoned_loads_go_on_beside_what_is_computed, replace(BUSY, layers=(5,)), Faults(plan=0.3)),
    Mutation(_last_copies_of_loads_beside_are_not_waited_for, ASYNC),
    Mutation(_the_scheduler_does_not_hear_of_ready_loads, ASYNC),
    Mutation(_loads_start_before_the_step_before_theirs, replace(BUSY, depth=2)),
    Mutation(_loads_start_beside_stores_from_their_pages, replace(BUSY, num_blocks=22)),
    Mutation(_a_load_has_ended_when_it_is_handed_over, ASYNC),
    Mutation(_a_broken_load_has_ended_before_its_copies, ASYNC, Faults(copy=0.2)),
    Mutation(_a_load_counts_as_whole_whatever_was_handed_over, ASYNC, Faults(copy=0.2)),
    Mutation(_all_ranks_write_the_same_objects, replace(SLOW, ranks=2, mla=True)),
    Mutation(_the_rank_with_the_most_says_what_is_there, replace(BUSY, layers=(1, 3))),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.make(folder)
    return folder


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.take_away.__name__.strip("_"))
def test_the_simulator_fails_without(
    mutation: Mutation, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(seed: int) -> bool:
        world = World(mutation.shape, mutation.faults, random.Random(seed), model)
        try:
            world.run(300)
        except (Broken, Exception):
            return True
        world.close()
        return False

    # As it is, it does not.
    assert not any(fails(seed) for seed in range(3))
    mutation.take_away(monkeypatch)
    assert any(fails(seed) for seed in range(MOST_SEEDS))
