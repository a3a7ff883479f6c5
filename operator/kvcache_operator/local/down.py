# SPDX-License-Identifier: Apache-2.0
"""`local down`: ends a run, in whatever state it is."""

from __future__ import annotations

import signal
import time

from kvcache_operator.local.procfs import kill_all, send
from kvcache_operator.local.state import StateFolder, default_root
from kvcache_operator.local.sweep import sweep

_SWEEP_S = 30.0
"""Beyond the pod's grace: for the supervisor to sweep up."""


def stop(folder: StateFolder) -> bool:
    """Ends a run and removes all of it but its logs, in whatever state it is. Returns whether there was one.

    Raises:
        LocalError: a process cannot be ended.
    """
    state = folder.read()
    if state is None:
        return False
    supervisor = state.supervisor
    if supervisor is not None and supervisor.is_alive:
        send(supervisor, signal.SIGTERM)
        deadline = time.monotonic() + state.pod.grace_s + _SWEEP_S
        while supervisor.is_alive and time.monotonic() < deadline:
            time.sleep(0.05)
        kill_all(lambda: [supervisor] if supervisor.is_alive else [])
    # The supervisor has swept already unless it was killed; it may have noted more since.
    sweep(folder.read() or state)
    folder.file.unlink(missing_ok=True)
    return True


def runs(name: str | None, folder: StateFolder | None) -> list[StateFolder]:
    """The runs that a command is about: the one in `folder`, else that of the name, else all."""
    if folder is not None:
        return [folder]
    if name is not None:
        return [StateFolder.default(name)]
    return [StateFolder(file.parent) for file in sorted(default_root().glob("*/state.json"))]
