# SPDX-License-Identifier: Apache-2.0
"""Tiers of third parties: the example of the docs, found by its entry point, and those that cannot start."""

from __future__ import annotations

import random
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache.config import LMCacheEngineConfig
from kvcache.config.tiers import TiersConfig
from kvcache.storage.build import START_FAILED, open_lanes
from kvcache.storage.fetch import Query, Standing
from kvcache.storage.manager import StorageManager
from kvcache.storage.tier import ClearScope, TierContext
from tests.storage.rigs import CHUNK, SHAPE, Rig, chain, payload_of

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
CONTEXT = TierContext(shape=SHAPE, namespace=bytes(16), rank=0)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The example as if its distribution were installed; the file that it keeps its chunks in."""
    metadata = tmp_path / "site" / "sqlite_tier-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sqlite-tier\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[kvcache.tiers]\nsqlite = sqlite_tier:open_sqlite\n")
    for folder in (EXAMPLES, tmp_path / "site"):
        monkeypatch.syspath_prepend(str(folder))
    yield tmp_path / "kv.db"
    sys.modules.pop("sqlite_tier", None)


def config(path: Path, **more: object) -> TiersConfig:
    plugin = {"name": "sqlite", "options": {"path": str(path)}, **more}
    return LMCacheEngineConfig.model_validate({"tiers": {"plugins": [plugin]}}).tiers


def manager(tiers: TiersConfig) -> tuple[StorageManager, Rig]:
    rig = Rig(slots=40)
    return StorageManager(rig.tier, open_lanes(tiers, CONTEXT)), rig


def eventually(check: object) -> None:
    assert callable(check)
    deadline = time.monotonic() + 20
    while not check():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)


def settled(storage: StorageManager, owner: str) -> Standing:
    eventually(lambda: (now := storage.standing(owner)).chunks == now.most)
    return storage.standing(owner)


def test_the_example_outlives_the_process(installed: Path) -> None:
    keys = chain("a", random.randint(3, 7))
    storage, rig = manager(config(installed))
    rig.storage = storage
    rig.store(keys)
    eventually(lambda: storage.stats()[1].objects == len(keys))
    storage.close()
    # Another process.
    storage, rig = manager(config(installed))
    assert storage.stats()[1].used_bytes == len(keys) * SHAPE.chunk_bytes
    standing = storage.begin_lookup("r", Query(keys, len(keys) * CHUNK))
    assert standing[:2] == (0, len(keys))
    assert settled(storage, "r").sources == (("sqlite", len(keys)),)
    rig.check_leased("r", keys)
    storage.release("r")
    # Cleared as a whole, and what was damaged is not served.
    with sqlite3.connect(installed) as database:
        database.execute(
            "UPDATE objects SET object = zeroblob(length(object)) WHERE key = ?", [keys[1].to_bytes()]
        )
    storage.clear(ClearScope(), ["cpu"])
    storage.begin_lookup("s", Query(keys, len(keys) * CHUNK))
    assert settled(storage, "s").chunks == 1
    storage.release("s")
    cleared = storage.clear(ClearScope())["sqlite"].result(10)
    assert (cleared.objects, cleared.complete) == (len(keys) - 1, True)
    assert storage.stats()[1].used_bytes == 0
    storage.close()


def test_what_waits_to_be_written_is_written_before_the_end(installed: Path) -> None:
    keys = chain("a", 8)
    storage, rig = manager(config(installed))
    rig.storage = storage
    rig.store(keys)
    storage.close()
    storage, _ = manager(config(installed))
    assert storage.stats()[1].objects == len(keys)
    storage.close()


def test_many_threads_at_once(installed: Path) -> None:
    """The real threads of the manager and of a tier: every byte that is read is right, nothing is left."""
    storage, rig = manager(config(installed))
    rig.storage = storage
    prompts = [chain(f"{number}", 5) for number in range(12)]
    errors: list[str] = []

    def use(seed: int) -> None:
        dice = random.Random(seed)
        for turn in range(30):
            keys, owner = dice.choice(prompts), f"{seed}/{turn}"
            storage.begin_lookup(owner, Query(keys, len(keys) * CHUNK))
            for _ in range(dice.randint(0, 30)):
                time.sleep(0.0005)
                standing = storage.standing(owner)
                if standing.chunks == standing.most:
                    break
            storage.hand_over(owner, f"loading/{owner}")
            objs = rig.tier.leased(keys, f"loading/{owner}")
            errors.extend(
                f"{key}" for key, obj in zip(keys, objs, strict=False) if bytes(obj.buffer) != payload_of(key)
            )
            storage.release(f"loading/{owner}")
            rig.store(keys[: len(objs) + 2], first=len(objs))

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    eventually(lambda: all(writer.pending_bytes == 0 for writer in storage._writers))
    eventually(lambda: not rig.tier._writing)
    stats = storage.stats()
    assert stats[0].leases == 0
    assert rig.allocator.num_objects == stats[0].objects
    assert stats[1].objects > 0
    storage.close()


def test_a_tier_that_cannot_start_says_why_and_the_others_serve(installed: Path, tmp_path: Path) -> None:
    tiers = LMCacheEngineConfig.model_validate(
        {
            "tiers": {
                "plugins": [
                    {"name": "absent"},
                    {"name": "sqlite", "options": {"file": "x"}},
                ]
            }
        }
    ).tiers
    storage, rig = manager(tiers)
    rig.storage = storage
    keys = chain("a", 3)
    rig.store(keys)
    assert storage.begin_lookup("r", Query(keys, 3 * CHUNK)).chunks == 3
    absent, wrong = storage.stats()[1:]
    assert (absent.name, absent.state) == ("absent", START_FAILED)
    assert "0 entry points 'absent'" in absent.detail
    assert "sqlite" in absent.detail
    assert (wrong.name, wrong.state) == ("sqlite", START_FAILED)
    assert "give path" in wrong.detail
    cleared = storage.clear(ClearScope())
    assert not cleared["absent"].result(10).complete
    storage.release("r")
    storage.close()


def test_a_tier_with_admission_gets_what_is_used_twice(installed: Path) -> None:
    storage, rig = manager(config(installed, admission="SecondUse"))
    rig.storage = storage
    keys, once = chain("a", 2), chain("b", 1)
    rig.store(keys)
    rig.store(once)
    eventually(lambda: storage.stats()[1].declined == 3)
    storage.begin_lookup("r", Query(keys, 2 * CHUNK))
    eventually(lambda: storage.stats()[1].objects == 2)
    storage.release("r")
    storage.close()
