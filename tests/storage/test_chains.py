# SPDX-License-Identifier: Apache-2.0
"""Whatever happens in host memory: what is there can be hit, tenants keep to their quotas, and pins hold."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache.storage.pins import PinRefusedError
from kvcache.storage.tier import NO_PARENT, NO_TENANT, ClearScope
from kvcache.storage.tiers.cpu import Outcome
from kvcache.tokens.keys import CacheEngineKey
from tests.storage.rigs import CHUNK, SHAPE, Rig, chain, parent_of

TENANTS = [NO_TENANT, b"a" * 16, b"b" * 16]
QUOTAS = {TENANTS[1]: 3 * SHAPE.chunk_bytes, TENANTS[2]: SHAPE.chunk_bytes // 2}
SLOTS = 10


def prompts() -> list[list[CacheEngineKey]]:
    """A tree: prompts that share beginnings, each tenant's apart."""
    made = []
    for tenant in range(len(TENANTS)):
        trunk = chain(f"{tenant}t", 4)
        made += [trunk, [*trunk[:2], *chain(f"{tenant}u", 3)], [*trunk[:3], *chain(f"{tenant}v", 2)]]
    return made


PROMPTS = prompts()


class ChainMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(slots=SLOTS, cpu={"quota": QUOTAS.get})
        self.tier = self.rig.tier
        self.parents: dict[CacheEngineKey, CacheEngineKey | None] = {
            key: prompt[at - 1] if at else None for prompt in PROMPTS for at, key in enumerate(prompt)
        }
        self.pinned: set[CacheEngineKey] = set()

    def visible(self, key: CacheEngineKey) -> bool:
        return key in self.tier

    @rule(number=st.integers(0, len(PROMPTS) - 1))
    def compute(self, number: int) -> None:
        """From the first missing chunk on, one after the other, up to the first that finds no room."""
        prompt, tenant = PROMPTS[number], TENANTS[number // 3]
        for at in range(self.tier.lookup(prompt), len(prompt)):
            outcome, obj = self.tier.reserve(prompt[at], CHUNK, tenant, parent_of(prompt, at))
            if obj is None:
                assert outcome in (Outcome.FULL, Outcome.DECLINED)
                assert outcome is Outcome.FULL or tenant in QUOTAS
                break
            self.tier.publish([prompt[at]])
        assert number // 3 < 2 or not self.visible(prompt[0]), "a chunk is more than this tenant may have"

    @rule(number=st.integers(0, len(PROMPTS) - 1), owner=st.sampled_from("xy"))
    def lookup(self, number: int, owner: str) -> None:
        self.tier.lookup_and_lease(PROMPTS[number], owner)

    @rule(owner=st.sampled_from("xy"))
    def release(self, owner: str) -> None:
        self.tier.release(owner)

    @rule(number=st.integers(0, len(PROMPTS) - 1), owner=st.sampled_from("pq"))
    def pin(self, number: int, owner: str) -> None:
        try:
            self.rig.pins.pin(owner, PROMPTS[number])
        except PinRefusedError:
            assert len(self.pinned | set(PROMPTS[number])) > SLOTS // 2
        else:
            self.pinned |= set(PROMPTS[number])

    @rule(owner=st.sampled_from("pq"))
    def unpin(self, owner: str) -> None:
        self.rig.pins.unpin(owner)
        self.pinned = {key for key in self.parents if self.rig.pins.pinned(key)}

    @rule(data=st.data(), force=st.booleans())
    def clear(self, data: st.DataObject, force: bool) -> None:
        scope = data.draw(
            st.sampled_from(
                [
                    ClearScope(pinned_too=force),
                    ClearScope(tenant=TENANTS[1], pinned_too=force),
                    ClearScope(namespace=bytes(16), pinned_too=force),
                    ClearScope(namespace=b"n" * 16, pinned_too=force),
                    ClearScope(keys=PROMPTS[0][1:2], pinned_too=force),
                ]
            )
        )
        before = {key for key in self.parents if self.visible(key)}
        scope = self.tier.behind(scope)
        gone = {
            key
            for key in before
            if scope.covers(key, TENANTS[int(key.chunk_hash[:1])]) and (force or key not in self.pinned)
        }
        self.tier.clear(scope)
        assert {key for key in self.parents if self.visible(key)} == before - gone
        if scope.keys is not None:
            assert all(not self.visible(key) or key in self.pinned for key in PROMPTS[0][1:])

    @rule(chunks=st.integers(3, SLOTS + 4))
    def resize(self, chunks: int) -> None:
        assert self.tier.resize(chunks * SHAPE.chunk_bytes) == min(chunks, SLOTS) * SHAPE.chunk_bytes

    @invariant()
    def what_is_there_can_be_hit(self) -> None:
        for key, parent in self.parents.items():
            assert not self.visible(key) or parent is None or self.visible(parent)

    @invariant()
    def tenants_keep_to_their_quotas(self) -> None:
        for tenant, quota in QUOTAS.items():
            held = [e for e in self.tier._index.values() if e.tenant == tenant]
            assert len(held) * SHAPE.chunk_bytes <= quota

    def teardown(self) -> None:
        self.rig.storage.close()


TestChains = ChainMachine.TestCase
TestChains.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_pinned_prefix_outlives_everything_else() -> None:
    rig = Rig(slots=8)
    keys = chain("pinned", 3)
    rig.pins.pin("owner", keys)
    rig.store(keys)
    for number in range(30):
        rig.store(chain(f"o{number}", random.randint(1, 3)))
    assert rig.tier.lookup(keys) == 3
    assert rig.storage.clear(ClearScope())["cpu"].result().kept == 3
    assert rig.tier.lookup(keys) == 3
    assert rig.storage.unpin("owner") == 3
    for number in range(30):
        rig.store(chain(f"p{number}", 3))
    assert rig.tier.lookup(keys) == 0
    rig.storage.close()


def test_pins_take_at_most_half() -> None:
    rig = Rig(slots=8)
    keys = chain("a", 5)
    with pytest.raises(PinRefusedError, match="5 chunks would be pinned, at most 4"):
        rig.storage.pin("x", keys)
    assert rig.storage.pinned() == []
    rig.storage.pin("x", keys[:4])
    rig.storage.pin("y", keys[:2])
    assert [tuple(pin) for pin in rig.storage.pinned()] == [("x", 4), ("y", 2)]
    assert rig.storage.stats()[0].pinned_objects == 4
    assert rig.storage.unpin("x") == 4
    assert rig.storage.pins.pinned(keys[0])
    assert not rig.storage.pins.pinned(keys[2])
    assert rig.storage.unpin("nobody") == 0
    rig.storage.close()


def test_a_chain_does_not_push_out_its_own_start() -> None:
    rig = Rig(slots=4)
    keys = chain("long", 9)
    outcomes = [rig.store(keys, at, at + 1)[0] for at in range(5)]
    assert outcomes == [Outcome.RESERVED] * 4 + [Outcome.FULL]
    assert rig.tier.lookup(keys) == 4
    rig.storage.close()


def test_chains_of_different_ranks_are_apart() -> None:
    rig = Rig(slots=2)
    ours, theirs = chain("a", 2), chain("a", 2, rank=1)
    rig.store(ours, last=1)
    rig.store(theirs, first=1)
    # The second chunk of the other rank does not hold our first one.
    assert rig.store(chain("b", 1)) == [Outcome.RESERVED]
    assert ours[0] not in rig.tier
    rig.storage.close()


def test_the_first_chunk_of_a_chain_has_no_parent() -> None:
    assert parent_of(chain("a", 1), 0) == NO_PARENT
