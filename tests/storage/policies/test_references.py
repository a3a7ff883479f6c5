# SPDX-License-Identifier: Apache-2.0
"""Each policy against a plain, slow one of its paper: the same victims, one by one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvcache.storage.policies import POLICIES
from kvcache.storage.policies.base import EvictionPolicy
from tests.storage.policies.references import Frequency, Recency, Reference, Textbook, ThreeQueues

REFERENCES: dict[str, Callable[[int], Reference]] = {
    "LRU": Recency,
    "FIFO": lambda capacity: Recency(capacity, moves=False),
    "MRU": lambda capacity: Recency(capacity, victim=-1),
    "LFU": Frequency,
    "S3FIFO": ThreeQueues,
    "ARC": Textbook,
}


@pytest.mark.parametrize("capacity", [1, 2, 3, 10, 37])
@pytest.mark.parametrize("name", REFERENCES)
def test_same_victims(name: str, capacity: int) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    policy: EvictionPolicy[int] = POLICIES[name](capacity)
    reference = REFERENCES[name](capacity)
    popular = 3 * capacity + 2
    victims = 0
    for step in range(4_000):
        if rng.random() < 0.01:
            popular = rng.randint(1, 6 * capacity)
        key = rng.randrange(popular) if rng.random() < 0.8 else step + 1_000_000
        here = f"seed {seed}, step {step}, key {key}"
        present = reference.keys()
        if key not in present:
            gone = policy.victim(lambda _: True) if len(policy) == capacity else None
            policy.admit(key)
            assert gone == reference.miss(key), here
            victims += gone is not None
        elif rng.random() < 0.02:
            policy.remove(key)
            reference.drop(key)
        else:
            policy.touch(key)
            reference.hit(key)
        assert len(policy) == len(reference.keys()), here
    assert victims > 200


def test_lfu_finds_a_newcomer_below_what_it_looked_at() -> None:
    policy: EvictionPolicy[str] = POLICIES["LFU"](10)
    policy.admit("pinned")
    policy.admit("often")
    for _ in range(5):
        policy.touch("often")
    assert policy.candidate(lambda key: key != "pinned") == "often"
    policy.admit("new")
    assert policy.victim(lambda key: key != "pinned") == "new"
