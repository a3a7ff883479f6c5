# SPDX-License-Identifier: Apache-2.0
"""CEL rules in pairs: a resource that a rule refuses, and one near to it that passes. For a library of CEL,
for the models, and for a real API server (tests/cluster)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.operator.resources import SMALLEST, with_value


@dataclass(frozen=True)
class Pair:
    """Two values at a place: one that fits and one that does not."""

    name: str
    good: dict[str, Any]
    bad: dict[str, Any]
    message: str
    """Part of the server's sentence."""
    only_new_servers: bool = False
    """The rule is about a change, which models cannot see."""


def _with(*pairs: tuple[str, Any]) -> dict[str, Any]:
    document = SMALLEST
    for path, value in pairs:
        document = with_value(document, path, value)
    return document


_REMOTE = "spec.cache.tiers.remote"
_VALKEY = f"{_REMOTE}.valkey"
_BUCKET = {"bucket": "chunks"}
_MASTER = {"master": "m:1", "metadataServer": "P2PHANDSHAKE"}
_ENDPOINT = (f"{_VALKEY}.endpoints", ["v:6379"])
_DISK = "spec.cache.tiers.disk"
_CAPACITY = (f"{_DISK}.capacity", "1Gi")

PAIRS = (
    Pair(
        "name",
        _with(("metadata.name", "a" * 45)),
        _with(("metadata.name", "a" * 46)),
        "the name is also that of a Service",
    ),
    Pair("name of digits", _with(("metadata.name", "a1")), _with(("metadata.name", "1a")), "a letter first"),
    Pair(
        "ports",
        _with(("spec.admin.port", 8001)),
        _with(("spec.admin.port", 8000)),
        "the ports of engine, admin and events must be different",
    ),
    Pair(
        "port of events",
        _with(("spec.cache.events", {"mode": "Disabled", "port": 8000})),
        _with(("spec.cache.events", {"mode": "ZMQ", "port": 8000})),
        "must be different",
    ),
    Pair(
        "chunk",
        _with(("spec.cache.chunkTokens", 128)),
        _with(("spec.cache.chunkTokens", 100)),
        "a power of two",
    ),
    Pair(
        "role",
        _with(("spec.cache.role", "Producer"), _ENDPOINT),
        _with(("spec.cache.role", "Producer")),
        "needs a tier that others share",
    ),
    Pair(
        "role with a disk of its own",
        _with(("spec.cache.role", "Consumer"), _CAPACITY, (f"{_DISK}.volume", {"claimName": "c"})),
        _with(("spec.cache.role", "Consumer"), _CAPACITY),
        "needs a tier that others share",
    ),
    Pair(
        "remote",
        _with(_ENDPOINT),
        _with(_ENDPOINT, ("spec.cache.tiers.remote.s3", {"bucket": "abc"})),
        "exactly one of valkey, s3 and mooncake",
    ),
    Pair(
        "no remote",
        _with(("spec.cache.tiers.remote.s3", {"bucket": "abc"})),
        _with(("spec.cache.tiers.remote", {"connections": 3})),
        "exactly one of valkey, s3 and mooncake",
    ),
    Pair(
        "disk volume",
        _with(_CAPACITY, (f"{_DISK}.volume", {"emptyDir": {}})),
        _with(_CAPACITY, (f"{_DISK}.volume", {"emptyDir": {}, "claimName": "c"})),
        "exactly one of emptyDir, claimName and claimTemplate",
    ),
    Pair(
        "sentinels",
        _with(_ENDPOINT, (f"{_VALKEY}.mode", "Sentinel"), (f"{_VALKEY}.sentinelMaster", "m")),
        _with(_ENDPOINT, (f"{_VALKEY}.mode", "Sentinel")),
        "sentinelMaster is needed",
    ),
    Pair(
        "one endpoint",
        _with((f"{_VALKEY}.endpoints", ["a:1", "b:2"]), (f"{_VALKEY}.mode", "Cluster")),
        _with((f"{_VALKEY}.endpoints", ["a:1", "b:2"])),
        "mode Single takes one endpoint",
    ),
    Pair(
        "database",
        _with(_ENDPOINT, (f"{_VALKEY}.database", 1)),
        _with(_ENDPOINT, (f"{_VALKEY}.database", 1), (f"{_VALKEY}.mode", "Cluster")),
        "a cluster has database 0 alone",
    ),
    Pair(
        "password of sentinels",
        _with(
            _ENDPOINT,
            (f"{_VALKEY}.mode", "Sentinel"),
            (f"{_VALKEY}.sentinelMaster", "m"),
            (f"{_VALKEY}.sentinelPasswordSecretRef", {"name": "s"}),
        ),
        _with(_ENDPOINT, (f"{_VALKEY}.sentinelPasswordSecretRef", {"name": "s"})),
        "a password of sentinels is for mode Sentinel alone",
    ),
    Pair(
        "authorities of a bucket",
        _with((f"{_REMOTE}.s3", {**_BUCKET, "endpoint": "https://s3:1", "caSecretRef": {"name": "s"}})),
        _with((f"{_REMOTE}.s3", {**_BUCKET, "endpoint": "http://s3:1", "caSecretRef": {"name": "s"}})),
        "caSecretRef is for an endpoint of https",
    ),
    Pair(
        "device",
        _with((f"{_REMOTE}.mooncake", {**_MASTER, "protocol": "rdma", "device": "mlx5_0"})),
        _with((f"{_REMOTE}.mooncake", {**_MASTER, "device": "mlx5_0"})),
        "device is for protocol rdma alone",
    ),
    Pair(
        "life of objects",
        _with(_ENDPOINT, (f"{_REMOTE}.ttl", "1h")),
        _with((f"{_REMOTE}.s3", _BUCKET), (f"{_REMOTE}.ttl", "1h")),
        "ttl is for valkey",
    ),
    Pair(
        "surge and unavailable",
        _with(("spec.rollout", {"maxSurge": 1, "maxUnavailable": 0})),
        _with(("spec.rollout", {"maxSurge": 0, "maxUnavailable": 0})),
        "cannot both be 0",
    ),
    Pair(
        "surge with a claim",
        _with(_CAPACITY, ("spec.rollout.maxSurge", 1)),
        _with(_CAPACITY, (f"{_DISK}.volume", {"claimName": "c"}), ("spec.rollout.maxSurge", 1)),
        "wait for the claim",
    ),
    Pair(
        "model volume",
        _with(("spec.model.volume", {"sizeLimit": "50Gi"})),
        _with(("spec.model.volume", {"sizeLimit": "50Gi", "claimName": "c"})),
        "exactly one of claimName and sizeLimit",
    ),
    Pair(
        "owned flag",
        _with(("spec.engine.args", ["--modelled", "--seed=1"])),
        _with(("spec.engine.args", ["--seed=1", "--model=x"])),
        "a flag that the operator sets itself",
    ),
    Pair(
        "owned flag with underscores",
        _with(("spec.engine.args", ["--ports"])),
        _with(("spec.engine.args", ["--kv_transfer_config.kv_role=kv_both"])),
        "a flag that the operator sets itself",
    ),
    Pair(
        "hash seed",
        _with(("spec.engine.env", [{"name": "HASHSEED", "value": "1"}])),
        _with(("spec.engine.env", [{"name": "PYTHONHASHSEED", "value": "random"}])),
        "set by the operator",
    ),
    Pair(
        "value and source",
        _with(("spec.engine.env", [{"name": "A", "value": "1"}])),
        _with(
            (
                "spec.engine.env",
                [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            )
        ),
        "exclude each other",
    ),
    Pair(
        "one source",
        _with(("spec.engine.env", [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}])),
        _with(("spec.engine.env", [{"name": "A", "valueFrom": {}}])),
        "exactly one of secretKeyRef",
    ),
)

