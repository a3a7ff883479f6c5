# SPDX-License-Identifier: Apache-2.0
"""The engine's configuration and the resource: each key has its field or a reason to have none, and pods are
replaced for exactly those that the engine cannot take over while it runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, get_origin

import pytest
import yaml
from pydantic import BaseModel

from kvcache.config import LMCacheEngineConfig
from kvcache.config.live import change, is_live, restart_digest
from kvcache_operator.parse import model_in
from kvcache_operator.planning.engine_config import config_yaml
from tests.operator.full import CLUSTER, FULL
from tests.operator.resources import SMALLEST, plan_of, with_value

NOT_EXPOSED = {
    "tiers.remote.mooncake.local_hostname": "the pod's address, its default, is the one that others reach",
}
"""Keys without a field, and why."""
EXPERIMENTAL = {
    "save_decode_cache": "true",
    "save_unfull_chunk": "true",
    "min_retrieve_tokens": "512",
    "skip_last_n_tokens": "8",
    "async_loading": "Never",
    "compression": "Lossless",
    "lookup_timeout_ms": "250",
    "lease_timeout_s": "60",
    "log_level": "DEBUG",
    "allow_untested_vllm": "true",
}
"""Keys that `spec.experimental` sets, each with a value as it stands there: they tune the engine, and what
they do may change with it."""


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys that hold a value; entries of lists and mappings are passed through."""
    for name, field in model.model_fields.items():
        below = model_in(field.annotation)
        if below is None:
            yield f"{prefix}{name}"
        else:
            yield from keys_of(below, f"{prefix}{name}.")


