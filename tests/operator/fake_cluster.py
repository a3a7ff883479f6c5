# SPDX-License-Identifier: Apache-2.0
"""An API server in memory, for what the reconcile decides; the real one is in test_real_cluster.py."""

from __future__ import annotations

import copy
from typing import Any

from kvcache_operator.cluster import Cluster, ClusterError
from kvcache_operator.render import Manifest

Key = tuple[str, str, str]


class FakeCluster(Cluster):
    """Keeps objects by kind, namespace and name; fails on the kinds in `faults`, with their HTTP status."""

    def __init__(self) -> None:
        self.objects: dict[Key, Manifest] = {}
        self.faults: dict[str, int | None] = {}
        self.writes: list[str] = []

    def apply(self, manifest: Manifest) -> Manifest:
        self._fail(manifest["kind"])
        key = self._key(manifest)
        before = self.objects.get(key, {})
        merged = {**before, **copy.deepcopy(manifest)}
        # What the server itself keeps in there stays.
        merged["metadata"] = {**before.get("metadata", {}), **merged["metadata"]}
        if merged != before:
            self.writes.append(manifest["kind"])
        self.objects[key] = merged
        return merged

    def create_if_absent(self, manifest: Manifest) -> bool:
        self._fail(manifest["kind"])
        if self._key(manifest) in self.objects:
            return False
        self.writes.append(manifest["kind"])
        self.objects[self._key(manifest)] = copy.deepcopy(manifest)
        return True

    def get(self, api_version: str, kind: str, namespace: str, name: str) -> Manifest | None:
        self._fail(kind)
        return copy.deepcopy(self.objects.get((kind, namespace, name)))

    def patch_status(self, manifest: Manifest, status: dict[str, Any]) -> None:
        self._fail(manifest["kind"])
        target = self.objects[self._key(manifest)]
        if manifest["metadata"].get("resourceVersion") != target["metadata"].get("resourceVersion"):
            raise ClusterError("the object has been modified", 409)
        self.writes.append(f"{manifest['kind']}/status")
        target["metadata"]["resourceVersion"] = str(int(target["metadata"].get("resourceVersion", 0)) + 1)
        target["status"] = {**target.get("status", {}), **copy.deepcopy(status)}

    def _fail(self, kind: str) -> None:
        if kind in self.faults:
            raise ClusterError(f"{kind}: a fault of the test", self.faults[kind])

    @staticmethod
    def _key(manifest: Manifest) -> Key:
        return manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"]
