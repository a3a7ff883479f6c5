# SPDX-License-Identifier: Apache-2.0
"""How often the processes are asked, and that who asks after a change is told of it."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.admin.rounds import Pace, Rounds
from kvcache.control.snapshot import Snapshot

pytestmark = pytest.mark.anyio

FIRST = Snapshot(0.0)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Clock:
    def __init__(self) -> None:
        self.now = random.uniform(0, 1e6)

    def __call__(self) -> float:
        return self.now


class Processes:
    """Answers the number of the round; while it is closed, rounds wait."""

    def __init__(self) -> None:
        self.begun = 0
        self.at_once = 0
        self.most_at_once = 0
        self.open = asyncio.Event()
        self.open.set()

    async def ask(self) -> Snapshot:
        self.begun += 1
        number = self.begun
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.open.wait()
        finally:
            self.at_once -= 1
        return Snapshot(float(number))


def rounds_of(processes: Processes, per_s: float = 0.0, burst: int = 1000) -> Rounds:
    return Rounds(processes.ask, Pace(per_s, burst), FIRST)


@given(
    gaps=st.lists(st.floats(0, 3), max_size=200),
    per_s=st.floats(0.1, 20),
    burst=st.integers(1, 12),
)
def test_a_pace_is_kept_over_any_span(gaps: list[float], per_s: float, burst: int) -> None:
    clock = Clock()
    pace = Pace(per_s, burst, clock)
    allowed = []
    for gap in gaps:
        clock.now += gap
        if pace.allows():
            allowed.append(clock.now)
    for first in range(len(allowed)):
        for last in range(first, len(allowed)):
            assert last - first + 1 <= burst + per_s * (allowed[last] - allowed[first]) + 1e-6


def test_a_pause_gives_the_burst_back_and_no_more() -> None:
    clock = Clock()
    pace = Pace(4.0, 8, clock)
    for pause in (0.0, 1000.0):
        clock.now += pause
        assert [pace.allows() for _ in range(10)] == [True] * 8 + [False] * 2
    clock.now += 0.51
    assert [pace.allows() for _ in range(3)] == [True, True, False]


async def test_who_asks_while_a_round_runs_shares_it() -> None:
    processes = Processes()
    processes.open.clear()
    rounds = rounds_of(processes)
    asking = [asyncio.create_task(rounds.snapshot()) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    processes.open.set()
    assert [found.taken_at for found in await asyncio.gather(*asking)] == [1.0] * 5
    assert (await rounds.snapshot()).taken_at == 2.0


async def test_too_fast_is_answered_by_the_last_round() -> None:
    rounds = rounds_of(processes := Processes(), burst=3)
    assert [(await rounds.snapshot()).taken_at for _ in range(6)] == [1.0, 2.0, 3.0, 3.0, 3.0, 3.0]
    assert processes.begun == 3


async def test_after_a_change_no_round_that_began_before_it_answers() -> None:
    processes = Processes()
    processes.open.clear()
    rounds = rounds_of(processes, burst=1)
    early = asyncio.create_task(rounds.snapshot())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert processes.begun == 1
    rounds.outdate()
    late = [asyncio.create_task(rounds.snapshot()) for _ in range(3)]
    await asyncio.sleep(0)
    processes.open.set()
    assert (await early).taken_at == 1.0
    assert [found.taken_at for found in await asyncio.gather(*late)] == [2.0] * 3
    assert (rounds.latest.taken_at, processes.most_at_once) == (2.0, 1)
    assert (await rounds.snapshot()).taken_at == 2.0  # the pace holds again


async def test_a_round_that_fails_fails_for_those_who_wait_and_the_last_good_one_stays() -> None:
    processes = Processes()
    rounds = rounds_of(processes)
    await rounds.snapshot()
    failing = Rounds(broken, Pace(0.0, 10), rounds.latest)
    for _ in range(2):
        with pytest.raises(OSError, match="no sockets"):
            await failing.snapshot()
    assert failing.latest.taken_at == 1.0


async def test_a_caller_that_goes_away_ends_no_round() -> None:
    processes = Processes()
    processes.open.clear()
    rounds = rounds_of(processes)
    callers = [asyncio.create_task(rounds.snapshot()) for _ in range(2)]
    await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.gather(callers[0], return_exceptions=True)
    processes.open.set()
    assert (await callers[1]).taken_at == 1.0


async def test_closing_ends_the_round_that_runs_and_the_one_behind_it() -> None:
    processes = Processes()
    processes.open.clear()
    rounds = rounds_of(processes)
    callers = [asyncio.create_task(rounds.snapshot())]
    await asyncio.sleep(0)
    rounds.outdate()
    callers.append(asyncio.create_task(rounds.snapshot()))
    for _ in range(4):
        await asyncio.sleep(0)
    await rounds.close()
    ended = await asyncio.gather(*callers, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended)
    assert processes.at_once == 0


async def broken() -> Snapshot:
    raise OSError("no sockets")


async def test_a_round_that_fails_after_a_change_leaves_it_to_be_told() -> None:
    processes = Processes()
    rounds = rounds_of(processes, burst=2)
    assert (await rounds.snapshot()).taken_at == 1
    ask, rounds._ask = rounds._ask, _fails
    rounds.outdate()
    with pytest.raises(OSError, match="no answer"):
        await rounds.snapshot()
    rounds._ask = ask
    assert (await rounds.snapshot()).taken_at == 2


async def _fails() -> Snapshot:
    raise OSError("no answer")
