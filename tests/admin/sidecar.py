# SPDX-License-Identifier: Apache-2.0
"""The sidecar as a process."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def sidecar(socket_dir: Path, token_file: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "kvcache.admin", "--port=0", f"--runtime-dir={socket_dir}"]
    process = subprocess.Popen(
        [*command, f"--token-file={token_file}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+$", process.stdout.readline().strip())
        assert found
        yield found[0]
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
