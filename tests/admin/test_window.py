# SPDX-License-Identifier: Apache-2.0
"""The window of hits against a list of everything that happened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.admin.window import Hits, HitWindow
from tests.control.processes import scheduler_stats

tokens = st.integers(0, 1000)
steps = st.lists(
    st.tuples(
        st.floats(0, 90).map(lambda seconds: round(seconds, 2)),
        st.booleans(),  # the scheduler restarted before this
        tokens,  # gpu
        tokens,  # cache
        tokens,  # computed
    ),
    min_size=1,
    max_size=60,
)


@given(steps)
def test_it_is_the_sum_of_what_happened_since_its_oldest_sample(
    steps: list[tuple[float, bool, int, int, int]],
) -> None:
    window = HitWindow(span_s=300)
    now = 1000.0
    pid = 1
    life = [0, 0, 0]
    happened: list[tuple[float, int, int, int]] = []  # when it was first seen
    for passed, restarted, gpu, cache, computed in steps:
        now += passed
        if restarted:
            pid, life = pid + 1, [0, 0, 0]
        life = [life[0] + gpu, life[1] + cache, life[2] + computed]
        happened.append((now, gpu, cache, computed))
        window.add(
            now,
            scheduler_stats(
                pid=pid,
                prompt_tokens=sum(life),
                hit_gpu_tokens=life[0],
                hit_cache_tokens={"cpu": life[1]},
                computed_tokens=life[2],
            ),
        )
        begin = now - window.seconds
        seen = [event for event in happened[1:] if event[0] > begin + 1e-6]
        least = [sum(event[i] for event in seen) for i in (1, 2, 3)]
        # What happened at the very time of the oldest sample may count or not.
        at_begin = [event for event in happened[1:] if abs(event[0] - begin) <= 1e-6]
        most = [least[i] + sum(event[i + 1] for event in at_begin) for i in range(3)]
        assert least[0] <= window.hits.hit_gpu_tokens <= most[0]
        assert least[1] <= window.hits.hit_cache_tokens <= most[1]
        assert sum(least) <= window.hits.prompt_tokens <= sum(most)
        older = [event[0] for event in happened if event[0] <= now - 300]
        if older:
            assert window.seconds >= 300
        assert window.seconds <= 300 + 90 + 1


def test_nothing_seen_yet() -> None:
    window = HitWindow()
    assert (window.seconds, window.hits, window.hits.hit_rate) == (0, Hits(), None)


def test_a_restart_under_the_same_pid_is_seen_by_falling_counters() -> None:
    window = HitWindow()
    window.add(0, scheduler_stats(pid=5, prompt_tokens=100))
    window.add(10, scheduler_stats(pid=5, prompt_tokens=130))
    window.add(20, scheduler_stats(pid=5, prompt_tokens=20, hit_cache_tokens={"cpu": 15}))
    assert window.hits == Hits(prompt_tokens=50, hit_cache_tokens=15)


def test_frequent_readers_do_not_fill_the_memory() -> None:
    window = HitWindow(span_s=10)
    for tick in range(10_000):
        window.add(tick / 100, scheduler_stats(prompt_tokens=tick))
    assert len(window._samples) <= 12
    assert window.hits.prompt_tokens == pytest.approx(1000, abs=101)


@pytest.mark.parametrize(
    ("hits", "rate"),
    [
        (Hits(), None),
        (Hits(prompt_tokens=10, hit_gpu_tokens=10), None),
        (Hits(prompt_tokens=10, hit_gpu_tokens=6, hit_cache_tokens=3), 0.75),
        (Hits(prompt_tokens=10), 0.0),
    ],
)
def test_the_rate_leaves_out_what_vllm_had_itself(hits: Hits, rate: float | None) -> None:
    assert hits.hit_rate == rate
