# SPDX-License-Identifier: Apache-2.0
"""Local runs with real processes: they come up as rendered, and nothing of them stays, however they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kvcache_operator.errors import ResourceError
from kvcache_operator.local.down import runs, stop
from kvcache_operator.local.errors import LocalError
from kvcache_operator.local.procfs import traced
from kvcache_operator.local.report import RunReport, report
from kvcache_operator.local.state import MARKER, Phase, RunState, StateFolder
from kvcache_operator.local.up import start
from tests.operator.resources import ROOT
from tests.operator.toy_run import eventually, free_ports, given, toy_plan, toy_pod, toy_up


@pytest.fixture
def folder(socket_dir: Path) -> Iterator[StateFolder]:
    """A state folder; what a failed test leaves running is stopped."""
    state_folder = StateFolder(socket_dir / "run")
    yield state_folder
    stop(state_folder)


def processes_of(folder: StateFolder) -> list[psutil.Process]:
    """Processes with the folder in their command line or the run's marker in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            words = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(folder.path) in word for word in words):
            found.append(process)
    return found


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def seen(folder: StateFolder) -> RunReport:
    found = report(folder)
    assert found is not None
    return found


def process_of(folder: StateFolder, container: str) -> int:
    pid = seen(folder).containers[container].pid
    assert pid is not None
    return pid


def assert_nothing_stays(folder: StateFolder, state: RunState) -> None:
    assert processes_of(folder) == []
    assert not Path(state.volumes).exists()
    assert not folder.file.exists()


def test_a_pod_runs_as_rendered(folder: StateFolder) -> None:
    lines: list[str] = []
    state = toy_up(folder, lines.append)
    assert httpx.get(f"{state.completions_url}/x").text == "ok"
    assert httpx.get(f"{state.admin_url}/readyz").text == "ok"
    assert lines == [f"starting; logs are in {folder.logs}"]

    engine = given(folder, "vllm")
    volumes = Path(state.volumes)
    assert engine["env"]["HOME"] == engine["folder"] == str(volumes / "home")
    assert engine["env"]["KVCACHE_ADMIN_TOKEN_FILE"] == state.token_file
    assert engine["env"]["PYTHONHASHSEED"] == "0"
    assert engine["env"]["PATH"].startswith(f"{Path(sys.executable).parent}:")
    # As in a container, nothing else of this process's environment is there.
    assert "PYTEST_CURRENT_TEST" in os.environ
    assert "PYTEST_CURRENT_TEST" not in engine["env"]
    assert engine["argv"][1] == "127.0.0.1"
    config, token = engine["files"].values()
    assert f"runtime_dir: {volumes}/runtime\n" in config
    assert token == Path(state.token_file).read_text()
    assert Path(state.token_file).stat().st_mode & 0o777 == 0o600
    assert volumes.stat().st_mode & 0o777 == 0o700
    assert (volumes / "runtime" / "admin.sock").is_socket()
    assert not (volumes / "dshm").exists()

    found = seen(folder)
    assert found.phase is Phase.READY
    assert {container.restarts for container in found.containers.values()} == {0}
    assert stop(folder)
    assert_nothing_stays(folder, state)
    # Logs are for those who come afterwards.
    assert given(folder, "vllm") == engine
    assert report(folder) is None
    assert not stop(folder)


def test_a_container_that_ends_at_the_start_ends_the_run(folder: StateFolder) -> None:
    with pytest.raises(LocalError) as caught:
        toy_up(folder, engine_flags=["--exit-code", "3"], admin_flags=["--leave-behind"])
    assert "container vllm ended by itself, exit code 3" in str(caught.value)
    assert "this is why it ends" in str(caught.value)
    assert str(folder.log("vllm")) in str(caught.value)
    assert processes_of(folder) == []
    assert not (folder.path / "volumes").exists()
    assert report(folder) is None


def test_a_container_that_does_not_start_in_time(folder: StateFolder) -> None:
    with pytest.raises(
        LocalError, match=r"container vllm did not start within 2 s: http://127\.0\.0\.1:\d+/health: "
    ):
        toy_up(folder, engine_flags=["--deaf"], startup_failures=20)
    assert processes_of(folder) == []


