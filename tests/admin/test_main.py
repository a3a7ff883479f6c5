# SPDX-License-Identifier: Apache-2.0
"""The sidecar as a process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcache.admin.__main__ import main
from tests.admin.conftest import AUTH, TOKEN, Serve
from tests.control.processes import Process, rank_stats, scheduler_stats

ROOT = Path(__file__).parents[2]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "kvcache.admin", *map(str, arguments)]


@contextlib.contextmanager
def started(*arguments: object, **environ: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL."""
    process = subprocess.Popen(
        command("--port", 0, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environ},
    )
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+$", process.stdout.readline().strip())
        assert found, "it did not say where it listens"
        yield process, found[0]
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        process.stdout.close()


@pytest.fixture
def ready(serve: Serve) -> None:
    serve("scheduler", Process(scheduler_stats(requests=4)))
    serve("rank0", Process(rank_stats(0)))


def eventually(url: str, status: int) -> dict[str, Any]:
    """What /readyz answers once it answers so: it speaks of the last round of questions."""
    for _ in range(600):
        answer = httpx.get(f"{url}/readyz")
        if answer.status_code == status:
            body: dict[str, Any] = answer.json()
            return body
        time.sleep(0.05)
    raise AssertionError(answer.text)


def failed(*arguments: object) -> tuple[int, str]:
    result = subprocess.run(command(*arguments), capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert "Traceback" not in result.stderr
    return result.returncode, result.stderr.strip().splitlines()[-1]


@pytest.mark.usefixtures("ready")
def test_it_serves_and_stops_cleanly(socket_dir: Path, token_file: Path) -> None:
    options = ("--runtime-dir", socket_dir, "--token-file", token_file, "--expected-ranks", 1)
    with started(*options) as (process, url):
        assert eventually(url, 200) == {"status": "ready"}
        assert httpx.get(f"{url}/v1/stats").status_code == 401
        answer = httpx.get(f"{url}/v1/stats", headers=AUTH)
        assert answer.json()["totals"]["requests"] == 4
        assert "server" not in answer.headers
        assert "kvcache_requests_total 4.0" in httpx.get(f"{url}/metrics").text
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


@pytest.mark.usefixtures("ready")
def test_options_from_the_environment(socket_dir: Path, token_file: Path) -> None:
    environ = {
        "KVCACHE_ADMIN_RUNTIME_DIR": str(socket_dir),
        "KVCACHE_ADMIN_TOKEN_FILE": str(token_file),
        "KVCACHE_ADMIN_HOST": "127.0.0.1",
        "KVCACHE_ADMIN_EXPECTED_RANKS": "2",
    }
    with started(**environ) as (_, url):
        httpx.get(f"{url}/v1/stats", headers={"Authorization": f"Bearer {TOKEN}"})
        assert set(httpx.get(f"{url}/readyz").json()["not_ready"]) == {"rank1"}
        assert httpx.get(f"{url}/v1/stats", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_a_killed_sidecar_does_not_disturb_the_processes_and_a_new_one_goes_on(
    socket_dir: Path, token_file: Path, serve: Serve
) -> None:
    servers = [
        serve("scheduler", Process(scheduler_stats())),
        serve("rank0", Process(rank_stats(0))),
    ]
    options = ("--runtime-dir", socket_dir, "--token-file", token_file)
    for _ in range(2):
        with started(*options) as (process, url):
            eventually(url, 200)
            process.kill()
            process.wait(30)
    assert all(server.counters.failures == server.counters.malformed == 0 for server in servers)


def test_a_busy_port() -> None:
    with started() as (_, url):
        port = url.rsplit(":", 1)[1]
        code, text = failed("--port", port)
    assert code == 1
    assert f"port {port} (Address already in use)" in text
    assert "--port" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "http"], "--port"),
        (["--port", "65536"], "--port"),
        (["--expected-ranks", "0"], "--expected-ranks"),
        (["--runtime-dir", "/" + "x" * 100], "--runtime-dir"),
        (["--prot", "1"], "--prot"),
        (["--vllm-url", "127.0.0.1:8000"], "--vllm-url"),
        (["--vllm-url", "http://"], "--vllm-url"),
        (["--vllm-url", "ftp://vllm:21"], "--vllm-url"),
        (["--vllm-url", "http://vllm:eighty"], "--vllm-url"),
        (["--vllm-url", "http://user@vllm:8000"], "--vllm-url"),
        (["--vllm-url", "http://[::1"], "--vllm-url"),
    ],
)
def test_options_that_cannot_be_used(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments, environ={})
    assert error.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_an_address_that_is_not_there() -> None:
    code, text = failed("--host", "256.1.1.1", "--port", "0")
    assert code == 1
    assert "256.1.1.1" in text


def test_it_needs_neither_torch_nor_vllm() -> None:
    code = "import sys, kvcache.admin.__main__; print({'torch', 'vllm'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert (result.stdout, result.stderr) == ("set()\n", "")
