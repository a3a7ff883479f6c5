# SPDX-License-Identifier: Apache-2.0
"""`local up`: from a resource to a running pod."""

from __future__ import annotations

import difflib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcache_operator.apply import draw_token
from kvcache_operator.errors import ResourceError
from kvcache_operator.local.checks import CLAIM_PATH, check_machine
from kvcache_operator.local.down import stop
from kvcache_operator.local.errors import LocalError
from kvcache_operator.local.paths import PathRewriter
from kvcache_operator.local.pod import LOCAL_HOST, local_pod
from kvcache_operator.local.procfs import ProcessId, read_process, traced
from kvcache_operator.local.state import ContainerState, Phase, RunState, StateFolder
from kvcache_operator.local.sweep import sweep
from kvcache_operator.local.volumes import fill_volumes, mount_folders, volume_folders, volumes_root
from kvcache_operator.models import KVCache
from kvcache_operator.plan import TOKEN_KEY, TOKEN_MOUNT, Plan, make_plan
from kvcache_operator.render import Manifest, Rendered, render
from kvcache_operator.render.secret import with_token
from kvcache_operator.settings import Settings

Say = Callable[[str], None]

_POLL_S = 0.2
_PROGRESS_S = 10.0
_PROGRESS_WIDTH = 110
_TAIL_LINES = 25
_TAIL_BYTES = 16_384


def up(resource: KVCache, claims: Mapping[str, Path], folder: StateFolder, say: Say) -> RunState:
    """Plans, renders and starts a resource; see `start`.

    Args:
        resource: What to run.
        claims: The folder that stands for each claim.
        folder: Where state, logs and volumes go.
        say: Takes lines for the user.

    Raises:
        ResourceError: fields that do not fit together, or not this machine.
        LocalError, KeyboardInterrupt: see `start`.
    """
    plan = make_plan(resource, Settings())
    return start(plan, render(plan), claims, folder, say)


def start(
    plan: Plan, rendered: Rendered, claims: Mapping[str, Path], folder: StateFolder, say: Say
) -> RunState:
    """Starts a rendered pod and waits until it is ready; if it does not get there, nothing stays.

    Raises:
        ResourceError: a field that does not fit this machine.
        LocalError: the pod cannot be started, ended, or did not become ready.
        KeyboardInterrupt: the user gave up; everything was stopped.
    """
    starter = _this_process()
    with _locked(folder):
        _refuse_second(folder)
        if plan.spec.replicas > 1:
            say(f"spec.replicas is {plan.spec.replicas}; a local run has one pod")
        state = _lay_out(plan, rendered, claims, folder, starter)
        supervisor = None
        try:
            folder.write(state)
            supervisor = _launch(folder, say)
            with _sigterm_as_interrupt():
                return _wait(folder, supervisor, say)
        except BaseException:
            say("stopping everything")
            if supervisor is not None:
                # It ends its containers even if we are interrupted once more while we wait for it.
                supervisor.terminate()
                supervisor.wait()
            stop(folder)
            raise


def _lay_out(
    plan: Plan, rendered: Rendered, claims: Mapping[str, Path], folder: StateFolder, starter: ProcessId
) -> RunState:
    """Checks the machine, then makes the volumes; makes nothing if a check fails."""
    pod_spec = rendered.workload["spec"]["template"]["spec"]
    _check_claims(plan, claims)
    root = volumes_root(folder.path, pod_spec)
    try:
        folders = volume_folders(pod_spec, root, claims)
        mounts = mount_folders(pod_spec, folders)
        rewrite = PathRewriter(mounts)
        check_machine(plan.spec, claims, rewrite)
        objects = _objects(rendered)
        pod = local_pod(rendered.workload, objects, rewrite, os.environ)
        fill_volumes(pod_spec, folders, objects, rewrite)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    return RunState(
        name=plan.name,
        run_id=uuid.uuid4().hex,
        starter=starter,
        pod=pod,
        containers={container.name: ContainerState() for container in pod.containers},
        volumes=str(root),
        completions_url=f"http://{LOCAL_HOST}:{plan.spec.engine.port}/v1",
        admin_url=f"http://{LOCAL_HOST}:{plan.spec.admin.port}",
        served_name=plan.served_name,
        token_file=str(Path(mounts[TOKEN_MOUNT]) / TOKEN_KEY),
    )


def _objects(rendered: Rendered) -> dict[tuple[str, str], Manifest]:
    objects = [rendered.config_map]
    if rendered.token_secret is not None:
        objects.append(with_token(rendered.token_secret, draw_token()))
    return {(entry["kind"], entry["metadata"]["name"]): entry for entry in objects}