def written_keys(model: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The same of what stands in a configuration file."""
    for name, value in values.items():
        annotation = model.model_fields[name].annotation
        below = model_in(annotation)
        if below is None:
            yield f"{prefix}{name}"
            continue
        named = get_origin(annotation) is dict
        for entry in value.values() if named else value if isinstance(value, list) else [value]:
            yield from written_keys(below, entry, f"{prefix}{name}.")


def test_each_key_of_the_engine_has_a_field_or_a_reason_to_have_none() -> None:
    documents = [*FULL, CLUSTER, with_value(SMALLEST, "spec.cache.namespace", "blue")]
    fields: set[str] = set()
    for document in documents:
        document = copy.deepcopy(document)
        document["spec"].pop("experimental", None)
        fields |= set(written_keys(LMCacheEngineConfig, yaml.safe_load(plan_of(document).config_yaml)))
    everything = set(keys_of(LMCacheEngineConfig))
    assert everything - fields - EXPERIMENTAL.keys() - NOT_EXPOSED.keys() == set()
    assert fields & (EXPERIMENTAL.keys() | NOT_EXPOSED.keys()) == set()
    assert (EXPERIMENTAL.keys() | NOT_EXPOSED.keys()) <= everything


@pytest.mark.parametrize(("key", "value"), EXPERIMENTAL.items())
def test_experimental_keys_reach_the_engine(key: str, value: str) -> None:
    before = plan_of(SMALLEST).config
    after = plan_of(with_value(SMALLEST, "spec.experimental", {key: value})).config
    assert getattr(after, key) == yaml.safe_load(value)
    assert after == before.model_copy(update={key: getattr(after, key)})


BASE: dict[str, Any] = {
    "chunk_size": 256,
    "use_layerwise": False,
    "save_decode_cache": False,
    "save_unfull_chunk": False,
    "min_retrieve_tokens": 0,
    "skip_last_n_tokens": 0,
    "hash_seed": "a",
    "async_loading": "Auto",
    "compression": "None",
    "lookup_timeout_ms": 500,
    "lease_timeout_s": 300.0,
    "log_level": "INFO",
    "allow_untested_vllm": False,
    "runtime_dir": "/run/a",
    "tiers": {
        "cpu": {"capacity": "1Gi", "eviction": "LRU", "admission": "Always", "pinning": "Preferred"},
        "disk": {
            "directories": ["/a"],
            "capacity": "1Gi",
            "eviction": "LRU",
            "admission": "Always",
            "write": "Through",
            "direct_io": "Auto",
            "engine": "Auto",
            "deadline_ms": 2000,
            "write_queue": "1Gi",
        },
        "remote": {
            "valkey": {
                "endpoints": ["a:1"],
                "mode": "Sentinel",
                "sentinel_master": "a",
                "sentinel_password_file": "/a",
                "database": 0,
                "username": "a",
                "password_file": "/a",
                "tls": {"ca_file": "/a", "cert_file": "/a", "key_file": "/a"},
            },
            "s3": {
                "bucket": "aaa",
                "prefix": "a/",
                "region": "a",
                "endpoint": "https://a:1",
                "addressing": "Auto",
                "ca_file": "/a",
            },
            "mooncake": {
                "master": "a:1",
                "metadata_server": "a",
                "protocol": "rdma",
                "device": "a",
                "local_hostname": "a",
                "segment": "1Gi",
                "buffer": "1Gi",
                "admin_endpoint": "a:1",
            },
            "deadline_ms": 2000,
            "ttl_s": 60,
            "admission": "Always",
            "write": "Through",
            "connections": 4,
            "write_queue": "1Gi",
        },
        "plugins": [
            {
                "name": "a",
                "options": {"a": "a"},
                "write": "Through",
                "admission": "Always",
                "deadline_ms": 2000,
                "write_queue": "1Gi",
            }
        ],
        "tenants": {"a": {"quota": "1Gi"}},
        "encryption_key_file": "/a",
    },
}
"""Every key of the engine."""
OTHERS: dict[Any, Any] = {
    "1Gi": "2Gi",
    "LRU": "LFU",
    "Always": "SecondUse",
    "Preferred": "Required",
    "Through": "Back",
    "/a": "/b",
    "a:1": "b:1",
    "https://a:1": "https://b:1",
    "a": "b",
    "aaa": "bbb",
    "a/": "b/",
    "rdma": "tcp",
    "Sentinel": "Cluster",
    "/run/a": "/run/b",
    "INFO": "DEBUG",
    "None": "Lossless",
}
"""For a value of `BASE`, another one that its key may have."""
AUTO = {"async_loading": "Never", "direct_io": "Enabled", "engine": "Threads", "addressing": "Path"}
STORES = ("valkey", "s3", "mooncake")


def with_store(store: str) -> dict[str, Any]:
    """`BASE` with one of the three kinds of stores: the engine takes no more."""
    document = copy.deepcopy(BASE)
    for other in STORES:
        if other != store:
            del document["tiers"]["remote"][other]
    if store != "valkey":
        del document["tiers"]["remote"]["ttl_s"]
    return document


def another(key: str, value: Any) -> Any:
    if value == "Auto":
        return AUTO[key]
    if isinstance(value, bool):
        return not value
    if key == "chunk_size":
        return 512
    return OTHERS[value] if isinstance(value, str) else value + 1


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys and indices to each mapping, list and value."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


CASES = [(store, path) for store in STORES for path in places(with_store(store))]


def changed(document: dict[str, Any], path: tuple[Any, ...], remove: bool) -> LMCacheEngineConfig | None:
    """With another value at a place, or with nothing there; None where the engine must have something."""
    document = copy.deepcopy(document)
    node = document
    for part in path[:-1]:
        node = node[part]
    if remove:
        del node[path[-1]]
    else:
        node[path[-1]] = another(str(path[-1]), node[path[-1]])
    if path[-1] == "mode":
        node |= {"sentinel_master": None, "sentinel_password_file": None}
    if path[-1] == "protocol":
        del node["device"]
    try:
        return LMCacheEngineConfig.model_validate(document)
    except ValueError:
        assert remove, path
        return None


def test_the_walk_has_every_key() -> None:
    found: set[str] = set()
    for store in STORES:
        found |= set(written_keys(LMCacheEngineConfig, with_store(store)))
    assert found == set(keys_of(LMCacheEngineConfig))


@pytest.mark.parametrize(("store", "path"), CASES, ids=lambda value: str(value))
def test_pods_are_replaced_for_what_the_engine_cannot_take_over(store: str, path: tuple[Any, ...]) -> None:
    """One truth: what a running process says that it needs a restart for gives the pods another template."""

    def digest(config: LMCacheEngineConfig) -> str:
        return restart_digest(yaml.safe_load(config_yaml(config, with_seed=True)))

    document = with_store(store)
    running, node = LMCacheEngineConfig.model_validate(document), document
    for part in path:
        node = node[part]
    ways = [True] if isinstance(node, dict | list) else [False, True]
    for remove in ways:
        wanted = changed(document, path, remove)
        if wanted is None or "cpu" not in wanted.tiers.model_fields_set:
            continue  # the resource always has that tier
        needed = change(running, wanted)
        if remove and wanted == running:
            continue  # it was at its default, which is no change
        assert needed.restart or needed.live
        assert (digest(running) != digest(wanted)) == bool(needed.restart), (needed, remove)


def test_some_of_each() -> None:
    """The walk would say nothing if all were alike."""
    live = {key for key in keys_of(LMCacheEngineConfig) if is_live(key)}
    assert 10 < len(live) < len(set(keys_of(LMCacheEngineConfig))) / 2
