# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache.memory.lease import LeaseBook


class Entry:
    """Told apart by identity, as stored chunks are."""


class Leases(RuleBasedStateMachine):
    """Against a plain model: a set of (owner, key) pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ended: Counter[int] = Counter()
        self.entries = {key: Entry() for key in range(6)}
        self.book: LeaseBook[int, Entry] = LeaseBook(
            lambda key, entry: self.ended.update([key]), 10.0, lambda: self.now
        )
        self.model: dict[str, tuple[float, set[int]]] = {}
        self.expected: Counter[int] = Counter()

    def held(self, key: int) -> bool:
        return any(key in keys for _, keys in self.model.values())

    def end(self, owner: str) -> int:
        _, keys = self.model.pop(owner, (0.0, set()))
        self.expected.update(key for key in keys if not self.held(key))
        return len(keys)

    @rule(owner=st.sampled_from("abc"), keys=st.sets(st.integers(0, 5)))
    def take(self, owner: str, keys: set[int]) -> None:
        self.book.take(owner, [(key, self.entries[key]) for key in keys])
        self.model[owner] = (self.now + 10.0, self.model.get(owner, (0.0, set()))[1] | keys)

    @rule(owner=st.sampled_from("abc"))
    def end_owner(self, owner: str) -> None:
        assert self.book.end(owner) == self.end(owner)

    @rule(seconds=st.floats(0, 15))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = [owner for owner, (deadline, _) in self.model.items() if deadline <= self.now]
        assert sorted(self.book.expire()) == sorted(late)
        for owner in late:
            self.end(owner)

    @rule()
    def end_some(self) -> None:
        gone = [owner for owner in self.model if owner != "b"]
        assert self.book.end_where(lambda owner: owner != "b") == len(gone)
        for owner in gone:
            self.end(owner)

    @invariant()
    def same(self) -> None:
        assert self.ended == self.expected
        assert len(self.book) == sum(self.held(key) for key in self.entries)
        for key, entry in self.entries.items():
            assert self.book.held(entry) == self.held(key)
            for owner in "abc":
                in_model = key in self.model.get(owner, (0.0, set()))[1]
                assert (self.book.get(owner, key) is entry) == in_model


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_key_that_means_another_entry_now_moves_the_lease() -> None:
    ended: list[tuple[str, Entry]] = []
    book: LeaseBook[str, Entry] = LeaseBook(lambda key, entry: ended.append((key, entry)), 10.0, lambda: 0.0)
    old, new = Entry(), Entry()
    book.take("a", [("k", old)])
    book.take("a", [("k", new)])
    assert ended == [("k", old)]
    assert book.get("a", "k") is new
    assert book.end("a") == 1
    assert ended == [("k", old), ("k", new)]
