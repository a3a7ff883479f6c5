# SPDX-License-Identifier: Apache-2.0
"""Times to the first token, and the seconds in which prompts are computed."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from kvcache.integration.vllm.first_tokens import BOUNDS_S, FirstTokens


class _Request:
    """What is read of vLLM's request."""

    def __init__(self, name: str, arrival: float, prompt: int) -> None:
        self.request_id = name
        self.arrival_time = arrival
        self.num_prompt_tokens = prompt
        self.num_output_tokens = 0


class _World:
    def __init__(self) -> None:
        self.now = 1000.0
        self.first_tokens = FirstTokens(wall=lambda: self.now, clock=lambda: self.now - 900.0)

    def scheduled(self, name: str, *, arrival: float, prompt: int, cache: int = 0, gpu: int = 0) -> _Request:
        request = _Request(name, arrival, prompt)
        self.first_tokens.scheduled(cast(Any, request), cache, gpu)
        return request


def test_each_request_is_observed_once_under_its_best_outcome() -> None:
    world = _World()
    waits = {"hit_cache": 0.04, "hit_gpu": 0.2, "computed": 7.5}
    requests = [
        world.scheduled(outcome, arrival=world.now, prompt=100, cache=cache, gpu=gpu)
        for outcome, cache, gpu in (("hit_cache", 64, 16), ("hit_gpu", 0, 16), ("computed", 0, 0))
    ]
    world.first_tokens.look()
    for request in requests:
        world.now = 1000.0 + waits[request.request_id]
        request.num_output_tokens = random.randint(1, 5)
        world.first_tokens.look()
        world.first_tokens.look()
        world.first_tokens.ended(request.request_id)
    for outcome, found in world.first_tokens.stats().items():
        assert found.sum == pytest.approx(waits[outcome])
        assert sum(found.counts) == 1
        bucket = found.counts.index(1)
        assert found.bounds[bucket - 1] < waits[outcome] <= found.bounds[bucket]


def test_what_never_had_a_token_is_not_observed() -> None:
    world = _World()
    world.scheduled("aborted", arrival=world.now, prompt=50)
    world.now += 3.0
    world.first_tokens.ended("aborted")
    world.first_tokens.ended("never seen")
    assert all(not any(found.counts) for found in world.first_tokens.stats().values())
    assert world.first_tokens.prefill_tokens == 0
    assert world.first_tokens.prefill_seconds == pytest.approx(3.0)


def test_prompts_that_are_computed_together_share_the_seconds() -> None:
    world = _World()
    first = world.scheduled("first", arrival=world.now, prompt=300)
    world.now += 1.0
    second = world.scheduled("second", arrival=world.now, prompt=200)
    hit = world.scheduled("hit", arrival=world.now, prompt=5000, cache=4096)
    world.now += 1.0
    first.num_output_tokens = hit.num_output_tokens = 1
    world.first_tokens.look()
    assert world.first_tokens.prefill_seconds == 0.0
    world.now += 2.0
    second.num_output_tokens = 1
    world.first_tokens.look()
    world.now += 50.0
    assert world.first_tokens.prefill_tokens == 500
    assert world.first_tokens.prefill_seconds == pytest.approx(4.0)


def test_a_clock_that_was_set_back_and_the_longest_bucket() -> None:
    world = _World()
    for name, arrival in (("future", world.now + 5.0), ("ancient", 0.0)):
        world.scheduled(name, arrival=arrival, prompt=1).num_output_tokens = 1
    world.first_tokens.look()
    found = world.first_tokens.stats()["computed"]
    assert (found.counts[0], found.counts[len(BOUNDS_S)], found.sum) == (1, 1, 1000.0)
