# SPDX-License-Identifier: Apache-2.0
"""Kills processes that write and evict, at random moments, and looks at what is left.

After each kill: all that is visible verifies and holds what was put, the bytes counted are the bytes in the
directories, nothing of the dead is left behind, and what was complete comes back: in a roomy cache all of it,
in one that evicts the newest.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from kvcache.storage.tier import NO_PARENT, PutOutcome, StoredObject
from kvcache.storage.tiers.disk import DiskTier
from kvcache.storage.tiers.disk.folder import Folder
from kvcache.storage.tiers.disk.ledger import FILE as LEDGER_FILE
from kvcache.storage.tiers.disk.names import KEY_BYTES, LAYOUT, PART_SUFFIX, parse_name
from kvcache.tokens.keys import CacheEngineKey
from tests.storage.disk_rigs import NAMESPACE, SHAPE, Rig, aligned, files, used

TIGHT_BYTES = 2 << 20
"""Room for some 56 full objects."""
ROOMY_BYTES = 256 << 20
EMPTIED_AT = 24 << 20
LONGEST_S = 0.25


def payload_of(key: CacheEngineKey, num_tokens: int) -> bytes:
    """What an object must hold: everybody can tell from its key."""
    return random.Random(key.chunk_hash).randbytes(num_tokens * SHAPE.token_bytes)


def make(rng: random.Random, rank: int, parent: bytes) -> StoredObject:
    key = CacheEngineKey(rng.randbytes(16), NAMESPACE, rank)
    tokens = rng.choice((SHAPE.chunk_tokens, rng.randint(1, SHAPE.chunk_tokens)))
    memory = aligned(tokens * SHAPE.token_bytes)
    memory[:] = payload_of(key, tokens)
    return StoredObject(key, tokens, memory.toreadonly(), parent=parent)


def work(directories: list[str], capacity: int, rank: int, seed: int, journal: str, engine: str) -> None:
    """Stores, reads and removes until it is killed; notes what is complete, and what it may have removed."""
    rng = random.Random(seed)
    with Path(journal).open("ab", buffering=0) as log:
        log.write(b"s")
        rig = Rig(rank=rank)
        tier = rig.open(*map(Path, directories), capacity=capacity, engine=engine)
        known: list[CacheEngineKey] = []
        while True:
            chain: list[StoredObject] = []
            for _ in range(rng.randint(1, 20)):
                parent = chain[-1].key.chunk_hash if chain and rng.random() < 0.7 else NO_PARENT
                chain.append(make(rng, rank, parent))
            outcomes = tier.put(chain).result()
            stored = [obj.key for obj, out in zip(chain, outcomes, strict=True) if out is PutOutcome.STORED]
            log.write(b"".join(b"+" + key.to_bytes() for key in stored))
            known += stored
            if rng.random() < 0.3:
                rig.read(tier, rng.sample(known, min(len(known), 8)))
            if rng.random() < 0.2:
                leaving = rng.sample(known, min(len(known), 5))
                log.write(b"".join(b"-" + key.to_bytes() for key in leaving))
                tier.remove(leaving).result()


@dataclass
class Cache:
    """A cache that processes work in and die."""

    directories: list[Path]
    capacity: int
    journal: Path
    rng: random.Random
    kills: int = 0
    visible: int = 0
    parts: int = 0
    sections: int = 0
    failures: list[str] = field(default_factory=list)

    def run(self, context: ForkServerContext, processes: int) -> None:
        """Starts processes, kills them one after the other and looks."""
        for place in self.directories:
            place.mkdir(exist_ok=True)
        self.journal.write_bytes(b"")
        before = self._stored()
        workers = [self._start(context, rank) for rank in range(processes)]
        for worker in workers:
            time.sleep(self.rng.uniform(0, LONGEST_S))
            worker.kill()
            worker.join()
            self.kills += 1
        self._wait_for_the_kernel()
        self.parts += len(self._parts())
        self.sections += sum(_begun(place / LAYOUT / LEDGER_FILE) for place in self.directories)
        stored, gone = self._journal()
        self.look(stored, gone, before)

    def look(self, stored: list[bytes], gone: set[bytes], before: set[bytes]) -> None:
        """Opens it as the next process would."""
        rig = Rig()
        tier = rig.open(*self.directories, capacity=self.capacity)
        try:
            there = self._stored()
            self.visible += len(there)
            self._equal("parts that are left", self._parts(), [])
            self._equal("bytes counted", tier.stats().used_bytes, used(*self.directories))
            self._equal("objects counted", tier.stats().objects, len(there))
            self._equal("bytes in the ledgers", self._ledgers(), used(*self.directories))
            if used(*self.directories) > self.capacity:
                self._fail(f"{used(*self.directories)} bytes are more than {self.capacity}")
            self._read(tier, there)
            expected = set(stored) - gone
            if self.capacity == ROOMY_BYTES:
                expected |= before - gone
            else:  # the newest window cannot have been pushed out by itself
                expected &= set(stored[-8:])
            missing = expected - there
            if missing:
                self._fail(f"{len(missing)} of {len(expected)} complete objects are missing")
            if self.capacity == ROOMY_BYTES and used(*self.directories) > EMPTIED_AT:
                tier.remove([CacheEngineKey.from_bytes(key) for key in there]).result()
                self._equal("bytes after all were removed", used(*self.directories), 0)
        finally:
            tier.close()

    def _read(self, tier: DiskTier, there: set[bytes]) -> None:
        keys = [CacheEngineKey.from_bytes(key) for key in sorted(there)]
        for key, payload in zip(keys, Rig().read(tier, keys), strict=True):
            if payload is None:
                self._fail(f"{key.chunk_hash.hex()} is visible and does not verify: {tier.failures}")
            elif payload != payload_of(key, len(payload) // SHAPE.token_bytes):
                self._fail(f"{key.chunk_hash.hex()} holds something else than was put")

    def _start(self, context: ForkServerContext, rank: int) -> ForkServerProcess:
        names = [str(directory) for directory in self.directories]
        engine = self.rng.choice(("Auto", "Threads"))
        arguments = (names, self.capacity, rank, self.rng.getrandbits(32), str(self.journal), engine)
        worker = context.Process(target=work, args=arguments, daemon=True)
        worker.start()
        end = time.monotonic() + 60
        while self.journal.stat().st_size <= 0 and time.monotonic() < end:
            time.sleep(0.001)
        return worker

    def _journal(self) -> tuple[list[bytes], set[bytes]]:
        """What was complete, in order, and what may have been removed."""
        data = self.journal.read_bytes()
        stored: list[bytes] = []
        gone: set[bytes] = set()
        at = 0
        while at < len(data):
            if data[at : at + 1] == b"s":
                at += 1
                continue
            key = data[at + 1 : at + 1 + KEY_BYTES]
            if data[at : at + 1] == b"+":
                stored.append(key)
            else:
                gone.add(key)
            at += 1 + KEY_BYTES
        return stored, gone

    def _stored(self) -> set[bytes]:
        return {raw[:KEY_BYTES] for file in files(*self.directories) if (raw := parse_name(file.name))}

    def _parts(self) -> list[str]:
        found = [file.name for place in self.directories for file in (place / LAYOUT).glob("*" + PART_SUFFIX)]
        return sorted(found)

    def _wait_for_the_kernel(self) -> None:
        """It ends the transfers of a killed process later, and holds their files until then."""
        end = time.monotonic() + 60
        for place in self.directories:
            folder = Folder(str(place))
            while time.monotonic() < end:
                parts = folder.scan().parts
                if all(folder.is_dead(part) for part in parts):
                    break
                time.sleep(0.001)

    def _ledgers(self) -> int:
        total = 0
        for place in self.directories:
            with Folder(str(place)).section() as section:
                total += section.totals.num_bytes
        return total

    def _equal(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self._fail(f"{what}: {found}, not {expected}")

    def _fail(self, text: str) -> None:
        self.failures.append(f"kill {self.kills}: {text}")


def _begun(ledger: Path) -> bool:
    return ledger.exists() and ledger.read_bytes()[8:9] == b"\x01"


@dataclass(frozen=True)
class Report:
    kills: int
    visible: int
    """Objects seen and verified after kills, all together."""
    parts: int
    """Half-written objects that the killed left."""
    sections: int
    """Sections that they did not end."""
    failures: list[str]


def run(kills: int, seed: int, directory: Path) -> Report:
    """Kills processes in caches below `directory`."""
    rng = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    caches = [
        Cache([directory / "tight"], TIGHT_BYTES, directory / "tight.journal", rng),
        Cache([directory / "a", directory / "b"], TIGHT_BYTES, directory / "two.journal", rng),
        Cache([directory / "roomy"], ROOMY_BYTES, directory / "roomy.journal", rng),
    ]
    while (done := sum(cache.kills for cache in caches)) < kills:
        processes = min(rng.choice((1, 1, 2)), kills - done)
        rng.choice(caches).run(context, processes)
    return Report(
        sum(cache.kills for cache in caches),
        sum(cache.visible for cache in caches),
        sum(cache.parts for cache in caches),
        sum(cache.sections for cache in caches),
        [f"{cache.directories[0].name}: {text}" for cache in caches for text in cache.failures],
    )
