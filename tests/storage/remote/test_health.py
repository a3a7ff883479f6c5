# SPDX-License-Identifier: Apache-2.0
"""The breaker against a plain model of it, with a clock that the test moves."""

from __future__ import annotations

import math
import threading

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache.storage.health import Breaker, BreakerPolicy, BreakerState, Pace, Problem

POLICY = BreakerPolicy(failures=3, first_pause_s=1.0, longest_pause_s=10.0, relapse_s=30.0)
PROBLEM = Problem("RemoteSlow", "it was slow")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class BreakerMachine(RuleBasedStateMachine):
    """The model: its state, failures in a row, and the pauses since it last recovered for good."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.jitter = 0.0
        self.breaker = Breaker(POLICY, self.clock, lambda: self.jitter)
        self.state = BreakerState.CLOSED
        self.row = 0
        self.pauses: list[float] = []
        self.retry_at = self.recovered = -math.inf

    def opens(self, relapse: bool) -> None:
        if not relapse:
            self.pauses = []
        pause = min(POLICY.first_pause_s * 2 ** len(self.pauses), POLICY.longest_pause_s)
        self.pauses.append(pause)
        self.retry_at = self.clock.now + pause * (1 - self.jitter / 2)
        self.state, self.row = BreakerState.OPEN, 0

    @rule(seconds=st.floats(0.01, 40))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(jitter=st.floats(0, 1))
    def roll(self, jitter: float) -> None:
        self.jitter = jitter

    @rule(missed=st.booleans())
    def fail(self, missed: bool) -> None:
        opened = self.breaker.failed(PROBLEM, missed=missed)
        expected = self.state is BreakerState.CLOSED and (missed or self.row + 1 == POLICY.failures)
        assert opened == expected
        if expected:
            self.opens(self.clock.now - self.recovered < POLICY.relapse_s)
        elif self.state is BreakerState.CLOSED:
            self.row += 1

    @rule()
    def succeed(self) -> None:
        self.breaker.succeeded()
        if self.state is BreakerState.CLOSED:
            self.row = 0

    @rule()
    def probe(self) -> None:
        begun = self.breaker.begin_probe()
        assert begun == (self.state is BreakerState.OPEN and self.clock.now >= self.retry_at)
        if begun:
            self.state = BreakerState.PROBING

    @rule(answered=st.booleans())
    def probed(self, answered: bool) -> None:
        if self.state is not BreakerState.PROBING:
            return
        if answered:
            self.breaker.probe_answered()
            self.state, self.row, self.recovered = BreakerState.CLOSED, 0, self.clock.now
        else:
            self.breaker.probe_failed(PROBLEM)
            self.opens(relapse=True)

    @invariant()
    def agrees(self) -> None:
        memory = self.breaker.memory
        assert memory.state is self.state
        assert self.breaker.closed == (self.state is BreakerState.CLOSED)
        assert (memory.problem is None) == (self.state is BreakerState.CLOSED)
        if self.state is BreakerState.OPEN:
            assert memory.retry_at == self.retry_at


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_place_that_is_not_known_yet_is_probed_at_once() -> None:
    breaker = Breaker(POLICY, Clock())
    breaker.open(PROBLEM)
    assert not breaker.closed and breaker.begin_probe()


def test_one_of_many_threads_probes() -> None:
    breaker = Breaker(POLICY, Clock())
    breaker.open(PROBLEM)
    begun: list[bool] = []
    threads = [threading.Thread(target=lambda: begun.append(breaker.begin_probe())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(begun) == [False] * 7 + [True]


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-4, 10)), min_size=1, max_size=30))
def test_pace_is_a_mean_of_seconds_per_byte(transfers: list[tuple[int, float]]) -> None:
    pace = Pace()
    assert pace.seconds_for(1 << 20) == 0
    mean: float | None = None
    for num_bytes, seconds in transfers:
        pace.transferred(num_bytes, seconds)
        mean = seconds / num_bytes if mean is None else 0.8 * mean + 0.2 * seconds / num_bytes
    assert mean is not None
    assert math.isclose(pace.seconds_for(1 << 20), mean * (1 << 20), rel_tol=1e-6)
    assert math.isclose(pace.bytes_per_second, 1 / mean, rel_tol=1e-6)


def test_pace_of_answers() -> None:
    pace = Pace()
    for seconds in (1.0, 2.0):
        pace.answered(seconds)
    pace.transferred(0, 1.0)
    assert math.isclose(pace.latency_s, 1.2)
    assert pace.bytes_per_second == 0
