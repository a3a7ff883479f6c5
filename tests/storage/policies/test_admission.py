# SPDX-License-Identifier: Apache-2.0
"""Admission policies: what they let in, what they remember, and that they decide alike in every process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter

import pytest

from kvcache.storage.policies import ADMISSIONS, AdmissionPolicy
from kvcache.storage.policies.tinylfu import FrequencySketch
from kvcache.tokens.keys import CacheEngineKey
from tests.storage.policies.test_interface import remembered


def new_key(rng: random.Random) -> CacheEngineKey:
    return CacheEngineKey(rng.randbytes(16), bytes(16), 0)


def test_second_use_is_let_in() -> None:
    rng = random.Random()
    policy: AdmissionPolicy[CacheEngineKey] = ADMISSIONS["SecondUse"](20)
    history: list[CacheEngineKey] = []
    keys = [new_key(rng) for _ in range(500)]
    let_in = 0
    for _ in range(5_000):
        key = rng.choice(keys)
        recent = list(dict.fromkeys(reversed(history)))[:200]
        policy.seen(key)
        assert policy.admits(key, rng.choice([None, keys[0]])) == (key in recent)
        let_in += key in recent
        history.append(key)
    assert 500 < let_in < 4_500


@pytest.mark.parametrize("name", ["SecondUse", "Adaptive"])
def test_memory_is_bounded(name: str) -> None:
    policy: AdmissionPolicy[str] = ADMISSIONS[name](30)
    for step in range(9_000):
        policy.seen(f"key {step}")
    assert len(remembered(policy)) <= 5_000, "with what waits to be taken in"
    for _ in range(20):
        policy.admits("key 8999", "key 1")
    assert 30 <= len(remembered(policy)) <= 300


def test_sketch_never_counts_too_little() -> None:
    """Up to what a counter holds, and before the counts are halved."""
    rng = random.Random()
    sketch = FrequencySketch(500)
    keys = [new_key(rng) for _ in range(900)]
    count: Counter[CacheEngineKey] = Counter()
    for _ in range(4_900):
        key = keys[min(int(rng.expovariate(1 / 200)), 899)]
        sketch.add(key)
        count[key] += 1
    too_much = 0
    for key in keys:
        assert sketch.estimate(key) >= min(count[key], 16)
        too_much += sketch.estimate(key) > count[key]
    assert too_much < 90, "wide rows leave few collisions"


def test_sketch_forgets() -> None:
    rng = random.Random()
    sketch = FrequencySketch(100)
    key = new_key(rng)
    for _ in range(12):
        sketch.add(key)
    before = sketch.estimate(key)
    for _ in range(987):
        sketch.add(new_key(rng))
    assert before == 12 <= sketch.estimate(key) <= 14
    sketch.add(new_key(rng))
    assert sketch.estimate(key) in (5, 6, 7), "halved after ten uses for each key that there is room for"
    for _ in range(499):
        sketch.add(new_key(rng))
    assert sketch.estimate(key) in (5, 6, 7, 8)
    sketch.add(new_key(rng))
    assert sketch.estimate(key) in (2, 3, 4), "and half of the sample was left to count"
    for _ in range(5_000):
        sketch.add(new_key(rng))
    assert sketch.estimate(key) <= 3


def test_tinylfu_lets_in_what_is_used_more_often() -> None:
    rng = random.Random()
    policy = ADMISSIONS["TinyLFU"](1_000)
    often, twice, once, never = (new_key(rng) for _ in range(4))
    for key, uses in ((often, 9), (twice, 2), (once, 1)):
        for _ in range(uses):
            policy.seen(key)
    order = [never, once, twice, often]
    for place, key in enumerate(order):
        assert policy.admits(key, None)
        for other, victim in enumerate(order):
            assert policy.admits(key, victim) == (place > other)


def test_keys_and_their_bytes_count_alike() -> None:
    rng = random.Random()
    sketch = FrequencySketch(100)
    key = new_key(rng)
    sketch.add(key)
    sketch.add(key.to_bytes())
    assert sketch.estimate(key) == sketch.estimate(key.to_bytes()) == 2


_DECIDE = """
import random
from kvcache.storage.policies import ADMISSIONS
rng = random.Random(5)
keys = [rng.randbytes(16) for _ in range(300)]
for name in sorted(ADMISSIONS):
    policy = ADMISSIONS[name](20)
    for _ in range(3000):
        key, victim = keys[min(int(rng.expovariate(1 / 60)), 299)], rng.choice(keys)
        policy.seen(key)
        print(int(policy.admits(key, victim)), end="")
"""


def test_every_process_decides_alike() -> None:
    answers = {
        subprocess.run(
            [sys.executable, "-c", _DECIDE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "77")
    }
    (answer,) = answers
    assert len(answer) == 9_000
    assert set(answer) == {"0", "1"}


def test_adaptive_lets_all_in_while_there_is_room() -> None:
    rng = random.Random()
    policy: AdmissionPolicy[CacheEngineKey] = ADMISSIONS["Adaptive"](10)
    for _ in range(3_000):
        key = new_key(rng)
        policy.seen(key)
        assert policy.admits(key, None)


def test_adaptive_learns_what_is_not_worth_writing() -> None:
    """Half of the uses go to keys that come back soon and often, the others to keys that never do."""
    rng = random.Random()
    capacity = 100
    policy: AdmissionPolicy[CacheEngineKey] = ADMISSIONS["Adaptive"](capacity)
    popular = [new_key(rng) for _ in range(80)]
    let_in = Counter[bool]()
    for step in range(20_000):
        again = rng.random() < 0.5
        key = rng.choice(popular) if again else new_key(rng)
        policy.seen(key)
        if step > 10_000:
            let_in[again] += policy.admits(key, popular[0])
    assert let_in[True] > 4_000
    assert let_in[False] < 500


def test_adaptive_changes_its_mind() -> None:
    """What is used once begins to come back, soon after."""
    rng = random.Random()
    capacity = 100
    policy: AdmissionPolicy[CacheEngineKey] = ADMISSIONS["Adaptive"](capacity)
    popular = [new_key(rng) for _ in range(80)]
    last: list[CacheEngineKey] = []
    early, late = Counter[bool](), Counter[bool]()
    for step in range(40_000):
        new = False
        if rng.random() < 0.5:
            key = rng.choice(popular)
        elif step > 20_000 and last and rng.random() < 0.5:
            key = last.pop(0)
        else:
            new = True
            key = new_key(rng)
            last = [*last, key][-10:]
        policy.seen(key)
        if new and (10_000 < step < 20_000 or step > 30_000):
            (early if step < 20_000 else late)[policy.admits(key, popular[0])] += 1
    assert early[False] > 4 * early[True]
    assert late[True] > 4 * late[False]
