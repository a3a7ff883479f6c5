# SPDX-License-Identifier: Apache-2.0
"""What holds for every eviction policy, whatever it thinks: keys are never lost or doubled, nothing leaves
that may not, a chain is given up from its end, and what is remembered is bounded."""

from __future__ import annotations

import operator
import random
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache.storage.policies import POLICIES
from kvcache.storage.policies.base import EvictionPolicy

KEYS = st.integers(0, 15)


def parent_of(key: int) -> int:
    """The keys make a tree with 0 at its root."""
    return (key - 1) // 2


class Machine(RuleBasedStateMachine):
    """The model: a set of keys in a tree, some of them pinned."""

    @initialize(name=st.sampled_from(sorted(POLICIES)), capacity=st.integers(1, 12), tells=st.booleans())
    def start(self, name: str, capacity: int, tells: bool) -> None:
        self.policy: EvictionPolicy[int] = POLICIES[name](capacity)
        self.here: set[int] = set()
        self.pinned: set[int] = set()
        self.tells = tells
        """Whether the tier says when a key becomes a leaf."""

    def is_leaf(self, key: int) -> bool:
        return not {2 * key + 1, 2 * key + 2} & self.here

    def evictable(self, key: int) -> bool:
        assert key in self.here, "asked about a key that is not there"
        return self.is_leaf(key) and key not in self.pinned

    def gone(self, key: int) -> None:
        self.here.remove(key)
        parent = parent_of(key)
        if self.tells and parent in self.here and self.is_leaf(parent):
            self.policy.became_leaf(parent)

    @rule(key=KEYS)
    def use(self, key: int) -> None:
        if key in self.here:
            self.policy.touch(key)
        elif key == 0 or parent_of(key) in self.here:
            self.policy.admit(key)
            self.here.add(key)

    @rule(key=KEYS)
    def pin(self, key: int) -> None:
        self.pinned ^= {key}

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        if key in self.here:
            self.policy.remove(key)
            self.gone(key)

    @rule(evict=st.sampled_from(["victim", "candidate", "not"]))
    def victim(self, evict: str) -> None:
        if evict == "victim":
            victim = self.policy.victim(self.evictable)
        else:
            victim = self.policy.candidate(self.evictable)
        free = {key for key in self.here if self.evictable(key)}
        assert victim in free if free else victim is None
        if victim is None or evict == "not":
            return
        if evict == "candidate":
            self.policy.evict(victim)
        self.gone(victim)

    @invariant()
    def counts(self) -> None:
        assert len(self.policy) == len(self.here)

    def teardown(self) -> None:
        """Every key leaves, once."""
        self.pinned = set()
        left = []
        while (victim := self.policy.victim(self.evictable)) is not None:
            left.append(victim)
            self.gone(victim)
        assert not self.here
        assert len(self.policy) == 0
        assert len(set(left)) == len(left)


TestInterface = Machine.TestCase
TestInterface.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("name", POLICIES)
def test_memory_is_bounded(name: str) -> None:
    rng = random.Random()
    capacity = 50
    policy: EvictionPolicy[str] = POLICIES[name](capacity)
    here: list[str] = []
    for step in range(5_000):
        if here and rng.random() < 0.3:
            policy.touch(rng.choice(here))
            continue
        key = f"key {step if rng.random() < 0.7 else rng.randrange(2_000)}"
        if key in here:
            continue
        if len(here) == capacity:
            victim = policy.victim(lambda _: True)
            assert victim is not None
            here.remove(victim)
        policy.admit(key)
        here.append(key)
    assert capacity <= len(remembered(policy)) <= 6 * capacity


def remembered(value: Any) -> set[str]:
    """All keys (here: strings) in what an object holds."""
    if isinstance(value, str):
        return {value} if value.startswith("key ") else set()
    parts: list[Any] = []
    if isinstance(value, (dict, OrderedDict)):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set)):
        parts = list(value)
    elif hasattr(value, "__dict__"):
        parts = list(vars(value).values())
    return set().union(*(remembered(part) for part in parts))


@pytest.mark.parametrize("name", POLICIES)
def test_chains_go_from_their_ends(name: str) -> None:
    """Chains whose starts were not touched last, as when they were written while others came."""
    rng = random.Random()
    policy: EvictionPolicy[tuple[int, int]] = POLICIES[name](200)
    length = {chain: rng.randint(1, 30) for chain in range(20)}
    keys = [(chain, place) for chain in length for place in range(length[chain])]
    for key in sorted(keys, key=lambda key: (key[1], rng.random())):
        policy.admit(key)
    for _ in range(100):
        policy.touch(rng.choice(keys))
    for _ in keys:
        victim = policy.victim(lambda key: key[1] == length[key[0]] - 1)
        assert victim is not None
        chain, place = victim
        assert place == length[chain] - 1
        length[chain] -= 1
        if place:
            policy.became_leaf((chain, place - 1))
    assert len(policy) == 0


@pytest.mark.parametrize("name", POLICIES)
def test_keys_that_may_not_leave_are_not_met_again_and_again(name: str) -> None:
    policy: EvictionPolicy[int] = POLICIES[name](4_000)
    for key in range(3_000):
        policy.admit(key)
    for key in range(1_000):
        policy.touch(key)
    pinned = set(range(2_000))
    asked = 0

    def evictable(key: int) -> bool:
        nonlocal asked
        asked += 1
        return key not in pinned

    for _ in range(1_000):
        assert policy.victim(evictable) is not None
    assert asked <= 3_000 + 20 * 1_000


@pytest.mark.parametrize("uses", range(5))
@pytest.mark.parametrize("name", POLICIES)
def test_what_was_passed_over_leaves_later(name: str, uses: int) -> None:
    policy: EvictionPolicy[int] = POLICIES[name](10)
    for key in range(10):
        policy.admit(key)
        for _ in range(uses):
            policy.touch(key)
    assert policy.candidate(lambda key: False) is None
    for only in random.Random().sample(range(10), 10):
        assert policy.victim(partial(operator.eq, only)) == only
    assert len(policy) == 0
