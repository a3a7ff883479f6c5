# SPDX-License-Identifier: Apache-2.0
"""The local runner's decisions: paths, variables, probes, whose a process is, what must hold beforehand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcache_operator.errors import ResourceError
from kvcache_operator.local.checks import check_machine
from kvcache_operator.local.errors import LocalError
from kvcache_operator.local.memory import SharedFile, remove_unused, shared_files
from kvcache_operator.local.paths import PathRewriter
from kvcache_operator.local.pod import HttpProbe, expand, local_pod
from kvcache_operator.local.probes import Streak
from kvcache_operator.local.procfs import ProcessId, Trace, boot_id, kill_all, read_process, send, traced
from kvcache_operator.local.state import StateFolder
from kvcache_operator.local.up import up
from kvcache_operator.local.volumes import SOCKET_PATH_BYTES, volumes_root
from kvcache_operator.parse import parse_file
from tests.operator.resources import (
    SAMPLES,
    SMALLEST,
    containers_of,
    pod_of,
    rendered_of,
    resource,
    with_value,
)
from tests.operator.toy_run import free_ports

MOUNTS = {
    "/run/kvcache": "/s/runtime",
    "/tmp": "/tmp/x/volumes/tmp",
    "/run/kvcache/deep": "/s/deep",
    "/models": "/m",
}


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("/run/kvcache", "/s/runtime"),
        ("/run/kvcache/a.sock", "/s/runtime/a.sock"),
        ("/run/kvcache/deep/a", "/s/deep/a"),
        ("/run/kvcache/deeper/a", "/s/runtime/deeper/a"),
        ("/run/kvcache2/a", "/run/kvcache2/a"),
        ("/run/kvcache.old", "/run/kvcache.old"),
        ("/var/run/kvcache/a", "/var/run/kvcache/a"),
        ("../run/kvcache", "../run/kvcache"),
        ("ipc:///run/kvcache/a", "ipc:///s/runtime/a"),
        ("http://run/kvcache", "http://run/kvcache"),
        ("--dir=/models,/run/kvcache", "--dir=/m,/s/runtime"),
        ("/models:/usr/bin:/tmp", "/m:/usr/bin:/tmp/x/volumes/tmp"),
        ('{"a":"/models/b","c":["/run/kvcache"]}', '{"a":"/m/b","c":["/s/runtime"]}'),
        ("runtime_dir: /run/kvcache\n", "runtime_dir: /s/runtime\n"),
        ("/tmp/x/volumes/tmp/a", "/tmp/x/volumes/tmp/a"),
        ("/tmp/x/volumes", "/tmp/x/volumes/tmp/x/volumes"),
        ("no path at all", "no path at all"),
        ("", ""),
    ],
)
def test_paths_are_rewritten_by_whole_components(text: str, rewritten: str) -> None:
    assert PathRewriter(MOUNTS)(text) == rewritten


PATHS = st.lists(st.sampled_from(["a", "ab", "b", "tmp", "a.b"]), min_size=1, max_size=3).map(
    lambda p: "/" + "/".join(p)
)


@given(
    mounts=st.dictionaries(PATHS, PATHS, max_size=4),
    text=st.lists(st.one_of(PATHS, st.sampled_from([":", " ", '"', "=", "x", "/", "://"]))).map("".join),
)
def test_rewriting_twice_is_rewriting_once(mounts: dict[str, str], text: str) -> None:
    # Folders are made by us, below a folder of their own: no mount path lies in one of them.
    folders = {mount: f"/state{folder}" for mount, folder in mounts.items()}
    rewrite = PathRewriter(folders)
    assert rewrite(rewrite(text)) == rewrite(text)


@given(mount=PATHS, rest=PATHS)
def test_a_whole_path_is_rewritten_as_its_components_are(mount: str, rest: str) -> None:
    rewrite = PathRewriter({mount: "/new"})
    assert rewrite(mount + rest) == "/new" + rest
    below = rest.split("/")[1:]
    assume(below[: len(mount.split("/")) - 1] != mount.split("/")[1:])
    assert rewrite(rest) == rest


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$(C)", "$(C)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $", "$A ${A} $"),
        ("$(A", "$(A"),
    ],
)
def test_variables_expand_as_in_the_kubelet(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expanded


def test_a_container_is_translated_as_a_whole() -> None:
    rendered = rendered_of(SMALLEST)
    rewrite = PathRewriter(
        {"/run/kvcache": "/s/runtime", "/home/kvcache": "/s/home", "/etc/kvcache": "/s/config"}
    )
    pod = local_pod(rendered.workload, {}, rewrite, {"PATH": "/bin", "SECRET": "x", "LANG": "C.UTF-8"})
    engine, admin = pod.containers
    assert engine.argv[:3] == (sys.executable, "-m", "kvcache.integration.vllm.serve")
    flags = dict(zip(engine.argv, engine.argv[1:], strict=False))
    assert flags["--host"] == "127.0.0.1"
    assert '"config_file":"/s/config/config.yaml"' in flags["--kv-transfer-config"]
    assert engine.folder == engine.env["HOME"] == "/s/home"
    assert engine.env["LANG"] == "C.UTF-8"
    assert "SECRET" not in engine.env
    assert "/s/runtime" in admin.argv
    assert engine.startup is not None
    assert engine.startup.url == "http://127.0.0.1:8000/health"
    assert engine.startup.budget_s == 1800
    assert pod.grace_s == pod_of(rendered)["terminationGracePeriodSeconds"]
    assert {c.name for c in pod.containers} == containers_of(rendered).keys()


def test_what_a_local_run_has_not_is_told() -> None:
    env = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}]
    rendered = rendered_of(with_value(SMALLEST, "spec.engine.env", env))
    with pytest.raises(LocalError, match="the pod names the Secret hub, which no local run has"):
        local_pod(rendered.workload, {}, PathRewriter({}), {})


@given(
    answers=st.lists(st.booleans(), min_size=1, max_size=30),
    failures=st.integers(1, 4),
    successes=st.integers(1, 3),
)
def test_a_verdict_changes_after_its_threshold(answers: list[bool], failures: int, successes: int) -> None:
    probe = HttpProbe(
        url="x", period_s=1, timeout_s=1, failure_threshold=failures, success_threshold=successes
    )
    streak, expected = Streak(probe), None
    for index, answer in enumerate(answers):
        threshold = successes if answer else failures
        last = answers[max(0, index + 1 - threshold) : index + 1]
        if len(last) == threshold and set(last) == {answer}:
            expected = answer
        assert streak.add(answer) is expected


def sleeper(**options: object) -> subprocess.Popen[bytes]:
    code = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    process: subprocess.Popen[bytes] = subprocess.Popen(code, stdout=subprocess.PIPE, **options)  # type: ignore[call-overload]
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_number_that_was_used_again_is_not_the_process() -> None:
    with sleeper(start_new_session=True) as child:
        found = read_process(child.pid)
        assert found is not None
        assert found.session == child.pid
        assert found.parent == os.getpid()
        assert found.id.is_alive
        earlier = found.id.model_copy(update={"start_ticks": found.id.start_ticks - 1})
        other_boot = found.id.model_copy(update={"boot_id": "another"})
        for stranger in (earlier, other_boot):
            assert not stranger.is_alive
            send(stranger, signal.SIGKILL)
            # A session whose leader is someone else by now is someone else's.
            assert traced([Trace(marker="NONE=1", leader=stranger)]) == []
        assert child.poll() is None
        assert traced([Trace(marker="NONE=1", leader=found.id)]) == [found.id]
        assert kill_all(lambda: traced([Trace(marker="NONE=1", leader=found.id)])) == []
        assert child.wait() == -signal.SIGKILL
        # Dead, but still a zombie or already gone: neither is alive.
        assert not found.id.is_alive


def test_a_marker_is_a_whole_variable() -> None:
    with sleeper(env={"KVCACHE_TEST": "run-1/vllm"}) as child:
        try:
            assert traced([Trace(marker="KVCACHE_TEST=run-1/v", leader=None)]) == []
            assert traced([Trace(marker="KVCACHE_TEST=run-1/vllm", leader=None)])[0].pid == child.pid
        finally:
            child.kill()


def test_descendants_belong_to_it() -> None:
    sleep = "import time; print(flush=True); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={"KVCACHE_TEST": "a"},
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        leader = read_process(child.pid)
        assert leader is not None
        found = traced([Trace(marker="NONE=1", leader=leader.id)])
        assert len(found) == 2
        assert set(found) <= set(traced([], ancestor=os.getpid()))
        kill_all(lambda: traced([Trace(marker="NONE=1", leader=leader.id)]))
        assert not any(process.is_alive for process in found)


def test_a_leader_that_has_gone_without_a_session_is_nobody() -> None:
    gone = ProcessId(pid=2**22 - 1, start_ticks=1, boot_id=boot_id())
    assert traced([Trace(marker="NONE=1", leader=gone)]) == []


def test_shared_memory_is_removed_only_when_nobody_uses_it() -> None:
    path = Path("/dev/shm") / f"kvcache-test-{os.getpid()}"
    with path.open("wb") as file:
        file.write(b"x")
        (used,) = (entry for entry in shared_files([os.getpid()]) if entry.path == str(path))
        assert remove_unused([used]) == []
    # The name alone does not do: another file may have it by now.
    assert remove_unused([SharedFile(path=str(path), inode=used.inode + 1)]) == []
    assert path.exists()
    assert remove_unused([used]) == [str(path)]
    assert not path.exists()


@given(length=st.integers(1, 150))
def test_a_socket_fits_into_every_volume(length: int) -> None:
    spec = pod_of(rendered_of(SMALLEST))
    root = volumes_root(Path("/" + "x" * length), spec)
    try:
        socket_path = root / "runtime" / "12345678-1234-1234-1234-123456789012"
        assert len(os.fsencode(socket_path)) <= SOCKET_PATH_BYTES
    finally:
        if root.exists():
            root.rmdir()


SAMPLE = next(path for path in SAMPLES if path.stem == "smollm2")


@pytest.mark.parametrize(
    ("claims", "sentence"),
    [
        (
            {},
            "spec.model.volume.claimName: models has no folder here; give it one with --claim models=FOLDER",
        ),
        ({"other": "."}, "spec.model.volume.claimName: models has no folder here"),
        (
            {"modles": "."},
            "models has no folder here; give it one with --claim models=FOLDER (--claim modles=... was read)",
        ),
        ({"models": ".", "other": "."}, "--claim: other is no claim of this resource; remove it"),
        ({"models": "nowhere"}, "--claim: models={root}/nowhere: that is no folder; name one that exists"),
        (
            {"models": "."},
            "spec.model.name: /models/smollm2-135m-instruct is {root}/smollm2-135m-instruct here, and there",
        ),
        ({"models": "empty"}, "and there is no config.json in it; name the folder of a model"),
    ],
)
def test_claims_and_models_are_checked_beforehand(
    tmp_path: Path, claims: dict[str, str], sentence: str
) -> None:
    (tmp_path / "empty" / "smollm2-135m-instruct").mkdir(parents=True)
    folders = {claim: (tmp_path / folder).absolute() for claim, folder in claims.items()}
    state = StateFolder(tmp_path / "state")
    with pytest.raises(ResourceError) as caught:
        up(parse_file(SAMPLE), folders, state, print)
    assert sentence.format(root=tmp_path) in str(caught.value)
    # Nothing is left of the attempt.
    assert not state.path.exists()


def test_a_model_folder_needs_no_claim(tmp_path: Path) -> None:
    rewrite = PathRewriter({})
    spec = resource(model={"name": str(tmp_path)}).spec
    with pytest.raises(
        ResourceError, match=re.escape(f"spec.model.name: {tmp_path}, and there is no config.json")
    ):
        check_machine(spec, {}, rewrite)
    (tmp_path / "config.json").write_text("{}")
    engine, admin = free_ports(2)
    small = {"tiers": {"cpu": {"capacity": "256Mi"}}}
    spec = resource(model={"name": str(tmp_path)}, engine__port=engine, admin__port=admin, cache=small).spec
    check_machine(spec, {}, rewrite)


def test_a_cache_that_this_machine_cannot_hold_is_refused() -> None:
    spec = resource(cache={"tiers": {"cpu": {"capacity": "900Ti"}}}).spec
    with pytest.raises(
        ResourceError, match=r"spec\.cache\.tiers\.cpu\.capacity: \d+ MiB are more than the \d+"
    ):
        check_machine(spec, {}, PathRewriter({}))


def test_what_cannot_run_here_is_named(tmp_path: Path) -> None:
    env = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}]
    with pytest.raises(ResourceError) as caught:
        check_machine(resource(replicas=0, engine__env=env).spec, {}, PathRewriter({}))
    paths = [problem.path for problem in caught.value.problems]
    assert paths[:2] == ["spec.replicas", "spec.engine.env[0].valueFrom"]


def test_a_state_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.file.write_text("{}")
    with pytest.raises(LocalError, match=r"state\.json cannot be read \(ValidationError\)"):
        folder.read()
