# SPDX-License-Identifier: Apache-2.0
"""What requests to the admin sidecar cost vLLM: `python -m tests.bench.admin_load --model FOLDER`.

First the time of processors that they take in vLLM's processes, which the kernel counts to the nanosecond:
vLLM rests, and windows of time with and without requests come in turn. Where vLLM is bound by its processors,
that share of them is what it loses.

Then its rate: how long the same four requests, which decode all the time, take a real vLLM without requests
to a sidecar, with requests to its own, and with as many to the sidecar of doubles, which report the same and
cost this vLLM nothing. Sidecars and clients have one core and vLLM another, as in a pod where each has its
share; but cores share caches and the host's threads, and the last kind shows what that alone costs. So
sidecar against sidecar counts, in pairs whose order changes, since machines drift; and not tokens a second
alone, but also tokens for a second of the processors that vLLM was given.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

from kvcache.admin.service import Settings
from kvcache.bench.machine import machine
from kvcache.control.client import ControlClient
from kvcache.control.server import ControlServer
from kvcache.control.snapshot import Snapshot
from kvcache.control.wire import rank_name
from tests.control.processes import Process
from tests.dashboards.appliance import TOKEN, Appliance

ROUTES = ("/metrics", "/v1/stats", "/v1/config", "/v1/stats/tiers/cpu", "/v1/flush", "/readyz")
_DECODING = 4
_OUTPUT_TOKENS = 500
_VOCABULARY = 500


def _used_s(appliance: Appliance) -> float:
    """Of the processors, by all threads of vLLM's processes so far."""
    vllm = psutil.Process(appliance.pids[0])
    threads = [
        f"/proc/{process.pid}/task/{thread.id}/schedstat"
        for process in (vllm, *vllm.children(recursive=True))
        for thread in process.threads()
    ]
    return sum(int(Path(thread).read_text().split()[0]) for thread in threads) / 1e9


def _shares(appliance: Appliance, rounds: int, seconds: float, requests: int) -> list[float]:
    """Of a core, that so many requests take in vLLM's processes while nothing else does."""

    def used(asked: int) -> float:
        before, started = _used_s(appliance), time.monotonic()
        for number in range(asked):
            _wait_until(started + number * seconds / asked)
            _ask(appliance.admin, number)
        _wait_until(started + seconds)
        return (_used_s(appliance) - before) / (time.monotonic() - started)

    used(requests)
    found = []
    for number in range(rounds):
        asked = [0, requests] if number % 2 else [requests, 0]
        took = {each: used(each) for each in asked}
        found.append(took[requests] - took[0])
    return found


def _wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _ask(client: httpx.Client, number: int) -> None:
    client.get(ROUTES[number % len(ROUTES)]).raise_for_status()


