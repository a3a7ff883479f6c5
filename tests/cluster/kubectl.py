# SPDX-License-Identifier: Apache-2.0
"""kubectl, as a user has it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
WITHIN_S = 90.0


class Kubectl:
    """Runs kubectl against one server. Errors are CalledProcessError, with its stderr in the text."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig

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
        done = self.run("get", kind, name, "-n", namespace, "-o", "json", "--ignore-not-found")
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, kind, done.stdout, done.stderr)
        found: dict[str, Any] | None = json.loads(done.stdout) if done.stdout.strip() else None
        return found

    def items(self, kind: str, namespace: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self("get", kind, "-n", namespace, "-o", "json"))["items"]
        return found

    def patch(self, kind: str, name: str, namespace: str, change: dict[str, Any]) -> str:
        return self("patch", kind, name, "-n", namespace, "--type=merge", "-p", json.dumps(change))

    def patch_status(self, path: str, status: dict[str, Any]) -> None:
        """Writes the status of a built-in object: what a kubelet or controller would do."""
        current = json.loads(self("get", "--raw", path))
        self(
            "replace",
            "--raw",
            f"{path}/status",
            "-f",
            "-",
            text=json.dumps({**current, "status": {**current.get("status", {}), **status}}),
        )


def eventually(check: Callable[[], T], what: str = "") -> T:
    """The first answer that holds; asserts that there is one in time."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        answer = check()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"{what or check} did not come true; last: {answer!r}"
        time.sleep(0.1)
