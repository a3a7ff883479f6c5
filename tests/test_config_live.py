# SPDX-License-Identifier: Apache-2.0
"""What of a new configuration takes effect in a running process, and what waits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcache.config import ConfigError, LMCacheEngineConfig
from kvcache.config.live import change, file_digest, is_live, restart_digest
from kvcache.config.running import RunningConfig

DISK = {"directories": ["/d"], "capacity": "1Gi"}


def config(**fields: Any) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.model_validate(fields)


@pytest.mark.parametrize(
    ("before", "after", "live", "restart"),
    [
        ({}, {}, (), ()),
        ({}, {"log_level": "DEBUG"}, ("log_level",), ()),
        ({}, {"chunk_size": 512}, (), ("chunk_size",)),
        (
            # Fewer bytes than digits are asked for where a size has no unit.
            {"tiers": {"cpu": {"capacity": "64Mi"}}},
            {"tiers": {"cpu": {"capacity": "32Mi", "pinning": "Required"}}},
            ("tiers.cpu.capacity",),
            ("tiers.cpu.pinning",),
        ),
        ({}, {"tiers": {"disk": DISK}}, (), ("tiers.disk",)),
        ({"tiers": {"disk": DISK}}, {}, (), ("tiers.disk",)),
        (
            {"tiers": {"disk": DISK}},
            {"tiers": {"disk": {**DISK, "capacity": "2Gi", "directories": ["/e"], "eviction": "LFU"}}},
            ("tiers.disk.capacity", "tiers.disk.eviction"),
            ("tiers.disk.directories",),
        ),
        (
            {"tiers": {"tenants": {"a.b": {"quota": "1Gi"}}}},
            {"tiers": {"tenants": {"a.b": {"quota": "2Gi"}, "*": {"quota": "1Gi"}}}},
            ("tiers.tenants",),
            (),
        ),
        (
            {"tiers": {"remote": {"s3": {"bucket": "one"}}}},
            {"tiers": {"remote": {"s3": {"bucket": "two"}, "deadline_ms": 50}}},
            ("tiers.remote.deadline_ms",),
            ("tiers.remote.s3.bucket",),
        ),
        (
            {"tiers": {"plugins": [{"name": "x"}]}},
            {"tiers": {"plugins": [{"name": "x", "deadline_ms": 50}]}},
            (),
            ("tiers.plugins",),
        ),
    ],
)
def test_each_field_takes_effect_now_or_waits(
    before: dict[str, Any], after: dict[str, Any], live: tuple[str, ...], restart: tuple[str, ...]
) -> None:
    found = change(config(**before), config(**after))
    assert (found.live, found.restart) == (live, restart)
    # What can be run now differs from what ran in the live fields alone, from what is wanted in the others.
    assert change(config(**before), found.config).live == live
    assert change(config(**before), found.config).restart == ()
    assert change(found.config, config(**after)).live == ()
    assert change(found.config, config(**after)).restart == restart
    assert (restart_digest(before) == restart_digest(after)) == (not restart)


def test_what_every_process_keeps_is_never_live() -> None:
    for field in (
        "chunk_size",
        "hash_seed",
        "runtime_dir",
        "use_layerwise",
        "tiers.disk",
        "tiers.cpu.pinning",
    ):
        assert not is_live(field)


def test_a_file_s_digest_is_that_of_what_it_says() -> None:
    data = {"chunk_size": 512, "tiers": {"cpu": {"capacity": "1Gi", "eviction": "LFU"}}}
    items = list(data.items())
    random.shuffle(items)
    assert file_digest(dict(items)) == file_digest(yaml.safe_load("# a remark\n" + yaml.safe_dump(data)))
    assert file_digest(data) != file_digest({**data, "chunk_size": 256})


def test_a_process_keeps_what_it_runs_until_a_change_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("lookup_timeout_ms: 100\nchunk_size: 512\n")
    running = RunningConfig({"config_file": str(path), "min_retrieve_tokens": 7}, environ={})
    assert running.file_digest == file_digest({"lookup_timeout_ms": 100, "chunk_size": 512})
    # What vLLM was given stays above every file.
    offered = {"lookup_timeout_ms": 200, "chunk_size": 1024, "min_retrieve_tokens": 9}
    accepted = running.offer(offered)
    assert (accepted.live, accepted.restart) == (("lookup_timeout_ms",), ("chunk_size",))
    assert running.config.lookup_timeout_ms == 100
    running.commit(offered, accepted)
    assert (running.config.lookup_timeout_ms, running.config.chunk_size) == (200, 512)
    assert running.config.min_retrieve_tokens == 7
    assert (running.restart, running.file_digest) == (("chunk_size",), file_digest(offered))
    # Back to what runs: nothing waits any more.
    accepted = running.offer({"lookup_timeout_ms": 200, "chunk_size": 512})
    assert (accepted.live, accepted.restart) == ((), ())


def test_what_cannot_take_effect_after_all_waits() -> None:
    running = RunningConfig(environ={})
    data = {"tiers": {"cpu": {"capacity": "2Gi", "eviction": "LFU"}}}
    accepted = running.offer(data, waiting={"tiers.cpu.capacity"})
    assert (accepted.live, accepted.restart) == (("tiers.cpu.eviction",), ("tiers.cpu.capacity",))
    assert accepted.config.tiers.cpu.capacity == running.config.tiers.cpu.capacity
    assert accepted.config.tiers.cpu.eviction == "LFU"


def test_a_bad_offer_changes_nothing() -> None:
    running = RunningConfig(environ={"LMCACHE_CHUNK_SIZE": "512"})
    before = running.config
    with pytest.raises(ConfigError, match="chunk_size"):
        running.offer({"chunk_sise": 256})
    assert (running.config, running.restart) == (before, ())
