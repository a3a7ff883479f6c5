# SPDX-License-Identifier: Apache-2.0
"""An API server in memory, for what the reconcile decides; the real ones are in tests/cluster."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from kvcache_operator import FIELD_MANAGER
from kvcache_operator.cluster import Cluster, ClusterError
from kvcache_operator.render import Kinds, Manifest

Key = tuple[str, str, str]
_WORKLOADS = ("Deployment", "StatefulSet")


class FakeCluster(Cluster):
    """Keeps objects by kind, namespace and name; fails on the kinds in `faults`, with their HTTP
    status; `apply KIND` fails on that write alone."""

    def __init__(self) -> None:
        self.objects: dict[Key, Manifest] = {}
        self.faults: dict[str, int | None] = {}
        self.writes: list[str] = []
        self.events: list[Manifest] = []
        self.refuses_workload = ""

    def kinds(self) -> Kinds:
        return Kinds()

    def apply(self, manifest: Manifest, dry_run: bool = False, manager: str = FIELD_MANAGER) -> Manifest:
        self._fail(manifest["kind"])
        if not dry_run:
            self._fail(f"apply {manifest['kind']}")
        if manifest["kind"] in _WORKLOADS and self.refuses_workload:
            raise ClusterError(self.refuses_workload, 422)
        key = self._key(manifest)
        before = self.objects.get(key, {})
        merged = {**before, **copy.deepcopy(manifest)}
        # What the server itself keeps in there stays.
        merged["metadata"] = {**before.get("metadata", {}), **merged["metadata"]}
        if merged["kind"] in _WORKLOADS and "replicas" not in merged["spec"]:
            merged["spec"]["replicas"] = before.get("spec", {}).get("replicas", 1)
        if dry_run:
            return merged
        if merged != before:
            self.writes.append(manifest["kind"])
            meta = merged["metadata"]
            if merged.get("spec") != before.get("spec"):
                meta["generation"] = meta.get("generation", 0) + 1
        self.objects[key] = merged
        return copy.deepcopy(merged)

    def create(self, manifest: Manifest) -> Manifest:
        self._fail(manifest["kind"])
        if manifest["kind"] == "Event":
            self.events.append(manifest)
            return manifest
        if self._key(manifest) in self.objects:
            raise ClusterError("already exists", 409)
        self.writes.append(manifest["kind"])
        self.objects[self._key(manifest)] = copy.deepcopy(manifest)
        return manifest

    def get(self, api_version: str, kind: str, namespace: str, name: str) -> Manifest | None:
        self._fail(kind)
        return copy.deepcopy(self.objects.get((kind, namespace, name)))

    def list(
        self, api_version: str, kind: str, namespace: str | None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        self._fail(kind)
        return [
            copy.deepcopy(entry)
            for key, entry in self.objects.items()
            if key[0] == kind
            and namespace in (None, key[1])
            and (labels or {}).items() <= entry["metadata"].get("labels", {}).items()
        ]

    def delete(self, api_version: str, kind: str, namespace: str, name: str) -> None:
        self._fail(kind)
        if self.objects.pop((kind, namespace, name), None) is not None:
            self.writes.append(f"delete {kind}")

    def patch(self, manifest: Manifest, body: Mapping[str, Any]) -> Manifest:
        target = self._target(manifest)
        self.writes.append(f"patch {manifest['kind']}")
        for part, values in body.items():
            target[part] = _merged(target.get(part, {}), values)
        return copy.deepcopy(target)

    def patch_status(self, manifest: Manifest, status: Mapping[str, Any]) -> Manifest:
        target = self._target(manifest)
        self.writes.append(f"{manifest['kind']}/status")
        target["status"] = _merged(target.get("status", {}), status)
        return copy.deepcopy(target)

    def replace(self, manifest: Manifest) -> Manifest:
        target = self._target(manifest)
        target["spec"] = copy.deepcopy(manifest["spec"])
        return copy.deepcopy(target)

    def _target(self, manifest: Manifest) -> Manifest:
        self._fail(manifest["kind"])
        target = self.objects[self._key(manifest)]
        if manifest["metadata"].get("resourceVersion") != target["metadata"].get("resourceVersion"):
            raise ClusterError("the object has been modified", 409)
        target["metadata"]["resourceVersion"] = str(int(target["metadata"].get("resourceVersion", 0)) + 1)
        return target

    def _fail(self, kind: str) -> None:
        if kind in self.faults:
            raise ClusterError(f"{kind}: a fault of the test", self.faults[kind])

    @staticmethod
    def _key(manifest: Manifest) -> Key:
        return manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _merged(before: Any, change: Any) -> Any:
    """A JSON merge patch."""
    if not isinstance(change, Mapping) or not isinstance(before, Mapping):
        return copy.deepcopy(change)
    merged = dict(before)
    for key, value in change.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged
