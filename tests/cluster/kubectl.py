# SPDX-License-Identifier: Apache-2.0
"""kubectl, as a user has it, and reads that need no process of their own: tests ask all the time."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

T = TypeVar("T")
WITHIN_S = 90.0
_CORE, _APPS = "api/v1", "apis/apps/v1"
_PATHS = {
    **{kind: (_CORE, f"{kind}s") for kind in ("pod", "service", "secret", "configmap", "event")},
    **{kind: (_APPS, f"{kind}s") for kind in ("deployment", "statefulset")},
    "cm": (_CORE, "configmaps"),
    "events": (_CORE, "events"),
    "pvc": (_CORE, "persistentvolumeclaims"),
    "kvc": ("apis/kvcache.dev/v1alpha1", "kvcaches"),
    "netpol": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "networkpolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "pdb": ("apis/policy/v1beta1", "poddisruptionbudgets"),
    "poddisruptionbudget": ("apis/policy/v1beta1", "poddisruptionbudgets"),
}
"""Where kinds are, by the names that tests give them, on the servers that tests start."""


class Kubectl:
    """Runs kubectl against one server. Errors are CalledProcessError, with its stderr in the text."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        config = yaml.safe_load(kubeconfig.read_text())
        self._http = httpx.Client(
            base_url=config["clusters"][0]["cluster"]["server"],
            headers={"Authorization": f"Bearer {config['users'][0]['user']['token']}"},
            # The servers sign their own certificates, and live on this machine for the time of a test.
            verify=False,  # noqa: S501
            trust_env=False,
            timeout=WITHIN_S,
        )

    def __call__(self, *arguments: str, text: str | None = None) -> str:
        """What it prints; `text` goes to its standard input."""
        done = self.run(*arguments, text=text)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, arguments, done.stdout, done.stderr)
        return done.stdout

    def run(self, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """The same, whatever its exit code."""
        return subprocess.run(
            ["kubectl", "--kubeconfig", str(self._kubeconfig), *arguments],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=WITHIN_S,
        )

    def apply(self, document: dict[str, Any], *more: str) -> str:
        return self("apply", *more, "-f", "-", text=json.dumps(document))

    def get(self, kind: str, name: str, namespace: str) -> dict[str, Any] | None:
        """The object; None where there is none."""
        answer = self._http.get(f"{_path(kind, namespace)}/{name}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def items(self, kind: str, namespace: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (
            self._http.get(_path(kind, namespace)).raise_for_status().json()["items"]
        )
        return found

    def patch(self, kind: str, name: str, namespace: str, change: dict[str, Any]) -> str:
        return self("patch", kind, name, "-n", namespace, "--type=merge", "-p", json.dumps(change))

    def patch_status(self, path: str, status: dict[str, Any]) -> None:
        """Writes the status of a built-in object: what a kubelet or controller would do."""
        current = self._http.get(path).raise_for_status().json()
        changed = {**current, "status": {**current.get("status", {}), **status}}
        self._http.put(f"{path}/status", json=changed).raise_for_status()


def _path(kind: str, namespace: str) -> str:
    group, plural = _PATHS[kind]
    return f"/{group}/namespaces/{namespace}/{plural}"


def eventually(check: Callable[[], T], what: str = "") -> T:
    """The first answer that holds; asserts that there is one in time."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        answer = check()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"{what or check} did not come true; last: {answer!r}"
        time.sleep(0.1)