@dataclass(frozen=True)
class Window:
    """What vLLM did in some time."""

    tokens: float
    seconds: float
    used_s: float
    """Of the processors."""
    requests: int
    """To the sidecar."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def rate_of_processors(self) -> float:
        """Tokens for a second of the processors: what others took of the machine is not in it."""
        return self.tokens / self.used_s


def _window(appliance: Appliance, requests_per_s: float, client: httpx.Client, first_token: int) -> Window:
    """The work of vLLM that is to be timed, while so many requests go to a sidecar.

    Args:
        first_token: another one each time, so that nothing is found that was stored before.
    """
    prompts = [[3 + number, first_token, *range(3, 40)] for number in range(_DECODING)]
    asked = 0
    used, started = _used_s(appliance), time.monotonic()
    with ThreadPoolExecutor(_DECODING) as pool:
        working = [pool.submit(appliance.ask, prompt, _OUTPUT_TOKENS) for prompt in prompts]
        while wait(working, timeout=1 / requests_per_s if requests_per_s else None).not_done:
            while asked < requests_per_s * (time.monotonic() - started):
                _ask(client, asked)
                asked += 1
        for request in working:
            request.result()
    ended = time.monotonic()
    return Window(_DECODING * _OUTPUT_TOKENS, ended - started, _used_s(appliance) - used, asked)


def _summary(ratios: Sequence[float]) -> dict[str, float]:
    """The median, 95 % of the medians of resamples, and all."""
    source = random.Random(1)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(2_000))
    return {
        "median": statistics.median(ratios),
        "from_95": medians[50],
        "to_95": medians[-51],
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def _reported(runtime_dir: Path) -> Snapshot:
    async def ask() -> Snapshot:
        client = ControlClient(runtime_dir, expected_ranks=1)
        try:
            return await client.snapshot()
        finally:
            client.close()

    return asyncio.run(ask())


@contextmanager
def _sidecar_of_doubles(
    folder: Path, sockets: Path, config_file: Path, reported: Snapshot
) -> Iterator[tuple[int, httpx.Client]]:
    """Its process id, and a client of it."""
    folder.mkdir()
    token_file, log = folder / "token", folder / "log"
    token_file.write_text(TOKEN)
    command = [sys.executable, "-m", "kvcache.admin", "--port=0", f"--runtime-dir={sockets}"]
    environ = os.environ | {
        "KVCACHE_ADMIN_TOKEN_FILE": str(token_file),
        "LMCACHE_CONFIG_FILE": str(config_file),
    }
    assert reported.scheduler is not None, dict(reported.missing)
    doubles = [ControlServer(sockets, "scheduler", Process(reported.scheduler))]
    doubles += [ControlServer(sockets, rank_name(rank), Process(it)) for rank, it in reported.ranks.items()]
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
        for double in doubles:
            double.close()


def _pin(pid: int, core: int) -> None:
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.admin_load", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a small model")
    parser.add_argument("--requests", type=int, default=10_000, help="at least, while vLLM decodes")
    parser.add_argument("--rate", type=float, default=125.0, help="of them, a second")
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
    folder, sockets, others = (Path(tempfile.mkdtemp(prefix="kvc-")) for _ in range(3))
    appliance = None
    try:
        appliance = Appliance(options.model, folder, sockets, {"tiers": {"cpu": {"capacity": "64Mi"}}})
        for pid, core in zip(appliance.pids, cores, strict=True):
            _pin(pid, core)
        _pin(os.getpid(), cores[1])
        appliance.load(5)
        shares = _shares(appliance, 20, 4.0, round(4 * options.rate))
        print("\t".join(f"{100 * share:.3f} %" for share in sorted(shares)), flush=True)  # noqa: T201
        rows: list[dict[str, Window]] = []
        control = folder / "other", others, appliance.config_file, _reported(sockets)
        with _sidecar_of_doubles(*control) as (pid, other):
            _pin(pid, cores[1])
            kinds = {
                "alone": (0.0, other),
                "other": (options.rate, other),
                "own": (options.rate, appliance.admin),
            }
            first_tokens = itertools.cycle(range(3, _VOCABULARY))
            _window(appliance, *kinds["own"], next(first_tokens))
            while sum(row["own"].requests for row in rows) < options.requests:
                names = list(kinds)[:: 1 if len(rows) % 2 else -1]
                found = {name: _window(appliance, *kinds[name], next(first_tokens)) for name in names}
                rows.append(found)
                print("\t".join(f"{found[name].rate:.1f}" for name in kinds), flush=True)  # noqa: T201
        result = {
            "requests": sum(row["own"].requests for row in rows),
            "requests_per_s": options.rate,
            "rounds_per_s": Settings.rounds_per_s,
            "share_of_a_core": _summary(shares),
            "rate": _summary([row["own"].rate / row["other"].rate for row in rows]),
            "rate_of_processors": _summary(
                [row["own"].rate_of_processors / row["other"].rate_of_processors for row in rows]
            ),
            "other_of_alone": _summary([row["other"].rate / row["alone"].rate for row in rows]),
        }
        print(json.dumps(result))  # noqa: T201
        if options.json is not None:
            windows = [{name: asdict(window) for name, window in row.items()} for row in rows]
            report = {"machine": machine(), "what": "admin_load", "admin_load": result, "windows": windows}
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        if appliance is not None:
            appliance.close()
        for made in (folder, sockets, others):
            shutil.rmtree(made, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
