# SPDX-License-Identifier: Apache-2.0
"""Processes as /proc shows them: who is ours, and how to end it without ending another (see proc(5))."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kvcache_operator.local.errors import LocalError

PROC = Path("/proc")
_KILL_WITHIN_S = 10.0
"""A process that has not gone this long after SIGKILL hangs in the kernel."""


class ProcessId(BaseModel):
    """A process beyond its number, which is used again: with the start time it is never another's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    start_ticks: int
    """Clock ticks between the machine's boot and the start."""
    boot_id: str
    """Which boot, since ticks begin anew with each."""

    @property
    def is_alive(self) -> bool:
        """Whether it runs; a zombie does not."""
        process = read_process(self.pid)
        return process is not None and process.id == self and not process.is_zombie


@dataclass(frozen=True)
class Process:
    """What is known of a process that exists."""

    id: ProcessId
    parent: int
    session: int
    is_zombie: bool


class Trace(BaseModel):
    """By what the processes of one container are known.

    None alone suffices: a process can leave its session, and one that sets its title (as vLLM's do)
    overwrites the memory in which /proc shows its environment.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    marker: str
    """`NAME=value` in the environment that its first process was started with."""
    leader: ProcessId | None
    """Its first process, which leads a session of its own."""


def boot_id() -> str:
    """Identity of the machine's current boot; raises LocalError where there is no /proc of Linux."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        raise LocalError("this machine has no /proc of Linux; a local run needs Linux") from error


def read_process(pid: int) -> Process | None:
    """The process of that number, or None."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    # The name in parentheses may hold blanks and parentheses itself; the fields after it begin with the
    # state.
    fields = text.rpartition(")")[2].split()
    return Process(
        id=ProcessId(pid=pid, start_ticks=int(fields[19]), boot_id=boot_id()),
        parent=int(fields[1]),
        session=int(fields[3]),
        is_zombie=fields[0] in "ZX",
    )


def own_processes() -> list[Process]:
    """All processes of this user that run."""
    user, found = os.getuid(), []
    for entry in PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if entry.stat().st_uid != user:
                continue
        except OSError:
            continue
        process = read_process(int(entry.name))
        if process is not None and not process.is_zombie:
            found.append(process)
    return found


def traced(traces: Iterable[Trace], ancestor: int | None = None) -> list[ProcessId]:
    """The processes of the traces, and all that descend from them or from `ancestor` (itself not)."""
    processes, traces = own_processes(), list(traces)
    known = {process.id.pid for process in processes}
    found = {
        process.id.pid: process for process in processes if any(_belongs(process, t, known) for t in traces)
    }
    roots = set(found) | ({ancestor} if ancestor is not None else set())
    grown = True
    while grown:
        children = [p for p in processes if p.parent in roots and p.id.pid not in roots]
        grown = bool(children)
        found |= {process.id.pid: process for process in children}
        roots |= {process.id.pid for process in children}
    return [process.id for process in found.values() if process.id.pid not in (os.getpid(), ancestor)]


def _belongs(process: Process, trace: Trace, known: set[int]) -> bool:
    leader = trace.leader
    if leader is not None and process.id.boot_id == leader.boot_id:
        if process.id == leader:
            return True
        # The number of a session is taken as long as anyone is in it, so a session whose leader is gone, or
        # is the one that we started, is ours.
        is_our_session = process.session == leader.pid and process.id.start_ticks >= leader.start_ticks
        if is_our_session and (leader.pid not in known or _is_same(leader)):
            return True
    return trace.marker.encode() in _environment(process.id.pid)


def _is_same(leader: ProcessId) -> bool:
    process = read_process(leader.pid)
    return process is not None and process.id == leader


def _environment(pid: int) -> list[bytes]:
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def send(process: ProcessId, number: signal.Signals) -> None:
    """Sends a signal, unless the process has gone or its number is another's by now."""
    if process.is_alive:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def kill_all(find: Callable[[], list[ProcessId]]) -> list[ProcessId]:
    """SIGKILL to all that `find` finds, again and again, since they may have forked in between. Blocks.

    Returns:
        Those that are still there after some seconds, hanging in the kernel; normally none.
    """
    deadline = time.monotonic() + _KILL_WITHIN_S
    while (left := find()) and time.monotonic() < deadline:
        for process in left:
            send(process, signal.SIGKILL)
        time.sleep(0.02)
    return left
