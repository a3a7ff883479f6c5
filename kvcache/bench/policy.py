# SPDX-License-Identifier: Apache-2.0
"""Hit rates of the policies: a trace of requests is replayed through the very classes that the tiers use.

The tier of the replay does with the policies what the real ones do (`kvcache.storage.policies.base`): of each
request's blocks it finds those at its start that are there, without a gap, and offers all others; a block is
let in only after the one before it, and leaves only before it. Requests come one after another, and all
blocks are of one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from kvcache.bench.policy_traces import Request
from kvcache.storage.policies import ADMISSIONS, POLICIES, AdmissionPolicy, EvictionPolicy
from kvcache.tokens.hashing import digest128

ALWAYS = "Always"
"""The admission that needs no policy."""


@dataclass(frozen=True)
class Replayed:
    """What became of a trace."""

    reads: int
    """Blocks that were asked for."""
    hits: int
    """Those of them that were there, and all before them."""
    writes: int
    """Blocks that were stored."""

    @property
    def hit_rate(self) -> float:
        return self.hits / self.reads

    @property
    def writes_per_read(self) -> float:
        return self.writes / self.reads


class Trace:
    """Requests whose blocks are numbered from 0, with digests for keys and the block before each."""

    def __init__(self, requests: Sequence[Request]) -> None:
        numbers: dict[int, int] = {}
        self.requests = [
            [numbers.setdefault(block, len(numbers)) for block in request] for request in requests
        ]
        self.keys = [digest128(b"block", str(block).encode()) for block in numbers]
        self.numbers = {key: number for number, key in enumerate(self.keys)}
        self.parents: list[int | None] = [None] * len(numbers)
        for request in self.requests:
            for parent, block in pairwise(request):
                self.parents[block] = parent

    @property
    def blocks(self) -> int:
        """Different ones."""
        return len(self.keys)

    @property
    def reads(self) -> int:
        return sum(map(len, self.requests))


class ReplayTier:
    """A tier without bytes.

    Args:
        trace: whose requests it serves.
        capacity: blocks.
        eviction: who leaves first.
        admission: who is let in; everybody if None.
    """

    def __init__(
        self,
        trace: Trace,
        capacity: int,
        eviction: EvictionPolicy[bytes],
        admission: AdmissionPolicy[bytes] | None,
    ) -> None:
        self._trace = trace
        self._capacity = capacity
        self._eviction = eviction
        self._admission = admission
        self.here: set[int] = set()
        self._held: set[int] = set()
        """Blocks of the request that is served: nobody leaves for the rest of its own chain."""
        self._children = [0] * trace.blocks

    def serve(self, request: Sequence[int]) -> tuple[int, int]:
        """The number of blocks that were hits, and of those that were stored."""
        keys = self._trace.keys
        found = next((place for place, block in enumerate(request) if block not in self.here), len(request))
        self._held = set(request[:found])
        if self._admission is not None:
            for block in request:
                self._admission.seen(keys[block])
        for block in reversed(request[:found]):
            self._eviction.touch(keys[block])
        stored = list(takewhile(self._let_in, request[found:]))
        for block in stored:
            self._eviction.admit(keys[block])
        return found, len(stored)

    def _let_in(self, block: int) -> bool:
        key = self._trace.keys[block]
        if self._admission is not None and not self._admission.admits(key, None):
            return False
        self._expect(block)
        if len(self.here) >= self._capacity:
            victim = self._eviction.candidate(self._evictable)
            if victim is None or (self._admission is not None and not self._admission.admits(key, victim)):
                self._expect_no_more(block)
                return False
            self._eviction.evict(victim)
            gone = self._trace.numbers[victim]
            self.here.remove(gone)
            self._expect_no_more(gone)
        self.here.add(block)
        self._held.add(block)
        return True

    def _expect(self, block: int) -> None:
        """The one before it has a block behind it."""
        parent = self._trace.parents[block]
        if parent is not None:
            self._children[parent] += 1

    def _expect_no_more(self, block: int) -> None:
        parent = self._trace.parents[block]
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                self._eviction.became_leaf(self._trace.keys[parent])

    def _evictable(self, key: bytes) -> bool:
        block = self._trace.numbers[key]
        return not self._children[block] and block not in self._held


def replay(trace: Trace, capacity: int, eviction: str, admission: str) -> Replayed:
    """Replays a trace through a tier that is empty at first.

    Args:
        capacity: blocks, at least 1.
        eviction: name of the policy in `POLICIES`.
        admission: in `ADMISSIONS`, or `Always`.
    """
    tier = ReplayTier(
        trace,
        capacity,
        POLICIES[eviction](capacity),
        None if admission == ALWAYS else ADMISSIONS[admission](capacity),
    )
    hits = writes = 0
    for request in trace.requests:
        found, stored = tier.serve(request)
        hits += found
        writes += stored
    return Replayed(trace.reads, hits, writes)
