# SPDX-License-Identifier: Apache-2.0
"""A base image without a registry: a small Debian, by mmdebstrap, of the machine's own package sources."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
_SOURCES = (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list"))


def missing(suite: str) -> str:
    """Why no base can be made here, in a sentence; empty if one can."""
    if shutil.which("mmdebstrap") is None:
        return "mmdebstrap is not installed"
    if os.geteuid() != 0:
        return "mmdebstrap needs root here"
    if sources(suite) is None:
        names = " nor ".join(str(file) for file in _SOURCES)
        return f"neither {names} names Debian {suite}"
    return ""


def sources(suite: str) -> Path | None:
    """The machine's own list of package sources for this release of Debian."""
    return next((file for file in _SOURCES if file.is_file() and suite in file.read_text()), None)


def command(suite: str, packages: Sequence[str], archive: Path) -> list[str]:
    """Command line that writes a file system with these packages as a tar, without documentation.

    Called only where `missing` names no reason.
    """
    options = [
        "--variant=minbase",
        f"--include={','.join(packages)}",
        "--aptopt=Apt::Install-Recommends false",
    ]
    options += [f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT]
    # Package lists are as large as half the base and are stale tomorrow.
    options += ['--customize-hook=rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*']
    return ["mmdebstrap", "--quiet", *options, suite, str(archive), str(sources(suite))]
