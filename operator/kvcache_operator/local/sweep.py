# SPDX-License-Identifier: Apache-2.0
"""Leaves nothing of a run behind: processes, shared memory, sockets, folders. Safe to repeat."""

from __future__ import annotations

import shutil

from kvcache_operator.local.errors import LocalError
from kvcache_operator.local.memory import remove_unused, shared_files
from kvcache_operator.local.procfs import kill_all, traced
from kvcache_operator.local.state import RunState


def sweep(state: RunState, ancestor: int | None = None) -> None:
    """Ends with SIGKILL what is left of the run's processes, then removes its shared memory and its volumes.

    Blocks for as long as the kernel takes to end the processes.

    Args:
        state: The run.
        ancestor: A process all of whose descendants belong to the run.

    Raises:
        LocalError: a process cannot be ended.
    """
    left = traced(state.traces, ancestor)
    memory = state.shared_memory | shared_files(process.pid for process in left)
    hanging = kill_all(lambda: traced(state.traces, ancestor))
    if hanging:
        numbers = ", ".join(str(process.pid) for process in hanging)
        raise LocalError(f"the processes {numbers} do not end; they hang in the kernel, look at dmesg")
    remove_unused(memory)
    # The sockets lie in the volumes.
    shutil.rmtree(state.volumes, ignore_errors=True)
