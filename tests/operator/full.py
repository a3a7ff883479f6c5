# SPDX-License-Identifier: Apache-2.0
"""Resources that have every field between them, none at its default."""

from __future__ import annotations

import copy
from typing import Any

from tests.operator.resources import with_value

_TERM = {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]}
_FIELDS = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
_PODS = {
    "labelSelector": {
        "matchLabels": {"app": "router"},
        "matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["test"]}],
    },
    "topologyKey": "zone",
    "namespaces": ["routing"],
}
_POD_AFFINITY = {
    "requiredDuringSchedulingIgnoredDuringExecution": [_PODS],
    "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 5, "podAffinityTerm": _PODS}],
}

BIG: dict[str, Any] = {
    "apiVersion": "kvcache.dev/v1alpha1",
    "kind": "KVCache",
    "metadata": {
        "name": "big",
        "namespace": "serving",
        "uid": "0a1b2c3d",
        "annotations": {"kvcache.dev/restart-requested-at": "once"},
    },
    "spec": {
        "replicas": 3,
        "model": {
            "name": "org/model",
            "revision": "v2",
            "servedName": "big",
            "tokenSecretRef": {"name": "hub", "key": "hf"},
            "volume": {"claimName": "weights"},
        },
        "engine": {
            "image": "example.org/vllm@sha256:00",
            "imagePullPolicy": "Always",
            "imagePullSecrets": [{"name": "registry"}],
            "args": ["--block-size", "32"],
            "env": [
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
                {"name": "SETTING", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
                {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "VLLM_NO_USAGE_STATS", "value": "0"},
            ],
            "port": 9000,
            "tensorParallelSize": 2,
            "pipelineParallelSize": 2,
            "gpuMemoryUtilizationPercent": 80,
            "dtype": "bfloat16",
            "kvCacheDtype": "fp8",
            "maxModelLength": 32768,
            "shmSize": "4Gi",
            "startupTimeout": "1h30m",
            "drainTimeout": "2m",
        },
        "resources": {
            "gpuResourceName": "example.org/gpu",
            "requests": {"cpu": "8", "memory": "170Gi", "ephemeral-storage": "300Gi"},
            "limits": {"cpu": "16", "memory": "180Gi", "ephemeral-storage": "400Gi"},
        },
        "runtimeClassName": "nvidia",
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [
            {
                "key": "gpu",
                "operator": "Equal",
                "value": "yes",
                "effect": "NoExecute",
                "tolerationSeconds": 60,
            }
        ],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{**_TERM, **_FIELDS}]
                },
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 7, "preference": {**_TERM, **_FIELDS}}
                ],
            },
            "podAffinity": _POD_AFFINITY,
            "podAntiAffinity": _POD_AFFINITY,
        },
        "topologySpreadConstraints": [
            {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "priorityClassName": "high",
        "serviceAccountName": "models",
        "cache": {
            "chunkTokens": 512,
            "role": "Consumer",
            "transfer": "Layerwise",
            "namespace": "blue",
            "seedSecretRef": {"name": "seeds", "key": "blue"},
            "events": {"mode": "ZMQ", "port": 6000},
            "tiers": {
                "cpu": {
                    "capacity": "100Gi",
                    "pinning": "Required",
                    "eviction": "S3FIFO",
                    "admission": "TinyLFU",
                },
                "disk": {
                    "capacity": "200Gi",
                    "volume": {"emptyDir": {}},
                    "path": "/mnt/kv",
                    "eviction": "ARC",
                    "admission": "SecondUse",
                    "write": "Back",
                    "directIO": "Enabled",
                    "engine": "Threads",
                    "deadline": "3s",
                    "writeQueue": "2Gi",
                },
                "remote": {
                    "valkey": {
                        "endpoints": ["valkey.cache.svc:6379"],
                        "mode": "Sentinel",
                        "sentinelMaster": "primary",
                        "database": 3,
                        "username": "models",
                        "passwordSecretRef": {"name": "valkey", "key": "pass"},
                        "sentinelPasswordSecretRef": {"name": "sentinels", "key": "pass"},
                        "tls": {
                            "caSecretRef": {"name": "valkey-ca", "key": "root.crt"},
                            "clientSecretRef": {"name": "valkey-client"},
                        },
                    },
                    "deadline": "3s",
                    "ttl": "24h",
                    "admission": "SecondUse",
                    "write": "Back",
                    "connections": 8,
                    "writeQueue": "1Gi",
                },
                "plugins": [
                    {
                        "name": "nvme",
                        "options": [{"name": "path", "value": "/x"}],
                        "write": "Back",
                        "admission": "SecondUse",
                        "deadline": "5s",
                        "writeQueue": "1Gi",
                    }
                ],
                "tenants": [{"salt": "team-a", "quota": "8Gi"}],
                "encryption": {"keySecretRef": {"name": "keys", "key": "aes"}},
            },
        },
        "admin": {"port": 9001, "tokenSecretRef": {"name": "admin", "key": "t"}},
        "metrics": {"monitor": {"mode": "ServiceMonitor", "interval": "15s", "labels": {"team": "a"}}},
        "networkPolicy": {"mode": "Enabled", "allowedNamespaces": {"team": "a"}},
        "rollout": {"maxSurge": 1, "maxUnavailable": 2},
        "podDisruptionBudget": {"mode": "Auto"},
        "podTemplate": {
            "metadata": {"labels": {"cost": "research"}, "annotations": {"note": "x"}},
            "spec": {
                "terminationGracePeriodSeconds": 999,
                "tolerations": [{"operator": "Exists"}],
                "containers": [{"name": "log", "image": "example.org/log:1"}],
                "volumes": [{"name": "extra", "emptyDir": {}}],
            },
        },
        "experimental": {"min_retrieve_tokens": "256"},
    },
}
"""A Deployment with files of the pod, Valkey behind sentinels, and everything around."""

