# SPDX-License-Identifier: Apache-2.0
"""A request waits one deadline for the tiers in all, however often it has to ask."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcache.lookup.client import LookupResult
from tests.integration.vllm.test_bookkeeping import CHUNK, Rig

DEADLINE_S = 2.0
MORE_IS_COMING = LookupResult(1, False, 1, 4, DEADLINE_S, (("cpu", 1),))


def wait(rig: Rig, seconds: float) -> bool:
    """Time goes by; whether the request still waits then."""
    rig.now += seconds
    return rig.ask() is None


def test_who_is_preempted_while_a_tier_is_slow_has_waited_already() -> None:
    rig = Rig()
    rig.client.result = MORE_IS_COMING
    assert wait(rig, 0.0)
    rig.client.result = LookupResult(5, False, 5, 0, 0.0, (("remote", 5),))
    assert not wait(rig, 1.5)
    rig.client.result = MORE_IS_COMING
    rig.tracker.hit_tokens, rig.tracker.preemptions = None, 1
    assert wait(rig, 100.0)
    assert wait(rig, 0.4)
    assert not wait(rig, 0.1)
    assert (rig.lookups.waited.waits, rig.lookups.waited.expired) == (2, 1)
    assert round(rig.lookups.waited.seconds, 6) == DEADLINE_S


def test_a_lookup_that_begins_anew_while_it_waits_goes_on_waiting() -> None:
    rig = Rig()
    rig.client.result = MORE_IS_COMING
    assert rig.ask(own_tokens=CHUNK) is None
    rig.now += 1.5
    assert rig.ask(own_tokens=0) is None, "vLLM has lost what it had: the ranks are asked again"
    assert len(rig.client.asked) == 2
    assert wait(rig, 0.4)
    assert not wait(rig, 0.1)


@given(
    st.lists(
        st.tuples(
            st.floats(0.001, 1.0), st.sampled_from(["waits", "preempted", "lost", "forgotten", "expired"])
        ),
        min_size=10,
        max_size=60,
    )
)
def test_all_waits_of_a_request_together_are_one_deadline(steps: list[tuple[float, str]]) -> None:
    """Each step takes some time, in which something happens that makes the request ask again."""
    rig = Rig()
    rig.client.result = MORE_IS_COMING
    own, waited, longest = 4 * CHUNK, 0.0, 0.0
    for seconds, event in steps:
        waits = rig.ask(own) is None
        rig.now += seconds
        if waits:
            waited, longest = waited + seconds, max(longest, seconds)
        if event == "preempted" and not waits:
            rig.tracker.hit_tokens = None
            rig.tracker.preemptions += 1
        elif event == "lost":
            own = max(0, own - CHUNK)
        elif event == "forgotten":
            rig.lookups.cancel(rig.tracker)
            rig.tracker.hit_tokens = None
        elif event == "expired":
            rig.tracker.ask_again_at = 0.0
        # It may ask last just before the deadline, and see only then that it is over.
        assert waited < DEADLINE_S + longest
    rig.client.result = replace_coming(MORE_IS_COMING)
    rig.ask(own)
    assert abs(rig.lookups.waited.seconds - waited) < 1e-6


def replace_coming(result: LookupResult) -> LookupResult:
    """Nothing more comes."""
    return result._replace(coming=0)
