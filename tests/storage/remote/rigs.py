# SPDX-License-Identifier: Apache-2.0
"""Remote tiers on small chunks, and the questions that tests ask of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvcache.config.tiers import RemoteTierConfig, S3Config, ValkeyConfig
from kvcache.storage.health import BreakerPolicy
from kvcache.storage.tier import PutOutcome, StoredObject, Tier, TierContext, WantedObject
from tests.storage.disk_rigs import NAMESPACE, SHAPE, aligned

QUICK = BreakerPolicy(first_pause_s=0.1, longest_pause_s=0.4)
WAIT_S = 30.0


def context(**of: Any) -> TierContext:
    """Of rank 0."""
    return TierContext(**{"shape": SHAPE, "namespace": NAMESPACE, "rank": 0, **of})


def valkey_config(*endpoints: str, remote: dict[str, Any] | None = None, **of: Any) -> RemoteTierConfig:
    valkey = ValkeyConfig(endpoints=list(endpoints), **of)
    return RemoteTierConfig(valkey=valkey, **({"deadline_ms": 5000} | (remote or {})))


def s3_config(endpoint: str, remote: dict[str, Any] | None = None, **of: Any) -> RemoteTierConfig:
    s3 = S3Config(**{"bucket": "kvcache-test", "endpoint": endpoint, "region": "us-east-1", **of})
    return RemoteTierConfig(s3=s3, **({"deadline_ms": 10_000} | (remote or {})))


def put(tier: Tier, objects: Sequence[StoredObject]) -> list[PutOutcome]:
    return tier.put(objects).result(WAIT_S)


def head(tier: Tier, objects: Sequence[StoredObject]) -> list[int | None]:
    return tier.head([obj.key for obj in objects]).result(WAIT_S)


def get(tier: Tier, objects: Sequence[StoredObject]) -> list[bytes | None]:
    """What the tier gives for each object, None where it says that it gives nothing."""
    targets = [aligned(obj.payload.nbytes) for obj in objects]
    wanted = [WantedObject(obj.key, target) for obj, target in zip(objects, targets, strict=True)]
    answers = tier.get(wanted).result(WAIT_S)
    return [bytes(target) if good else None for good, target in zip(answers, targets, strict=True)]


def payloads(objects: Sequence[StoredObject]) -> list[bytes | None]:
    return [bytes(obj.payload) for obj in objects]


def remote_threads() -> set[threading.Thread]:
    """Of all tiers, also those that other tests left open when they failed."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("remote-")}


def eventually(true: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    until = time.monotonic() + wait_s
    while not true():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.02)
