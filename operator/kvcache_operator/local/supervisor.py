# SPDX-License-Identifier: Apache-2.0
"""Stands in for the kubelet: starts a pod's containers, probes them, starts them again, stops them.

A process of its own, left behind by `local up`: `python -m kvcache_operator.local.supervisor STATE_FOLDER`.
Until the pod is ready for the first time, a container that ends, or whose budget for starting does, ends the
run; from then on it is started again with the kubelet's back-off.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx

from kvcache_operator.local.errors import LocalError
from kvcache_operator.local.memory import shared_files
from kvcache_operator.local.pod import HttpProbe, LocalContainer
from kvcache_operator.local.probes import Streak, ask
from kvcache_operator.local.procfs import PROC, kill_all, read_process, send, traced
from kvcache_operator.local.state import MARKER, Phase, RunState, StateFolder
from kvcache_operator.local.sweep import sweep

BACK_OFF_S = 10.0
BACK_OFF_MOST_S = 300.0
BACK_OFF_RESET_S = 600.0
"""The kubelet's: the first restart at once, then after 10 s, doubled up to 300 s; 10 good minutes reset."""

SETTLE_BUDGETS = 8
"""So many times the budget of a readiness probe, which makes two minutes, a run has to become ready once all
containers have started. vLLM answers only when its ranks have their caches: a sidecar that still waits for
them then waits for ever. A cluster has its longer deadline alone."""

