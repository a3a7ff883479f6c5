# SPDX-License-Identifier: Apache-2.0
"""The scheduler side's books: where tokens came from, blocks in doubt, and lookups that wait."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from kvcache.integration.vllm.counters import Prompt, Sources, TokenCounters, tokens_by_tier
from kvcache.integration.vllm.doubts import Doubts
from kvcache.integration.vllm.lookups import Lookups
from kvcache.integration.vllm.trackers import RequestTracker, request_of
from kvcache.lookup.client import LookupResult

runs = st.lists(st.tuples(st.sampled_from(["cpu", "disk", "remote"]), st.integers(1, 50)), max_size=5)


def sources_of(found: list[tuple[str, int]]) -> Sources:
    end, sources = 0, []
    for tier, tokens in found:
        end += tokens
        sources.append((tier, end))
    return tuple(sources)


@given(runs, st.integers(0, 200), st.integers(0, 200))
def test_every_token_is_of_one_tier(found: list[tuple[str, int]], first: int, more: int) -> None:
    each = [tier for tier, tokens in found for _ in range(tokens)] + ["cpu"] * 500
    expected = Counter(each[first : first + more])
    assert tokens_by_tier(sources_of(found), first, first + more) == expected


@given(runs, st.integers(0, 60), st.integers(0, 200), st.integers(0, 200))
def test_the_counters_add_up(found: list[tuple[str, int]], own: int, hit: int, wrong: int) -> None:
    counters, sources = TokenCounters(), sources_of(found)
    prompt = own + hit + 7
    counters.scheduled(Prompt(prompt, own, hit, sources), loading="0/r")
    assert (counters.open_prompts, counters.requests, counters.prompt_tokens) == (
        (1, 0, 0) if hit else (0, 1, prompt)
    )
    counters.load_ended("1/other", 5)
    counters.load_ended("0/r", wrong)
    counters.load_ended("0/r", 0)
    lost = min(wrong, hit)
    assert (counters.open_prompts, counters.requests, counters.prompt_tokens) == (0, 1, prompt)
    assert sum(counters.hit_cache_tokens.values()) == hit - lost
    assert counters.hit_gpu_tokens + hit - lost + counters.computed_tokens == prompt
    assert counters.hit_cache_tokens == tokens_by_tier(sources, own, own + hit - lost)


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.none() | st.integers(0, 120)), max_size=9)
)
def test_no_counter_ever_falls(requests: list[tuple[int, int, int | None]]) -> None:
    """Requests of own and hit tokens, and what a load misses; None where nothing is loaded."""
    counters = TokenCounters()
    values: list[tuple[int, ...]] = []

    def look() -> None:
        hits = [counters.hit_cache_tokens[tier] for tier in ("cpu", "disk")]
        values.append((*hits, counters.hit_gpu_tokens, counters.computed_tokens))
        assert sum(values[-1]) == counters.prompt_tokens

    for number, (own, hit, missing) in enumerate(requests):
        loading = None if missing is None else f"0/{number}"
        counters.scheduled(Prompt(own + hit + 1, own, hit, (("disk", own + hit // 2),)), loading)
        look()
    for number, (_, _, missing) in enumerate(requests):
        counters.load_ended(f"0/{number}", missing or 0)
        look()
    assert (counters.open_prompts, counters.requests) == (0, len(requests))
    for before, after in itertools.pairwise(values):
        assert all(b <= a for b, a in zip(before, after, strict=True))


def test_an_old_loads_outcome_leaves_a_newer_ones_doubt() -> None:
    """With three batches in flight a request can be preempted and loaded again before the first load is
    heard of."""
    doubts = Doubts(block_size=4)
    doubts.load_planned("0/r", [1, 2], 8)
    doubts.load_planned("1/r", [3, 4], 8)
    doubts.load_ended("0/r", 0, [])
    assert doubts.allow_storing([1, 2])
    assert not doubts.allow_storing([3, 5])
    doubts.load_ended("1/r", 4, [[3, 4, 6]])
    assert not doubts.allow_storing([4])
    assert not doubts.allow_storing([6])
    assert doubts.allow_storing([3])


def test_the_request_of_a_lookup() -> None:
    assert request_of("3/a/b") == "a/b"


NOTHING = LookupResult(0, False)


@dataclass
class Client:
    """A lookup client that is told what it finds."""

    result: LookupResult = NOTHING
    asked: list[tuple[str, int]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def lookup(self, lookup_id: str, digests: bytes, **more: Any) -> LookupResult:
        self.asked.append((lookup_id, more["skip"]))
        return self.result

    def progress(self, lookup_id: str) -> LookupResult:
        return self.result

    def settle(self, lookup_id: str) -> int:
        self.ended.append(f"settled {lookup_id}")
        return self.result.chunks

    def cancel(self, lookup_id: str) -> None:
        self.ended.append(f"cancelled {lookup_id}")

    def clear(self, lookup_id: str) -> None:
        self.ended.append(f"cleared {lookup_id}")


@dataclass
class Request:
    request_id: str = "r"


CHUNK = 16


@dataclass
class Rig:
    now: float = 50.0

    def __post_init__(self) -> None:
        self.client = Client()
        self.lookups = Lookups(cast(Any, self.client), CHUNK, 100.0, lambda: 0.0, lambda: self.now)
        self.tracker = RequestTracker(cast(Any, Request()), None)

    def ask(self, own_tokens: int = 0, tokens: int = 5 * CHUNK) -> int | None:
        """As the scheduler does: None while the request waits."""
        if self.lookups.due(self.tracker, own_tokens):
            self.lookups.begin(self.tracker, bytes(16 * 5), tokens, own_tokens)
        return None if self.lookups.waits(self.tracker) else self.tracker.hit_tokens


def test_a_lookup_waits_until_all_has_come() -> None:
    rig = Rig()
    rig.client.result = LookupResult(1, False, 1, 3, 2.0, (("cpu", 1),))
    assert rig.ask() is None
    rig.now += 1.9
    assert rig.ask() is None
    rig.client.result = LookupResult(4, False, 4, 0, 0.0, (("cpu", 1), ("disk", 3)))
    assert rig.ask() == 4 * CHUNK
    assert rig.tracker.sources == (("cpu", CHUNK), ("disk", 4 * CHUNK))
    assert rig.tracker.asked_tokens == 4 * CHUNK
    assert rig.ask() == 4 * CHUNK
    assert (rig.client.asked, rig.client.ended) == ([("0/r", 0)], ["settled 0/r"])
    assert (rig.lookups.waited.waits, rig.lookups.waited.expired) == (1, 0)
    assert round(rig.lookups.waited.seconds, 6) == 1.9


def test_after_the_deadline_it_takes_what_is_there() -> None:
    rig = Rig()
    rig.client.result = LookupResult(1, False, 1, 3, 2.0)
    assert rig.ask() is None
    rig.now += 2.0
    rig.client.result = LookupResult(2, False, 2, 2, 2.0)
    assert rig.ask() == 2 * CHUNK
    assert rig.lookups.waited.expired == 1


def test_nobody_waits_for_what_vllm_has() -> None:
    rig = Rig()
    rig.client.result = LookupResult(2, False, 0, 2, 2.0)
    assert rig.ask(own_tokens=4 * CHUNK) == 2 * CHUNK
    assert rig.client.asked == [("0/r", 4)]
    assert rig.tracker.asked_tokens == 0, "what vLLM has is stored all the same"


def test_a_lookup_is_asked_anew_when_vllm_has_lost_what_it_had() -> None:
    rig = Rig()
    rig.client.result = LookupResult(3, False, 0)
    assert rig.ask(own_tokens=2 * CHUNK + 5) == 3 * CHUNK
    assert rig.ask(own_tokens=3 * CHUNK) == 3 * CHUNK
    rig.client.result = LookupResult(1, False, 1, 4, 2.0)
    assert rig.ask(own_tokens=CHUNK) is None
    assert rig.ask(own_tokens=0) is None
    assert rig.client.asked == [("0/r", 2), ("0/r", 1), ("0/r", 0)]


def test_a_lease_is_renewed_in_time() -> None:
    rig = Rig()
    rig.client.result = LookupResult(2, False, 2)
    rig.ask()
    rig.now += 49.0
    rig.ask()
    assert len(rig.client.asked) == 1
    rig.now += 2.0
    rig.ask()
    assert len(rig.client.asked) == 2


def test_whoever_goes_while_waiting_leaves_nothing() -> None:
    rig = Rig()
    rig.client.result = LookupResult(0, False, 0, 3, 2.0)
    assert rig.ask() is None
    rig.lookups.cancel(rig.tracker)
    assert rig.client.ended == ["cancelled 0/r"]
    assert not rig.lookups._waiting
    assert rig.tracker.waits_until is None