def _check_claims(plan: Plan, claims: Mapping[str, Path]) -> None:
    disk = plan.spec.cache.tiers.disk
    places = {CLAIM_PATH: plan.spec.model.claim}
    if disk is not None:
        places["spec.cache.tiers.disk.volume.claimName"] = disk.volume.claim_name
    wanted = {claim for claim in places.values() if claim is not None}
    for path, name in places.items():
        if name is not None and name not in claims:
            near = difflib.get_close_matches(name, claims.keys() - wanted, n=1)
            text = f"{name} has no folder here; give it one with --claim {name}=FOLDER"
            text += f" (--claim {near[0]}=... was read)" if near else ""
            raise ResourceError.at(path, text)
    for claim in sorted(claims.keys() - wanted):
        raise ResourceError.at(
            "--claim", f"{claim} is no claim of this resource; remove it or correct {CLAIM_PATH}"
        )


def _this_process() -> ProcessId:
    process = read_process(os.getpid())
    if process is None:
        raise LocalError("/proc does not show this process; mount it")
    return process.id


@contextmanager
def _locked(folder: StateFolder) -> Iterator[None]:
    """Keeps a second `up` of the same folder out until this one has ended."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        opened = (folder.path / "lock").open("w")
    except OSError as error:
        raise LocalError(
            f"--state: {folder.path} cannot hold the state ({error.strerror}); name a folder that can"
        ) from error
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LocalError(
                f"another `local up` is at work in {folder.path}; wait for it or end it"
            ) from error
        try:
            yield
        finally:
            if sorted(path.name for path in folder.path.iterdir()) == ["lock"]:
                # Nothing came of it: a folder that was made for this run alone is not left behind.
                (folder.path / "lock").unlink()
                folder.path.rmdir()


def _refuse_second(folder: StateFolder) -> None:
    """Raises LocalError where a run is up in this folder; sweeps up what a dead one has left."""
    state = folder.read()
    if state is None:
        return
    if (state.supervisor is not None and state.supervisor.is_alive) or traced(state.traces):
        raise LocalError(
            f"{state.name} is up already in {folder.path}; end it with `local down {state.name}` first"
        )
    sweep(state)
    folder.file.unlink()


def _launch(folder: StateFolder, say: Say) -> subprocess.Popen[bytes]:
    """The supervisor, in a session of its own: neither Ctrl-C nor the end of a terminal reaches it."""
    folder.logs.mkdir(exist_ok=True)
    for log in folder.logs.glob("*.log"):
        log.unlink()
    say(f"starting; logs are in {folder.logs}")
    with folder.log("supervisor").open("ab") as log_file:
        return subprocess.Popen(
            [sys.executable, "-m", "kvcache_operator.local.supervisor", str(folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(folder: StateFolder, supervisor: subprocess.Popen[bytes], say: Say) -> RunState:
    began = said = time.monotonic()
    while True:
        # Asked before reading: a supervisor that has ended has written its last state.
        code = supervisor.poll()
        state = folder.read()
        if state is None:
            raise LocalError(f"{folder.file} has gone; somebody ran `local down`")
        if state.phase is Phase.READY:
            return state
        if state.phase in (Phase.FAILED, Phase.STOPPED) or code is not None:
            supervisor.wait()
            raise LocalError(_failure(folder, state))
        if time.monotonic() - said >= _PROGRESS_S:
            said = time.monotonic()
            say(_progress(folder, state, said - began))
        time.sleep(_POLL_S)


def _failure(folder: StateFolder, state: RunState) -> str:
    culprit = state.culprit or "supervisor"
    reason = state.reason or "the supervisor has ended"
    log = folder.log(culprit)
    return "\n".join(
        [f"--- the end of {log}", *_tail(log, _TAIL_LINES), "---", f"{state.name}: {reason}; see {log}"]
    )


def _progress(folder: StateFolder, state: RunState, seconds: float) -> str:
    waiting = {name: record for name, record in state.containers.items() if record.phase is not Phase.READY}
    name, record = next(iter(waiting.items()), ("supervisor", ContainerState()))
    if record.phase is Phase.NOT_READY:
        last = record.detail
    else:
        last = (_tail(folder.log(name), 1) or ["no output yet"])[0]
    return f"{seconds:.0f} s, waiting for {', '.join(waiting)}: {last}"[:_PROGRESS_WIDTH]


def _tail(log: Path, lines: int) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the wait in the same way as Ctrl-C."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
