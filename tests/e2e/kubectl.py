# SPDX-License-Identifier: Apache-2.0
"""kubectl, as a user types it; KUBECONFIG comes from the environment."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.binaries import ROOT

PATIENCE_S = 60.0


class StepError(AssertionError):
    """What a step wanted is not so. The text says what was seen."""


def kubectl(*arguments: str, text: str | None = None, within_s: float = PATIENCE_S) -> str:
    """What kubectl prints; runs in the repository.

    Args:
        text: goes to its standard input.

    Raises:
        StepError: it fails or takes longer than `within_s`.
    """
    try:
        done = subprocess.run(
            ["kubectl", *arguments],
            cwd=ROOT,
            input=text,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StepError(f"kubectl {' '.join(arguments)} took longer than {within_s:g} s") from error
    if done.returncode != 0:
        raise StepError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()[-800:]}")
    return done.stdout


def get(*arguments: str) -> dict[str, Any]:
    """`kubectl get ... -o json`, parsed."""
    answer: dict[str, Any] = json.loads(kubectl("get", *arguments, "-o", "json"))
    return answer


def names(*arguments: str) -> list[str]:
    """Names of the objects that `kubectl get` finds, as `kind/name`."""
    return kubectl("get", *arguments, "--ignore-not-found", "-o", "name").split()


def wait_until(what: str, holds: Callable[[], bool], within_s: float, every_s: float = 0.5) -> None:
    """Asks again and again.

    Raises:
        StepError: it does not hold in time.
    """
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise StepError(f"{what}: not so after {within_s:g} s")
        time.sleep(every_s)


def diagnostics(namespaces: tuple[str, ...], file: Path) -> None:
    """Writes what helps to see why a step failed: objects, events, and the ends of all containers' logs."""
    parts = []
    for namespace in namespaces:
        for arguments in (
            ("get", "kvc,all,pvc,configmap", "-o", "wide"),
            ("get", "kvc", "-o", "yaml"),
            ("describe", "pods"),
            ("get", "events", "--sort-by=.lastTimestamp"),
        ):
            parts.append(_said(*arguments, namespace=namespace))
        for pod in _said("get", "pods", "-o", "name", namespace=namespace, title=False).split():
            for more in ((), ("--previous",)):
                log = ("logs", pod, "--all-containers", "--tail=150", *more)
                parts.append(_said(*log, namespace=namespace))
    file.write_text("\n".join(parts))


def _said(*arguments: str, namespace: str, title: bool = True) -> str:
    command = ["kubectl", "--namespace", namespace, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    head = f"$ {' '.join(command)}\n" if title else ""
    return f"{head}{done.stdout}{done.stderr if title else ''}"