@pytest.mark.parametrize(
    "limits",
    [{"ready_within_s": 3}, {"readiness_failures": 3}],
    ids=["within its deadline", "soon after all have started"],
)
def test_a_pod_that_does_not_become_ready(folder: StateFolder, limits: dict[str, Any]) -> None:
    answer = r"http://127\.0\.0\.1:\d+/readyz: HTTP 503 rank 0 is missing"
    with pytest.raises(LocalError, match=rf"container admin is not ready after \d+ s, .*: {answer}"):
        toy_up(folder, admin_flags=["--not-ready"], **limits)
    assert processes_of(folder) == []


def test_a_program_that_is_not_there(folder: StateFolder) -> None:
    plan = toy_plan(free_ports(2))
    rendered = toy_pod(plan)
    rendered.workload["spec"]["template"]["spec"]["containers"][0]["command"] = ["no-such-program"]
    with pytest.raises(LocalError, match=r"container vllm cannot be started .*no-such-program"):
        start(plan, rendered, {}, folder, print)
    assert processes_of(folder) == []


def test_a_killed_sidecar_comes_back_and_does_not_disturb_the_engine(folder: StateFolder) -> None:
    state = toy_up(folder)
    engine, sidecar = process_of(folder, "vllm"), process_of(folder, "admin")
    os.kill(sidecar, signal.SIGKILL)
    eventually(lambda: seen(folder).containers["admin"].restarts == 1)
    eventually(lambda: seen(folder).phase is Phase.READY)
    found = seen(folder)
    assert found.containers["admin"].last_end == "ended by itself, killed by SIGKILL"
    assert process_of(folder, "admin") != sidecar
    assert process_of(folder, "vllm") == engine
    assert httpx.get(state.completions_url).text == "ok"
    assert "restarts 1" in str(found)


def test_a_killed_engine_leaves_nothing(folder: StateFolder) -> None:
    state = toy_up(folder, engine_flags=["--leave-behind"])
    before = given(folder, "vllm")
    eventually(lambda: any(f.path == before["shared_memory"] for f in read(folder).shared_memory))
    os.kill(process_of(folder, "vllm"), signal.SIGKILL)
    # What the engine left is gone before the next one starts.
    eventually(lambda: seen(folder).containers["vllm"].restarts == 1)
    assert not any(is_running(pid) for pid in before["children"].values())
    eventually(lambda: seen(folder).phase is Phase.READY)
    after = given(folder, "vllm")
    assert stop(folder)
    assert_nothing_stays(folder, state)
    assert not any(is_running(pid) for pid in after["children"].values())
    assert not Path(before["shared_memory"]).exists()
    assert not Path(after["shared_memory"]).exists()


def test_a_killed_supervisor_and_engine_leave_nothing(folder: StateFolder) -> None:
    state = toy_up(folder, engine_flags=["--leave-behind"])
    engine = given(folder, "vllm")
    eventually(lambda: any(f.path == engine["shared_memory"] for f in read(folder).shared_memory))
    supervisor = read(folder).supervisor
    assert supervisor is not None
    for pid in (supervisor.pid, process_of(folder, "vllm")):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not supervisor.is_alive)
    found = seen(folder)
    assert found.phase is Phase.FAILED
    assert "its supervisor has gone and left" in found.reason
    assert all(is_running(pid) for pid in engine["children"].values())
    assert stop(folder)
    assert_nothing_stays(folder, state)
    assert not any(is_running(pid) for pid in engine["children"].values())
    assert not Path(engine["shared_memory"]).exists()


def test_other_peoples_processes_and_memory_stay(folder: StateFolder, tmp_path: Path) -> None:
    stranger = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={MARKER: "other/vllm"}
    )
    memory = Path("/dev/shm") / f"test-{os.getpid()}"
    memory.write_bytes(b"x")
    try:
        toy_up(folder, engine_flags=["--leave-behind"])
        assert stop(folder)
        assert stranger.poll() is None
        assert memory.exists()
    finally:
        memory.unlink()
        stranger.kill()
        stranger.wait()


def test_a_container_that_ignores_sigterm_is_killed_after_the_grace(folder: StateFolder) -> None:
    state = toy_up(folder, engine_flags=["--stubborn"], grace_s=0.5)
    assert stop(folder)
    assert_nothing_stays(folder, state)


def test_a_second_run_in_the_same_folder_is_refused(folder: StateFolder) -> None:
    toy_up(folder)
    with pytest.raises(LocalError, match=r"qwen is up already in .*; end it with `local down qwen` first"):
        toy_up(folder)
    assert seen(folder).phase is Phase.READY


