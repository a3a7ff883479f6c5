# SPDX-License-Identifier: Apache-2.0
"""What requests to the admin sidecar cost vLLM: `python -m tests.bench.admin_load --model FOLDER`.

A real vLLM decodes all the time. Windows of time with requests to the sidecar stand between windows without,
and vLLM's own counter of generated tokens tells the rate of each. As in a pod with a share of its own, the
sidecar and the clients have one core, and vLLM another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from kvcache.bench.machine import machine
from tests.dashboards.appliance import Appliance

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


def _window(appliance: Appliance, seconds: float, requests: int) -> float:
    """Tokens a second, while so many requests go to the sidecar, evenly."""
    before, started = _generated(appliance), time.monotonic()
    for number in range(requests):
        time.sleep(max(0.0, started + number * seconds / requests - time.monotonic()))
        appliance.admin.get(ROUTES[number % len(ROUTES)]).raise_for_status()
    time.sleep(max(0.0, started + seconds - time.monotonic()))
    after, ended = _generated(appliance), time.monotonic()
    return (after - before) / (ended - started)


def _pin(pid: int, core: int) -> None:
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.admin_load", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a small model")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=10, help="of windows")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a window")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        parser.error("this machine gives one core; the sidecar must have one that vLLM has not")
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    folder, sockets = (Path(tempfile.mkdtemp(prefix="kvc-")) for _ in range(2))
    appliance = None
    try:
        appliance = Appliance(options.model, folder, sockets, {"tiers": {"cpu": {"capacity": "64Mi"}}})
        for pid, core in zip(appliance.pids, cores, strict=True):
            _pin(pid, core)
        _pin(os.getpid(), cores[1])
        rows = []
        with _decoding(appliance):
            _window(appliance, options.seconds, 0)
            for number in range(options.pairs):
                each = options.requests // options.pairs
                order = (0, each) if number % 2 else (each, 0)
                rate = {count: _window(appliance, options.seconds, count) for count in order}
                rows.append({"alone": rate[0], "beside": rate[each], "ratio": rate[each] / rate[0]})
                print("\t".join(f"{value:.3f}" for value in rows[-1].values()), flush=True)  # noqa: T201
        ratios = sorted(row["ratio"] for row in rows)
        result = {
            "requests": options.requests,
            "requests_per_s": options.requests / options.pairs / options.seconds,
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
