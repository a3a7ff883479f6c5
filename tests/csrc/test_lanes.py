# SPDX-License-Identifier: Apache-2.0
"""CUDA sources that run on the CPU, a thread a lane, where no GPU is at hand to show that they agree with
their host twins."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
COMPILER = os.environ.get("CXX", "g++")
"""As that of the module, without which there were nothing to test."""


def test_coded_rows(tmp_path: Path) -> None:
    program = tmp_path / "coded_lanes"
    hosts = [
        CSRC / "host" / f"{name}.cpp"
        for name in ("row_codec", "transfer", "stream_copy", "in_place", "boxes")
    ]
    built = subprocess.run(
        [
            *(COMPILER, "-std=c++20", "-O1", "-w", "-pthread", "-o", str(program)),
            *(f"-I{folder}" for folder in (CSRC / "include", CSRC / "host", HERE)),
            *map(str, (HERE / "coded_lanes.cpp", HERE / "no_device.cpp", *hosts)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    refused = 0
    for _ in range(3):
        seed = random.randrange(1 << 30)
        ran = subprocess.run([str(program), str(seed)], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"seed {seed}: {ran.stdout}"
        refused += int(ran.stdout.split()[0])
    assert 0 < refused < 3 * 24, f"{refused} of 72 batches had a refused chunk"
