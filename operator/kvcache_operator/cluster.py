# SPDX-License-Identifier: Apache-2.0
"""The API server, by `kubernetes`' dynamic client. Every method blocks: call it from a worker thread."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import kubernetes
import urllib3
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ConflictError, DynamicApiError, NotFoundError

from kvcache_operator import FIELD_MANAGER
from kvcache_operator.render import Manifest


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
    """One API server. Safe to share between threads: the client's connection pool is."""

    def __init__(self, api_client: Any, timeout_s: float) -> None:
        """Reads what kinds the server has; raises ClusterError where it does not answer.

        Args:
            api_client: A `kubernetes.client.ApiClient`.
            timeout_s: The longest that one request may take, in seconds.
        """
        self._timeout_s = timeout_s
        # The client keeps what it discovers in a file: a folder of our own, since the default is one for all
        # users.
        self._discovery = tempfile.TemporaryDirectory(prefix="kvcache-operator-")
        cache_file = str(Path(self._discovery.name) / "discovery.json")
        self._client = self._call("discovery", lambda: DynamicClient(api_client, cache_file=cache_file))

    @classmethod
    def connect(cls, timeout_s: float) -> Cluster:
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
        return cls(kubernetes.client.ApiClient(configuration), timeout_s)

    def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply under the operator's field manager; takes fields over from other managers.

        Raises:
            ClusterError: the server refused it or did not answer.
        """
        return self._request(
            manifest,
            lambda resource: resource.server_side_apply(
                body=manifest,
                field_manager=FIELD_MANAGER,
                force_conflicts=True,
                _request_timeout=self._timeout_s,
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
            self._request(
                manifest,
                lambda resource: resource.create(
                    body=manifest, field_manager=FIELD_MANAGER, _request_timeout=self._timeout_s
                ),
            )
        except ClusterError as error:
            if isinstance(error.__cause__, ConflictError):
                return False
            raise
        return True

    def get(self, api_version: str, kind: str, namespace: str, name: str) -> Manifest | None:
        """The object, or None where there is none; raises ClusterError on any other failure."""
        manifest = {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {"namespace": namespace, "name": name},
        }
        try:
            return self._request(
                manifest,
                lambda resource: resource.get(
                    name=name, namespace=namespace, _request_timeout=self._timeout_s
                ),
            )
        except ClusterError as error:
            if isinstance(error.__cause__, NotFoundError):
                return None
            raise

    def patch_status(self, manifest: Manifest, status: dict[str, Any]) -> None:
        """Merges `status` into the status of an object that was read, unless the object has changed since.

        Raises:
            ClusterError: the object has changed (status 409), the server refused or did not answer.
        """
        meta = manifest["metadata"]
        self._request(
            manifest,
            lambda resource: resource.status.patch(
                body={"metadata": {"resourceVersion": meta["resourceVersion"]}, "status": status},
                name=meta["name"],
                namespace=meta["namespace"],
                content_type="application/merge-patch+json",
                field_manager=FIELD_MANAGER,
                _request_timeout=self._timeout_s,
            ),
        )

    def _request(self, manifest: Manifest, request: Any) -> Manifest:
        meta = manifest["metadata"]
        what = f"{manifest['kind']} {meta['namespace']}/{meta['name']}"

        def send() -> Manifest:
            resource = self._client.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])
            answer: Manifest = request(resource).to_dict()
            return answer

        return self._call(what, send)  # type: ignore[no-any-return]

    def _call(self, what: str, call: Any) -> Any:
        try:
            return call()
        except DynamicApiError as error:
            raise ClusterError(f"{what}: {_reason(error)}", error.status) from error
        except (
            kubernetes.dynamic.exceptions.ResourceNotFoundError,
            urllib3.exceptions.HTTPError,
            OSError,
        ) as error:
            raise ClusterError(f"{what}: {error}", None) from error


def _reason(error: Any) -> str:
    """The sentence of the API server's Status object, else HTTP's reason."""
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.status} {error.reason}"
