# SPDX-License-Identifier: Apache-2.0
"""The API server, by `kubernetes`' dynamic client. Every method blocks: call it from a worker thread."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kubernetes
import urllib3
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import DynamicApiError

from kvcache_operator import FIELD_MANAGER
from kvcache_operator.render import Kinds, Manifest
from kvcache_operator.render.kinds import MONITORING

CONFLICT = 409
_NOT_FOUND = 404
_OK = 200

Count = Callable[[str, str, int | None], None]
"""Is told of every request: verb, kind and HTTP status, None without an answer."""


class ClusterError(RuntimeError):
    """A request to the API server failed. `status` is HTTP's, or None when there was no answer."""

    def __init__(self, text: str, status: int | None) -> None:
        super().__init__(text)
        self.status = status

    @property
    def is_final(self) -> bool:
        """Whether the same request will fail again: the server understood it and refused its content."""
        return self.status in (400, 413, 422)


class Cluster:
    """One API server. Safe to share between threads."""

    def __init__(self, api_client: Any, timeout_s: float, count: Count = lambda *_: None) -> None:
        """Reads what kinds the server has; raises ClusterError where it does not answer.

        Args:
            api_client: A `kubernetes.client.ApiClient`.
            timeout_s: The longest that one request may take, in seconds.
            count: Is told of every request.
        """
        # Parsed here: the client would build objects of its own around every value.
        self._options = {"_request_timeout": timeout_s, "serialize": False}
        self._count = count
        self._discovering = threading.Lock()
        """The client's discovery is not made for several threads."""
        self._resources: dict[tuple[str, str], Any] = {}
        # The client keeps what it discovers in a file: a folder of our own, since the default is one for all
        # users.
        self._discovery = tempfile.TemporaryDirectory(prefix="kvcache-operator-")
        cache_file = str(Path(self._discovery.name) / "discovery.json")
        self._client = self._call("discovery", lambda: DynamicClient(api_client, cache_file=cache_file))

    @classmethod
    def connect(cls, timeout_s: float, count: Count = lambda *_: None) -> Cluster:
        """The cluster that the operator runs in, or the one that the kubeconfig of KUBECONFIG names.

        Raises:
            ClusterError: there is neither, or the API server does not answer.
        """
        configuration = kubernetes.client.Configuration()
        try:
            if Path("/var/run/secrets/kubernetes.io/serviceaccount/token").exists():
                kubernetes.config.load_incluster_config(client_configuration=configuration)
            else:
                kubernetes.config.load_kube_config(client_configuration=configuration)
        except kubernetes.config.ConfigException as error:
            raise ClusterError(
                f"no cluster to connect to ({error}); set KUBECONFIG to a kubeconfig file", None
            ) from error
        # A failed request comes back through the queue, with a delay that other resources do not wait for.
        configuration.retries = False
        return cls(kubernetes.client.ApiClient(configuration), timeout_s, count)

    def apply(self, manifest: Manifest, dry_run: bool = False, manager: str = FIELD_MANAGER) -> Manifest:
        """Server-side apply under a field manager; takes fields over from other managers.

        Args:
            manifest: The fields that are ours.
            dry_run: Let the server check it all and write nothing.
            manager: Name of the manager.

        Raises:
            ClusterError: the server refused it or did not answer.
        """
        query = {"query_params": [("dryRun", "All")]} if dry_run else {}
        return self._request(
            "apply",
            manifest,
            lambda resource: resource.server_side_apply(
                body=manifest,
                field_manager=manager,
                force_conflicts=True,
                **self._options,
                **query,
            ),
        )

    def create(self, manifest: Manifest) -> Manifest:
        """Raises ClusterError where the server refused it (status 409: the name is taken) or is silent."""
        return self._request(
            "create",
            manifest,
            lambda resource: resource.create(
                body=manifest,
                namespace=manifest["metadata"]["namespace"],
                field_manager=FIELD_MANAGER,
                **self._options,
            ),
        )

    def create_if_absent(self, manifest: Manifest) -> bool:
        """Creates the object unless one of its name exists, which is left as it is. Returns whether it was
        created.

        Raises:
            ClusterError: the server refused it or did not answer.
        """
        meta = manifest["metadata"]
        if self.get(manifest["apiVersion"], manifest["kind"], meta["namespace"], meta["name"]) is not None:
            return False
        try:
            self.create(manifest)
        except ClusterError as error:
            if error.status == CONFLICT:
                return False
            raise
        return True

    def get(self, api_version: str, kind: str, namespace: str, name: str) -> Manifest | None:
        """The object, or None where there is none; raises ClusterError on any other failure."""
        manifest = _named(api_version, kind, namespace, name)
        try:
            return self._request(
                "get",
                manifest,
                lambda resource: resource.get(name=name, namespace=namespace, **self._options),
            )
        except ClusterError as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    def list(
        self, api_version: str, kind: str, namespace: str | None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        """All objects of a kind in a namespace (None: in all), with all of these labels.

        Raises:
            ClusterError: the server refused it or did not answer.
        """
        selector = ",".join(f"{key}={value}" for key, value in (labels or {}).items())
        answer = self._request(
            "list",
            _named(api_version, kind, namespace or "", "*"),
            lambda resource: resource.get(namespace=namespace, label_selector=selector, **self._options),
        )
        found: list[Manifest] = answer.get("items") or []
        return found

    def delete(self, api_version: str, kind: str, namespace: str, name: str) -> None:
        """Deletes an object, its dependants in the background; none of that name is fine.

        Raises:
            ClusterError: the server refused it or did not answer.
        """
        try:
            self._request(
                "delete",
                _named(api_version, kind, namespace, name),
                lambda resource: resource.delete(
                    name=name,
                    namespace=namespace,
                    body={"propagationPolicy": "Background"},
                    **self._options,
                ),
            )
        except ClusterError as error:
            if error.status != _NOT_FOUND:
                raise

    def patch(self, manifest: Manifest, body: Mapping[str, Any]) -> Manifest:
        """Merges `body` into an object that was read, unless it has changed since (status 409).

        Raises:
            ClusterError: the object has changed, the server refused or did not answer.
        """
        return self._merge("patch", manifest, body, lambda resource: resource)

    def patch_status(self, manifest: Manifest, status: Mapping[str, Any]) -> Manifest:
        """Merges `status` into the status of an object that was read, unless the object has changed since.

        Raises:
            ClusterError: the object has changed (status 409), the server refused or did not answer.
        """
        return self._merge("patch", manifest, {"status": status}, lambda resource: resource.status)

    def replace(self, manifest: Manifest) -> Manifest:
        """Writes a whole object that was read, unless it has changed since.

        Raises:
            ClusterError: the object has changed (status 409), the server refused or did not answer.
        """
        return self._request(
            "update",
            manifest,
            lambda resource: resource.replace(body=manifest, **self._options),
        )

    def has(self, api_version: str, kind: str) -> bool:
        """Whether the server knows the kind.

        Raises:
            ClusterError: the server did not answer.
        """

        def search() -> bool:
            with self._discovering:
                found = self._client.resources.search(api_version=api_version, kind=kind)
                return any(entry.kind == kind for entry in found)

        return bool(self._call("discovery", search))

    def kinds(self) -> Kinds:
        """What of the optional kinds the server has now, by a new discovery.

        Raises:
            ClusterError: the server did not answer.
        """

        def discover() -> None:
            with self._discovering:
                self._client.resources.invalidate_cache()

        self._call("discovery", discover)
        modern = self.has("policy/v1", "PodDisruptionBudget")
        return Kinds(
            disruption_budget="policy/v1" if modern else "policy/v1beta1",
            pod_monitor=self.has(MONITORING, "PodMonitor"),
            service_monitor=self.has(MONITORING, "ServiceMonitor"),
        )

    def _merge(self, verb: str, manifest: Manifest, body: Mapping[str, Any], part: Any) -> Manifest:
        meta = manifest["metadata"]
        version = {"resourceVersion": meta["resourceVersion"]}
        whole = {**body, "metadata": {**body.get("metadata", {}), **version}}
        return self._request(
            verb,
            manifest,
            lambda resource: part(resource).patch(
                body=whole,
                name=meta["name"],
                namespace=meta["namespace"],
                content_type="application/merge-patch+json",
                field_manager=FIELD_MANAGER,
                **self._options,
            ),
        )

    def _request(self, verb: str, manifest: Manifest, request: Any) -> Manifest:
        meta = manifest["metadata"]
        what = f"{manifest['kind']} {meta['namespace']}/{meta['name']}"

        def send() -> Manifest:
            response = request(self._resource(manifest["apiVersion"], manifest["kind"]))
            answer: Manifest = json.loads(response.data)
            return answer

        try:
            answer: Manifest = self._call(what, send)
        except ClusterError as error:
            self._count(verb, manifest["kind"], error.status)
            raise
        self._count(verb, manifest["kind"], _OK)
        return answer

    def _resource(self, api_version: str, kind: str) -> Any:
        with self._discovering:
            key = (api_version, kind)
            if key not in self._resources:
                self._resources[key] = self._client.resources.get(api_version=api_version, kind=kind)
            return self._resources[key]

    def _call(self, what: str, call: Any) -> Any:
        try:
            return call()
        except DynamicApiError as error:
            raise ClusterError(f"{what}: {_reason(error)}", error.status) from error
        except (
            kubernetes.dynamic.exceptions.ResourceNotFoundError,
            urllib3.exceptions.HTTPError,
            OSError,
            ValueError,  # an answer that is no JSON: something stands in between
        ) as error:
            raise ClusterError(f"{what}: {error}", None) from error


def _named(api_version: str, kind: str, namespace: str, name: str) -> Manifest:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"namespace": namespace, "name": name}}


def _reason(error: Any) -> str:
    """The sentence of the API server's Status object, else HTTP's reason."""
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.status} {error.reason}"