_S3 = {
    "s3": {
        "bucket": "chunks",
        "prefix": "kv/",
        "region": "eu-1",
        "endpoint": "https://s3.example.org",
        "addressing": "Path",
        "credentialsSecretRef": {"name": "s3", "key": "file"},
        "caSecretRef": {"name": "s3-ca", "key": "root.crt"},
    }
}
_MOONCAKE = {
    "mooncake": {
        "master": "mooncake:50051",
        "metadataServer": "P2PHANDSHAKE",
        "protocol": "rdma",
        "device": "mlx5_0",
        "segment": "4Gi",
        "buffer": "1Gi",
        "adminEndpoint": "mooncake:9003",
    }
}
_DISK = "spec.cache.tiers.disk"
_CLAIMS = {
    "claimTemplate": {"storageClassName": "fast", "accessModes": ["ReadWriteOncePod"], "size": "300Gi"}
}

STATEFUL = with_value(with_value(BIG, f"{_DISK}.volume", _CLAIMS), "spec.cache.tiers.remote", _S3)
STATEFUL["metadata"]["name"] = "stateful"
"""A StatefulSet with a claim of each replica, and S3."""

SHARED = with_value(BIG, f"{_DISK}.volume", {"claimName": "shared"})
SHARED = with_value(with_value(SHARED, "spec.cache.tiers.remote", _MOONCAKE), "spec.rollout.maxSurge", 0)
SHARED = with_value(SHARED, "spec.model.volume", {"sizeLimit": "80Gi"})
SHARED = with_value(SHARED, "spec.engine.device", "CPU")
SHARED = with_value(SHARED, "spec.engine.cpuKvSpace", "3Gi")
SHARED = with_value(SHARED, "spec.engine.args", [])
SHARED = with_value(SHARED, "spec.resources", {})
SHARED["metadata"]["name"] = "shared"
"""A CPU, one claim for all replicas, and Mooncake."""

CLUSTER = with_value(BIG, "spec.cache.tiers.remote.valkey.mode", "Cluster")
CLUSTER = with_value(CLUSTER, "spec.cache.tiers.remote.valkey.database", 0)
for _key in ("sentinelMaster", "sentinelPasswordSecretRef"):
    del CLUSTER["spec"]["cache"]["tiers"]["remote"]["valkey"][_key]

FULL = (BIG, STATEFUL, SHARED)


def copies() -> list[dict[str, Any]]:
    """Fresh copies of all of them."""
    return copy.deepcopy(list(FULL))