def test_of_several_replicas_one_runs(folder: StateFolder) -> None:
    lines: list[str] = []
    toy_up(folder, lines.append, replicas=3)
    assert lines[0] == "spec.replicas is 3; a local run has one pod"
    assert len(processes_of(folder)) == 3  # the supervisor and the two containers


def test_what_a_dead_run_left_makes_way_for_the_next(folder: StateFolder) -> None:
    first = toy_up(folder)
    supervisor, first_traces = read(folder).supervisor, read(folder).traces
    assert supervisor is not None
    for pid in (supervisor.pid, process_of(folder, "vllm"), process_of(folder, "admin")):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not traced(first_traces))
    second = toy_up(folder)
    assert second.run_id != first.run_id
    assert seen(folder).phase is Phase.READY


@pytest.mark.parametrize(("index", "field"), [(0, "spec.engine.port"), (1, "spec.admin.port")])
def test_a_busy_port_is_named_by_its_field(folder: StateFolder, index: int, field: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = free_ports(2)
        ports[index] = other.getsockname()[1]
        plan = toy_plan(ports)
        with pytest.raises(ResourceError) as caught:
            start(plan, toy_pod(plan), {}, folder, print)
    assert str(caught.value) == (
        f"{field}: port {ports[index]} is in use on this machine; end what uses it, or write another port"
    )
    assert processes_of(folder) == []
    assert not (folder.path / "volumes").exists()


def test_a_deep_state_folder_has_its_sockets_elsewhere(tmp_path: Path) -> None:
    deep = StateFolder(tmp_path.joinpath(*["a-rather-long-name"] * 5))
    state = toy_up(deep)
    try:
        assert len(str(Path(state.volumes) / "runtime")) < 60
        assert (Path(state.volumes) / "runtime" / "admin.sock").is_socket()
    finally:
        assert stop(deep)
    assert not Path(state.volumes).exists()


def test_a_container_that_no_longer_answers_is_ended_and_started_again(folder: StateFolder) -> None:
    toy_up(folder, grace_s=0.5, readiness_failures=2)
    engine = process_of(folder, "vllm")
    # Stopped, it takes connections but answers none, and SIGTERM does not reach it either.
    os.kill(engine, signal.SIGSTOP)
    eventually(lambda: seen(folder).phase is Phase.NOT_READY)
    eventually(lambda: seen(folder).phase is Phase.READY)
    container = seen(folder).containers["vllm"]
    assert container.restarts == 1
    assert container.pid != engine
    assert "was ended, since it no longer answers" in container.last_end


def up_in_background(folder: StateFolder, *flags: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.operator.toy_run",
        str(folder.path),
        *map(str, free_ports(2)),
        *flags,
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_start_leaves_nothing(folder: StateFolder, number: signal.Signals) -> None:
    up = up_in_background(folder, "--deaf", "--leave-behind")
    eventually(lambda: folder.log("vllm").exists() and '"children"' in folder.log("vllm").read_text())
    up.send_signal(number)
    output, _ = up.communicate(timeout=60)
    assert up.returncode == 130
    assert output.splitlines()[-1] == "stopping everything"
    engine = given(folder, "vllm")
    assert processes_of(folder) == []
    assert not any(is_running(pid) for pid in engine["children"].values())
    assert not Path(engine["shared_memory"]).exists()
    assert not (folder.path / "volumes").exists()


def test_a_killed_start_leaves_nothing(folder: StateFolder) -> None:
    up = up_in_background(folder, "--deaf", "--leave-behind")
    eventually(lambda: folder.log("vllm").exists() and '"children"' in folder.log("vllm").read_text())
    up.kill()
    up.wait()
    assert up.stdout is not None
    up.stdout.close()
    # The supervisor notices that nobody waits for the run any more.
    eventually(lambda: not processes_of(folder))
    assert not (folder.path / "volumes").exists()
    assert seen(folder).reason == "the command that started it has gone"
    assert stop(folder)


def test_runs_are_found_by_name_and_by_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a"):
        path = tmp_path / "build" / "local" / name
        path.mkdir(parents=True)
        (path / "state.json").touch()
    assert [entry.path.name for entry in runs(None, None)] == ["a", "b"]
    assert [entry.path for entry in runs("c", None)] == [tmp_path / "build" / "local" / "c"]
    other = StateFolder(tmp_path / "other")
    assert runs("c", other) == [other]


def read(folder: StateFolder) -> RunState:
    state = folder.read()
    assert state is not None
    return state
