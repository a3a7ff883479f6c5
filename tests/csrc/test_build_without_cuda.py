# SPDX-License-Identifier: Apache-2.0
"""`csrc/host/no_cuda.cpp` stands in for all of csrc/cuda: the module is built as the CPU engine's image does,
and loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvcache import _native

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    not _native.build_info()["cuda"], reason="the module under test was built without CUDA itself"
)
def test_a_build_without_cuda_loads(tmp_path: Path) -> None:
    options = [
        "-G",
        "Ninja",
        "-DKVCACHE_CUDA=OFF",
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DCMAKE_BUILD_TYPE=None",  # a name that is missing does not need an optimiser to show
        "-DCMAKE_CXX_FLAGS=-O0",
    ]
    tools = Path(sys.executable).parent
    for command in (
        [str(tools / "cmake"), "-S", str(ROOT), "-B", str(tmp_path), *options],
        [str(tools / "cmake"), "--build", str(tmp_path)],
    ):
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, env={"PATH": f"{tools}:/usr/bin:/bin"}
        )
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    # RTLD_NOW: all names must be there at once.
    program = "import sys; sys.setdlopenflags(2); import _native; print(_native.build_info()['cuda'])"
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert loaded.stdout.strip() == "False", loaded.stderr