_TEMPLATE = {"claimTemplate": {"size": "3Gi", "storageClassName": "a"}}

CHANGES = (
    # Name, before, a change that is allowed, one that is not, and the sentence.
    (
        "kind of the disk's volume",
        _with(_CAPACITY, (f"{_DISK}.volume", {"emptyDir": {}})),
        _with(("spec.replicas", 2)),
        _with(_CAPACITY, (f"{_DISK}.volume", {"claimName": "c"})),
        "the kind of the disk tier's volume cannot change",
    ),
    (
        "claims come",
        _with(),
        _with(_CAPACITY),
        _with(_CAPACITY, (f"{_DISK}.volume", _TEMPLATE)),
        "can be neither added nor removed",
    ),
    (
        "claims go",
        _with(_CAPACITY, (f"{_DISK}.volume", _TEMPLATE)),
        _with((f"{_DISK}.capacity", "2Gi"), (f"{_DISK}.volume", _TEMPLATE)),
        _with(),
        "can be neither added nor removed",
    ),
    (
        "storage class",
        _with(_CAPACITY, (f"{_DISK}.volume", _TEMPLATE)),
        _with(_CAPACITY, (f"{_DISK}.volume", {"claimTemplate": {"size": "4Gi", "storageClassName": "a"}})),
        _with(_CAPACITY, (f"{_DISK}.volume", {"claimTemplate": {"size": "3Gi", "storageClassName": "b"}})),
        "the storage class of claims cannot change",
    ),
)
