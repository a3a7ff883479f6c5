# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.config import ConfigError, LMCacheEngineConfig, load_config, parse_quantity


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4Gi", 4 << 30),
        ("4096Mi", 4 << 30),
        ("4294967296", 4 << 30),
        ("1.5Gi", 3 << 29),
        ("2k", 2000),
        ("3T", 3 * 10**12),
    ],
)
def test_a_quantity_is_bytes(text: str, size: int) -> None:
    assert parse_quantity(text) == size


@given(st.integers(1, 10**6), st.sampled_from(["Ki", "Mi", "Gi", "Ti", "Pi"]))
def test_binary_units_are_powers_of_1024(number: int, unit: str) -> None:
    assert parse_quantity(f"{number}{unit}") == number * 1024 ** (
        ["Ki", "Mi", "Gi", "Ti", "Pi"].index(unit) + 1
    )


@pytest.mark.parametrize("text", ["4", "4GB", "4 Gi", "-1Gi", "Gi", "", "1e3", "0.3", True, 1.5, None])
def test_no_quantity_is_refused(text: object) -> None:
    with pytest.raises(ValueError):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"chunk_sise": 256}, "chunk_sise: unknown key; the nearest known one is chunk_size"),
        (
            {"tiers": {"cpu": {"capcity": "1Gi"}}},
            "tiers.cpu.capcity: unknown key; the nearest known one is tiers.cpu.capacity",
        ),
        ({"tiers": {"cpu": {"capacity": "32"}}}, "tiers.cpu.capacity: '32' has no unit"),
        ({"chunk_size": 300}, "chunk_size: 300 is no power of two"),
        ({"chunk_size": 8}, "chunk_size: "),
        ({"tiers": {"cpu": {"capacity": "9999Pi"}}}, "tiers.cpu.capacity: "),
        ({"lease_timeout_s": float("inf")}, "lease_timeout_s: "),
        ({"lookup_timeout_ms": "soon"}, "lookup_timeout_ms: "),
    ],
)
def test_a_wrong_key_or_value_is_named(extra: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=r"^kv_connector_extra_config: ") as caught:
        load_config(extra, {})
    assert sentence in str(caught.value)


def test_sources_in_order(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("chunk_size: 512\nmin_retrieve_tokens: 7\ntiers: {cpu: {capacity: 2Gi}}\n")
    environ = {
        "LMCACHE_CHUNK_SIZE": "1024",
        "LMCACHE_MIN_RETRIEVE_TOKENS": "9",
        "LMCACHE_HASH_SEED": "tenant",
        "LMCACHE_TIERS__CPU__PINNING": "Disabled",
        "UNRELATED": "1",
    }
    config = load_config({"config_file": str(file), "lmcache.chunk_size": 128}, environ)
    assert config.chunk_size == 128
    assert config.min_retrieve_tokens == 7
    assert config.hash_seed == "tenant"
    assert config.tiers.cpu.capacity == 2 << 30
    assert config.tiers.cpu.pinning == "Disabled"


def test_an_unknown_variable_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"LMCACHE_CHUNK_SZ: unknown key; the nearest known one is LMCACHE_CHUNK_SIZE"
    ):
        load_config({}, {"LMCACHE_CHUNK_SZ": "256"})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- a\n", "holds a list"),
        ("a: [", "is no YAML"),
        ("a: 2020-13-45\n", "is no YAML"),
        ("[" * 3000, "is no YAML"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str | None, sentence: str) -> None:
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load_config({}, {"LMCACHE_CONFIG_FILE": str(file)})


def test_an_empty_file_means_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    assert load_config({"config_file": str(tmp_path / "config.yaml")}, {}) == LMCacheEngineConfig()


def test_a_chunk_is_a_whole_number_of_blocks() -> None:
    config = LMCacheEngineConfig(chunk_size=256)
    config.check_block_size(128)
    with pytest.raises(ConfigError, match="256 tokens are no multiple of vLLM's block size of 96"):
        config.check_block_size(96)


def test_unknown_key_in_an_optional_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"tiers\.disk\.directoris: unknown key; .* tiers\.disk\.directories"
    ):
        load_config({"tiers": {"disk": {"directoris": ["/cache"], "capacity": "10Gi"}}}, {})


def test_remote_tier_is_one_of_three() -> None:
    valkey, s3 = {"endpoints": ["cache:6379"]}, {"bucket": "kv-cache"}
    assert load_config({"tiers": {"remote": {"valkey": valkey}}}, {}).tiers.remote is not None
    for remote in ({}, {"valkey": valkey, "s3": s3}):
        with pytest.raises(ConfigError, match="exactly one of valkey, s3 and mooncake"):
            load_config({"tiers": {"remote": remote}}, {})


@pytest.mark.parametrize(
    ("remote", "sentence"),
    [
        ({"s3": {"bucket": "kv-cache"}, "ttl_s": 60}, "ttl_s: s3 takes no life of an object"),
        (
            {"mooncake": {"master": "m:1", "metadata_server": "P2PHANDSHAKE"}, "ttl_s": 60},
            "ttl_s: mooncake takes no life of an object",
        ),
        (
            {"mooncake": {"master": "m:1", "metadata_server": "P2PHANDSHAKE", "device": "mlx5_0"}},
            "device: protocol tcp takes no device",
        ),
        (
            {"s3": {"bucket": "kv-cache", "endpoint": "http://s3:9000", "ca_file": "/ca.pem"}},
            "ca_file: no certificate is looked at on the way to http://s3:9000",
        ),
        (
            {"valkey": {"endpoints": ["cache:6379"], "sentinel_password_file": "/password"}},
            "sentinel_password_file: mode Single asks no sentinels",
        ),
    ],
)
def test_what_a_store_cannot_do_is_refused(remote: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config({"tiers": {"remote": remote}}, {})
