# SPDX-License-Identifier: Apache-2.0
"""The queue of keys, by hypothesis against what a queue promises, and the loop around it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import kopf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_operator.cluster import ClusterError
from kvcache_operator.handlers import Loop
from kvcache_operator.health import Health
from kvcache_operator.queue import Key, KeyedQueue
from kvcache_operator.reconcile import Outcome, Reconciler
from kvcache_operator.settings import Settings
from kvcache_operator.telemetry import Telemetry
from tests.operator.fake_cluster import FakeCluster

A, B = Key("ns", "a"), Key("ns", "b")


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


@given(st.lists(st.sampled_from([A, B]), max_size=40))
def test_many_requests_for_a_key_are_one(keys: list[Key]) -> None:
    async def test() -> None:
        queue = KeyedQueue()
        for key in keys:
            queue.add(key)
        assert queue.depth == len(set(keys))
        got = [await queue.get() for _ in range(len(set(keys)))]
        assert got == list(dict.fromkeys(keys))

    run(test())


def test_a_key_is_with_one_worker_at_a_time_and_comes_again_if_asked_for_meanwhile() -> None:
    async def test() -> None:
        queue = KeyedQueue()
        queue.add(A)
        assert await queue.get() == A
        for _ in range(3):
            queue.add(A)
        queue.add(B)
        assert await queue.get() == B
        assert queue.depth == 0
        queue.done(A)
        assert await queue.get() == A
        queue.done(A)
        assert queue.depth == 0

    run(test())


def test_the_earliest_time_holds_and_a_request_overrules_it() -> None:
    async def test() -> None:
        queue = KeyedQueue()
        queue.add_after(A, 3600)
        queue.add_after(A, 0.02)
        queue.add_after(A, 7200)
        assert await queue.get() == A
        queue.done(A)
        queue.add_after(A, 3600)
        queue.add(A)
        assert await queue.get() == A
        queue.done(A)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.get(), 0.1)

    run(test())


class Scripted(Reconciler):
    """Answers by a script, and notes who was worked on."""

    def __init__(self, script: dict[Key, list[Outcome | Exception]]) -> None:
        self.script = script
        self.seen: list[Key] = []

    async def reconcile(self, key: Key) -> Outcome:
        self.seen.append(key)
        await asyncio.sleep(0)
        steps = self.script.get(key, [])
        step = steps.pop(0) if steps else Outcome()
        if isinstance(step, Exception):
            raise step
        return step

    def forget_applied(self, key: Key) -> None:
        pass

    def has_written(self, key: Key, version: str) -> bool:
        return version == "ours"


def loop_with(script: dict[Key, list[Outcome | Exception]]) -> tuple[Loop, Scripted, Telemetry]:
    reconciler, telemetry = Scripted(script), Telemetry()
    settings = Settings(retry_s=0.01, retry_max_s=0.02, workers=2)
    loop = Loop(FakeCluster(), reconciler, settings, telemetry, Health(60))
    loop._kinds_known.set()
    return loop, reconciler, telemetry


def test_nothing_is_done_before_the_kinds_of_the_server_are_known() -> None:
    """Else the first apply of a new process may ask for a kind that an older server has not."""

    async def test() -> None:
        loop, reconciler, _ = loop_with({})
        loop._kinds_known.clear()
        worker = asyncio.create_task(loop._work())
        loop.queue.add(A)
        await asyncio.sleep(0.02)
        assert reconciler.seen == []
        await loop.resync()
        while not reconciler.seen:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert reconciler.seen == [A]
        worker.cancel()

    run(test())


def test_errors_of_the_server_come_back_and_hold_nobody_up() -> None:
    async def test() -> None:
        errors: list[Outcome | Exception] = [
            ClusterError("503", 503),
            Outcome(failure=ClusterError("429", 429)),
        ]
        loop, reconciler, telemetry = loop_with({A: errors})
        workers = [asyncio.create_task(loop._work()) for _ in range(2)]
        loop.queue.add(A)
        loop.queue.add(B)
        while reconciler.seen.count(A) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert reconciler.seen[:2] == [A, B]
        await asyncio.sleep(0.1)
        assert reconciler.seen.count(A) == 3
        assert (
            telemetry.registry.get_sample_value("kvcache_operator_reconciles_total", {"result": "api_error"})
            == 2
        )
        for worker in workers:
            worker.cancel()

    run(test())


def test_what_would_be_refused_again_is_not_sent_again() -> None:
    async def test() -> None:
        loop, reconciler, _ = loop_with({A: [Outcome(failure=ClusterError("no", 422))]})
        worker = asyncio.create_task(loop._work())
        loop.queue.add(A)
        await asyncio.sleep(0.2)
        assert reconciler.seen == [A]
        worker.cancel()

    run(test())


def test_a_defect_of_one_resource_is_counted_and_the_others_go_on() -> None:
    async def test() -> None:
        loop, reconciler, telemetry = loop_with({A: [ZeroDivisionError()]})
        worker = asyncio.create_task(loop._work())
        loop.queue.add(A)
        loop.queue.add(B)
        while B not in reconciler.seen:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        sample = telemetry.registry.get_sample_value("kvcache_operator_reconciles_total", {"result": "error"})
        assert sample == 1
        worker.cancel()

    run(test())


def test_a_watch_that_is_deaf_is_found() -> None:
    async def test() -> None:
        loop, _, telemetry = loop_with({})
        cluster = loop._cluster
        assert isinstance(cluster, FakeCluster)
        meta = {"namespace": "ns", "name": "a", "generation": 1}
        cluster.objects["KVCache", "ns", "a"] = {"metadata": meta}
        await loop.resource_changed(meta=meta)  # type: ignore[arg-type]
        await loop.resync()
        assert not loop._health.problem()
        meta["generation"] = 2
        await loop.resync()
        assert not loop._health.problem()
        await loop.resync()
        assert "watch" in loop._health.problem()
        assert telemetry.registry.get_sample_value("kvcache_operator_missed_changes_total") == 2
        await loop.resource_changed(meta=meta)  # type: ignore[arg-type]
        await loop.resync()
        assert not loop._health.problem()

    run(test())


def test_kopf_is_asked_for_events_alone() -> None:
    """So it sets no finalizer, keeps no annotation and retries nothing."""
    registry = loop_with({})[0].registry()
    assert not registry._changing.get_all_handlers()
    assert not registry._spawning.get_all_handlers()
    assert len(registry._watching.get_all_handlers()) == 4


def test_a_watch_that_hangs_is_given_up() -> None:
    async def test() -> None:
        loop = loop_with({})[0]
        settings = kopf.OperatorSettings()
        await loop.configure(settings)
        assert settings.watching.server_timeout is not None
        assert settings.watching.client_timeout is not None
        assert 0 < settings.watching.server_timeout < settings.watching.client_timeout < 3600
        assert settings.watching.connect_timeout
        assert settings.networking.request_timeout
        assert not settings.posting.enabled

    run(test())
