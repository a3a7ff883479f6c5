# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.storage.crash [--kills 200] [--seed 0] [--directory DIR]`: kills processes at random."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from tests.storage.crash import disk


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.storage.crash")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="where to work; default: a temporary folder")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        report = disk.run(options.kills, options.seed, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(
        f"{report.kills} kills left {report.parts} half-written objects and {report.sections} open sections; "
        f"{report.visible} objects verified after them, {len(report.failures)} failures"
    )
    for text in report.failures:
        print(text)
    return 1 if report.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
