# SPDX-License-Identifier: Apache-2.0
"""Traces of requests for the policy bench: read from a file, or made by a seeded generator.

A request is the list of the ids of its prompt's blocks. Equal ids are equal prefixes, so that an id has one
block before it, the same wherever it occurs. This is the format that was published with Mooncake (FAST'25):
JSON lines with a list `hash_ids`.
"""

from __future__ import annotations

import gzip
import heapq
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

Request = list[int]


def read_trace(path: Path) -> list[Request]:
    """Reads JSON lines; gzip where the name ends so.

    Raises:
        ValueError: the file cannot be read, or a line is no request, with its number.
    """
    requests = []
    parents: dict[int, int | None] = {}
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for number, line in enumerate(lines, 1):
                try:
                    requests.append(_request(line, parents))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); name a file of JSON lines, or gzip of it"
        ) from None
    if not requests:
        raise ValueError(f"{path} has no requests; each line is one, such as {{'hash_ids': [1, 2, 3]}}")
    return requests


def _request(line: str, parents: dict[int, int | None]) -> Request:
    row = json.loads(line)
    ids = row.get("hash_ids") if isinstance(row, dict) else None
    if not isinstance(ids, list) or not all(type(block) is int for block in ids):
        raise ValueError("no list of integers `hash_ids`")
    for parent, block in zip([None, *ids], ids, strict=False):
        if parents.setdefault(block, parent) != parent:
            raise ValueError(
                f"block {block} follows {parent}, and {parents[block]} elsewhere; ids name prefixes"
            )
    return ids


class _Blocks:
    """Gives out ids that were not used yet."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def new(self, count: int) -> Request:
        return list(itertools.islice(self._next, count))


class _Zipf:
    """Ranks 0 to `count - 1`, rank r with a probability in proportion to (r + 1) ** -exponent."""

    def __init__(self, count: int, exponent: float) -> None:
        self._ranks = range(count)
        self._weights = list(itertools.accumulate((rank + 1) ** -exponent for rank in self._ranks))

    def pick(self, rng: random.Random) -> int:
        return rng.choices(self._ranks, cum_weights=self._weights)[0]


def zipf(rng: random.Random) -> Iterator[Request]:
    """Questions about documents: the popularity of the documents follows Zipf, the questions are new."""
    blocks = _Blocks()
    documents = [blocks.new(rng.randint(4, 40)) for _ in range(1_500)]
    popularity = _Zipf(len(documents), 0.9)
    for _ in range(6_000):
        yield documents[popularity.pick(rng)] + blocks.new(rng.randint(1, 4))


def scan(rng: random.Random) -> Iterator[Request]:
    """The same, and every now and then a batch job reads hundreds of long prompts that never come back."""
    blocks = _Blocks()
    documents = [blocks.new(rng.randint(4, 30)) for _ in range(400)]
    popularity = _Zipf(len(documents), 0.7)
    for _ in range(25):
        for _ in range(rng.randint(100, 300)):
            yield documents[popularity.pick(rng)] + blocks.new(rng.randint(1, 3))
        for _ in range(rng.randint(20, 120)):
            yield blocks.new(rng.randint(10, 40))


def loop(rng: random.Random) -> Iterator[Request]:
    """An evaluation runs over the same prompts again and again, in the same order."""
    blocks = _Blocks()
    preamble = blocks.new(3)
    prompts = [preamble + blocks.new(rng.randint(2, 20)) for _ in range(700)]
    for _ in range(8):
        yield from prompts


def agents(rng: random.Random) -> Iterator[Request]:
    """Agents that call tools: each turn's prompt is the last one and some more; some 40 run at a time."""
    blocks = _Blocks()
    systems = [blocks.new(rng.randint(6, 20)) for _ in range(5)]
    turns: list[tuple[float, int, Request, int]] = []
    for number in range(260):
        start = number * 40.0 + rng.uniform(0, 40)
        turns.append((start, number, list(rng.choice(systems)), min(120, int(rng.expovariate(1 / 30)) + 2)))
    heapq.heapify(turns)
    while turns:
        now, number, prompt, left = heapq.heappop(turns)
        prompt = prompt + blocks.new(rng.choice((1, 1, 1, 2, 2, 4)))
        yield prompt
        if left > 1:
            pause = rng.lognormvariate(3.2, 1.0)
            heapq.heappush(turns, (now + pause, number, prompt, left - 1))


def chats(rng: random.Random) -> Iterator[Request]:
    """Conversations that grow: most end after one turn, a few go on for long, people take their time."""
    blocks = _Blocks()
    system = blocks.new(1)
    turns: list[tuple[float, int, Request]] = [(rng.uniform(0, 40_000), n, system) for n in range(3_500)]
    heapq.heapify(turns)
    while turns:
        now, number, prompt = heapq.heappop(turns)
        prompt = prompt + blocks.new(1 + int(rng.expovariate(1 / 4)))
        yield prompt
        if rng.random() < (0.3 if len(prompt) < 8 else 0.8):
            heapq.heappush(turns, (now + rng.lognormvariate(6.5, 1.3), number, prompt))


def tenants(rng: random.Random) -> Iterator[Request]:
    """Customers with a preamble and documents of their own, a few of them busy at a time; who is, shifts."""
    blocks = _Blocks()
    customers = []
    for _ in range(40):
        preamble = blocks.new(rng.randint(2, 10))
        customers.append([preamble + blocks.new(rng.randint(2, 25)) for _ in range(60)])
    popularity = _Zipf(60, 0.6)
    busy = rng.sample(customers, 6)
    for number in range(6_000):
        if number % 250 == 0:
            busy[rng.randrange(len(busy))] = rng.choice(customers)
        documents = rng.choice(busy)
        yield documents[popularity.pick(rng)] + blocks.new(rng.randint(1, 3))


def mixed(rng: random.Random) -> Iterator[Request]:
    """Chats, agents and scans at once, 2,500 requests of each."""
    makes = (chats, agents, scan)
    streams = [_renamed(itertools.islice(make(rng), 2_500), place) for place, make in enumerate(makes)]
    while streams:
        stream = rng.choice(streams)
        request = next(stream, None)
        if request is None:
            streams.remove(stream)
        else:
            yield request


def _renamed(stream: Iterator[Request], place: int) -> Iterator[Request]:
    for request in stream:
        yield [block * 3 + place for block in request]


GENERATORS: dict[str, Callable[[random.Random], Iterator[Request]]] = {
    make.__name__: make for make in (zipf, scan, loop, agents, chats, tenants, mixed)
}
"""By the name on the command line."""


def synthetic_trace(name: str, seed: int) -> list[Request]:
    """The trace of one generator, the same for the same seed. Raises KeyError for an unknown name."""
    return list(GENERATORS[name](random.Random(seed)))  # noqa: S311 -- no secret
