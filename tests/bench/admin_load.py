# SPDX-License-Identifier: Apache-2.0
"""What requests to the admin sidecar cost vLLM: `python -m tests.bench.admin_load --model FOLDER`.

A real vLLM decodes all the time, and its own counter of generated tokens tells its rate: in windows of time
without requests, with requests to its sidecar, and with as many to a sidecar that has no vLLM. Sidecars and
clients have one core and vLLM another, as in a pod where each has its share; but cores share caches and the
host's threads, and the last kind of window shows what that alone costs. So sidecar against sidecar counts.
Where that is noise, the time of processors that a round of questions takes in vLLM's processes says more: the
sidecar asks ten rounds a second at most, however many ask it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from kvcache.admin.service import Settings
from kvcache.bench.machine import machine
from tests.dashboards.appliance import TOKEN, Appliance

ROUTES = ("/metrics", "/v1/stats", "/v1/config", "/v1/stats/tiers/cpu", "/v1/flush", "/readyz")
_DECODING = 4
_OUTPUT_TOKENS = 2_000


@contextmanager
def _decoding(appliance: Appliance) -> Iterator[None]:
    """Requests that generate all the time, with little for a client to do."""
    ending = threading.Event()

    def client(number: int) -> None:
        for turn in itertools.count():
            if ending.is_set():
                return
            try:
                appliance.ask([3 + number, 3 + turn % 500, *range(3, 40)], max_tokens=_OUTPUT_TOKENS)
            except httpx.HTTPError:
                if not ending.is_set():
                    raise

    threads = [threading.Thread(target=client, args=(number,)) for number in range(_DECODING)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        for thread in threads:
            thread.join(120)


def _generated(appliance: Appliance) -> float:
    found = re.search(
        r"^vllm:generation_tokens_total\{.*\} (\S+)$", appliance.vllm.get("/metrics").text, re.M
    )
    assert found, "vLLM exports no vllm:generation_tokens_total"
    return float(found[1])


def _round_ms(appliance: Appliance, seconds: float, rounds: int = 4) -> float:
    """Of the processors, in all of vLLM's processes, for one round of questions; nothing else runs. In turn
    with as long a time in which nobody asks, least of the rounds each."""

    def used() -> float:
        vllm = psutil.Process(appliance.pids[0])
        return sum(sum(each.cpu_times()[:2]) for each in (vllm, *vllm.children(recursive=True)))

    idle, asked = [], []
    for _ in range(rounds):
        before = used()
        time.sleep(seconds)
        idle.append(used() - before)
        before, started, answers = used(), time.monotonic(), 0
        while time.monotonic() < started + seconds:
            appliance.admin.get("/v1/stats").raise_for_status()
            answers += 1
            time.sleep(1.2 * Settings.fresh_s)  # or the last round would answer
        asked.append((used() - before, answers))
    busy, answers = min(asked)
    return 1000 * (busy - min(idle)) / answers


def _window(appliance: Appliance, seconds: float, requests: int, client: httpx.Client) -> float:
    """Tokens a second, while so many requests go to a sidecar, evenly."""
    before, started = _generated(appliance), time.monotonic()
    for number in range(requests):
        time.sleep(max(0.0, started + number * seconds / requests - time.monotonic()))
        answer = client.get(ROUTES[number % len(ROUTES)])
        assert answer.is_success or client is not appliance.admin, answer.text
    time.sleep(max(0.0, started + seconds - time.monotonic()))
    after, ended = _generated(appliance), time.monotonic()
    return (after - before) / (ended - started)


@contextmanager
def _sidecar_without_vllm(folder: Path) -> Iterator[tuple[int, httpx.Client]]:
    folder.mkdir()
    token_file, log = folder / "token", folder / "log"
    token_file.write_text(TOKEN)
    command = [sys.executable, "-m", "kvcache.admin", "--port=0", f"--runtime-dir={folder}"]
    environ = os.environ | {"KVCACHE_ADMIN_TOKEN_FILE": str(token_file)}
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--expected-ranks=1"], stdout=out, stderr=out, env=environ)
    try:
        while (found := re.search(r"listens on (http://\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=found[1], headers=headers, trust_env=False, timeout=60) as client:
            yield process.pid, client
    finally:
        process.kill()
        process.wait()


def _pin(pid: int, core: int) -> None:
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.admin_load", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a small model")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=10, help="of three windows")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a window")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        parser.error("this machine gives one core; the sidecar must have one that vLLM has not")
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    folder, sockets = (Path(tempfile.mkdtemp(prefix="kvc-")) for _ in range(2))
    appliance = None
    try:
        appliance = Appliance(options.model, folder, sockets, {"tiers": {"cpu": {"capacity": "64Mi"}}})
        for pid, core in zip(appliance.pids, cores, strict=True):
            _pin(pid, core)
        _pin(os.getpid(), cores[1])
        appliance.load(5)
        round_ms = _round_ms(appliance, options.seconds)
        rows = []
        each = options.requests // options.rounds
        with _sidecar_without_vllm(folder / "other") as (pid, other), _decoding(appliance):
            _pin(pid, cores[1])
            kinds = {"alone": (0, other), "other": (each, other), "own": (each, appliance.admin)}
            _window(appliance, options.seconds, *kinds["alone"])
            for number in range(options.rounds):
                names = list(kinds)[:: 1 if number % 2 else -1]
                rate = {name: _window(appliance, options.seconds, *kinds[name]) for name in names}
                rows.append({name: rate[name] for name in kinds} | {"ratio": rate["own"] / rate["other"]})
                print("\t".join(f"{value:.3f}" for value in rows[-1].values()), flush=True)  # noqa: T201
        ratios = sorted(row["ratio"] for row in rows)
        result = {
            "requests": options.requests,
            "requests_per_s": each / options.seconds,
            "round_ms": round_ms,
            "rounds_per_s": 1 / Settings.fresh_s,
            "share_of_a_core": round_ms / 1000 / Settings.fresh_s,
            "other_of_alone": statistics.median(row["other"] / row["alone"] for row in rows),
            "ratio": statistics.median(ratios),
            "low": ratios[0],
            "high": ratios[-1],
        }
        print(json.dumps(result))  # noqa: T201
        if options.json is not None:
            report = {"machine": machine(), "what": "admin_load", "admin_load": result, "windows": rows}
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        if appliance is not None:
            appliance.close()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(sockets, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