_LOOK_S = 1.0
_STARTING_GRACE_S = 10.0
"""Between SIGTERM and SIGKILL for containers that were never ready."""
"""Period of looking after orphans, shared memory and the `up` that waits."""
_PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    """One run."""

    def __init__(self, folder: StateFolder, state: RunState) -> None:
        self._folder = folder
        self._state = state
        self._stop = asyncio.Event()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._written = ""

    async def run(self) -> None:
        """Until the run has failed or is told to stop; afterwards all but logs and state is gone."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        supervisor = read_process(os.getpid())
        self._state.supervisor = supervisor.id if supervisor else None
        self._save()
        async with httpx.AsyncClient(trust_env=False) as client:
            keepers = [asyncio.create_task(self._keep(c, client)) for c in self._state.pod.containers]
            tasks = [*keepers, asyncio.create_task(self._look_after()), asyncio.create_task(self._deadline())]
            stopped = asyncio.create_task(self._stop.wait())
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                error = task.exception()
                if error is not None:
                    self._fail(f"the supervisor met {error!r}", "")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(container.name) for container in self._state.pod.containers))
        try:
            await asyncio.to_thread(sweep, self._state, os.getpid())
        except LocalError as error:
            self._fail(str(error), "")
        for container in self._state.containers.values():
            container.phase = Phase.STOPPED
        if self._state.phase is not Phase.FAILED:
            self._state.phase = Phase.STOPPED
        self._save()

    async def _keep(self, container: LocalContainer, client: httpx.AsyncClient) -> None:
        """Runs a container until the run ends, again and again."""
        delay, record = 0.0, self._state.containers[container.name]
        while True:
            started = time.monotonic()
            try:
                record.last_end = await self._once(container, client)
            except OSError as error:
                record.last_end = f"cannot be started ({error})"
            if not self._state.was_ready:
                self._fail(f"container {container.name} {record.last_end}", container.name)
                return
            if time.monotonic() - started > BACK_OFF_RESET_S:
                delay = 0.0
            record.phase, record.restarts = Phase.WAITING, record.restarts + 1
            self._note_readiness()
            await asyncio.sleep(delay)
            delay = min(max(BACK_OFF_S, 2 * delay), BACK_OFF_MOST_S)

    async def _once(self, container: LocalContainer, client: httpx.AsyncClient) -> str:
        """Runs a container until it ends or a probe wants its end; returns how it ended."""
        child = self._start(container)
        exited = asyncio.create_task(asyncio.to_thread(child.wait))
        probing = asyncio.create_task(self._probe(container, client))
        try:
            await asyncio.wait([exited, probing], return_when=asyncio.FIRST_COMPLETED)
            how = f"ended by itself, {_how(child.returncode)}" if exited.done() else probing.result()
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
        # What the first process leaves behind goes with it, as in a container of its own.
        await self._end(container.name)
        return how

    def _start(self, container: LocalContainer) -> subprocess.Popen[bytes]:
        env = {**container.env, MARKER: self._state.marker(container.name)}
        with self._folder.log(container.name).open("ab") as log:
            child = subprocess.Popen(
                container.argv,
                env=env,
                cwd=container.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # From its start to here nothing else ran, so `_reap` cannot have taken the child for an orphan.
        self._children[container.name] = child
        record = self._state.containers[container.name]
        process = read_process(child.pid)
        record.process, record.phase = process.id if process else None, Phase.STARTING
        self._note_readiness()
        return child

    async def _probe(self, container: LocalContainer, client: httpx.AsyncClient) -> str:
        """Probes until the container has to be ended; returns why."""
        if container.startup is not None:
            streak = Streak(container.startup)
            while not streak.verdict:
                wrong = await self._ask(container, container.startup, client)
                if streak.add(not wrong) is False:
                    return f"did not start within {container.startup.budget_s:g} s: {wrong}"
                if wrong:
                    await asyncio.sleep(container.startup.period_s)
        readiness = asyncio.create_task(self._watch_readiness(container, client))
        try:
            return await self._watch_liveness(container, client)
        finally:
            readiness.cancel()

    async def _watch_readiness(self, container: LocalContainer, client: httpx.AsyncClient) -> None:
        record = self._state.containers[container.name]
        if container.readiness is None:
            record.phase = Phase.READY
            self._note_readiness()
            return
        streak = Streak(container.readiness)
        while True:
            wrong = await self._ask(container, container.readiness, client)
            record.phase = Phase.READY if streak.add(not wrong) else Phase.NOT_READY
            self._note_readiness()
            await asyncio.sleep(container.readiness.period_s)

    async def _watch_liveness(self, container: LocalContainer, client: httpx.AsyncClient) -> str:
        if container.liveness is None:
            await asyncio.Event().wait()
            return ""
        streak = Streak(container.liveness)
        while True:
            wrong = await ask(client, container.liveness)
            if streak.add(not wrong) is False:
                return f"was ended, since it no longer answers: {wrong}"
            await asyncio.sleep(container.liveness.period_s)

    async def _ask(self, container: LocalContainer, probe: HttpProbe, client: httpx.AsyncClient) -> str:
        wrong = await ask(client, probe)
        record = self._state.containers[container.name]
        if wrong:
            record.detail = wrong
            self._save()
        elif record.detail.startswith(probe.url):
            record.detail = ""
        return wrong

    async def _end(self, name: str) -> None:
        """SIGTERM to the first process, as the kubelet does; SIGKILL to all that is left after the grace."""
        child = self._children.get(name)
        if child is None:
            return
        await self._note_memory()
        process = self._state.containers[name].process
        if child.poll() is None and process is not None:
            send(process, signal.SIGTERM)
            grace_s = self._state.pod.grace_s
            if not self._state.was_ready:
                # There is nothing to drain, and vLLM hears no signal while it loads.
                grace_s = min(grace_s, _STARTING_GRACE_S)
            deadline = time.monotonic() + grace_s
            while child.poll() is None and time.monotonic() < deadline:
                await asyncio.to_thread(_wait_for, child, min(_LOOK_S, grace_s))
                await self._note_memory()
        await asyncio.to_thread(kill_all, lambda: traced([self._state.trace(name)]))
        await asyncio.to_thread(child.wait)

    async def _deadline(self) -> None:
        """Ends a run that does not become ready: in all, or once every container has started."""
        began = started = time.monotonic()
        probes = [container.readiness for container in self._state.pod.containers if container.readiness]
        settle_s = SETTLE_BUDGETS * max((probe.budget_s for probe in probes), default=0.0)
        while True:
            await asyncio.sleep(_LOOK_S)
            waiting = {n: c for n, c in self._state.containers.items() if c.phase is not Phase.READY}
            if self._state.was_ready or not waiting:
                break
            now = time.monotonic()
            if any(record.phase is not Phase.NOT_READY for record in waiting.values()):
                started = now
            if now - started > settle_s or now - began > self._state.pod.ready_within_s:
                name, record = next(iter(waiting.items()))
                after = f"{now - began:.0f} s, {now - started:.0f} s after all had started"
                self._fail(f"container {name} is not ready after {after}: {record.detail}", name)
                return
        await asyncio.Event().wait()

    async def _look_after(self) -> None:
        while True:
            self._reap()
            await self._note_memory()
            if not self._state.was_ready and not self._state.starter.is_alive:
                self._fail("the command that started it has gone", "")
                return
            await asyncio.sleep(_LOOK_S)

    async def _note_memory(self) -> None:
        """Remembers the shared memory that the containers have now, since nobody can ask them afterwards."""
        ours = await asyncio.to_thread(traced, self._state.traces, os.getpid())
        files = await asyncio.to_thread(shared_files, [process.pid for process in ours])
        if not files <= self._state.shared_memory:
            self._state.shared_memory |= files
            self._save()

    def _reap(self) -> None:
        """Waits for the orphans that have become our children, but for no child that has its own waiter."""
        children = {child.pid for child in self._children.values()}
        for entry in PROC.iterdir():
            process = read_process(int(entry.name)) if entry.name.isdecimal() else None
            if process is None or not process.is_zombie or process.parent != os.getpid():
                continue
            if process.id.pid not in children:
                with suppress(ChildProcessError):
                    os.waitpid(process.id.pid, os.WNOHANG)

    def _note_readiness(self) -> None:
        if self._state.phase is not Phase.FAILED:
            ready = all(record.phase is Phase.READY for record in self._state.containers.values())
            if ready:
                self._state.phase, self._state.was_ready = Phase.READY, True
            elif self._state.was_ready:
                self._state.phase = Phase.NOT_READY
        self._save()

    def _fail(self, reason: str, culprit: str) -> None:
        if self._state.phase is not Phase.FAILED:
            self._state.phase, self._state.reason, self._state.culprit = Phase.FAILED, reason, culprit

    def _save(self) -> None:
        text = self._state.model_dump_json()
        if text != self._written:
            self._folder.write(self._state)
            self._written = text


def _wait_for(child: subprocess.Popen[bytes], seconds: float) -> None:
    """Until the child has ended, or the time is over."""
    deadline = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def main() -> None:
    """Supervises the run of the state folder that the command line names."""
    # What becomes an orphan below us becomes our child: nothing slips away from who has to end it.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = StateFolder(Path(sys.argv[1]))
    state = folder.read()
    if state is None:
        sys.exit(
            f"{folder.file} is not there; this program is started by `python -m kvcache_operator local up`"
        )
    asyncio.run(Supervisor(folder, state).run())


if __name__ == "__main__":
    main()
