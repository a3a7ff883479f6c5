# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed while they write and evict. 200 of them: `make crash`."""

from __future__ import annotations

import os
from pathlib import Path

from tests.storage.crash.disk import run


def test_killed_processes_leave_nothing_wrong(tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    report = run(12, seed, tmp_path)
    assert not report.failures, (seed, report.failures)
    assert report.kills == 12
