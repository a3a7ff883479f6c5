# SPDX-License-Identifier: Apache-2.0
"""Where the programs of Kubernetes come from: unpacked from a cache, or built (see `build`)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cluster"
KUBE_ARCHIVE = "kube-1.20.2-*.tar.zst"
EXTENSIONS_ARCHIVE = "apiextensions-apiserver-*.zst"
_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")


@dataclass(frozen=True)
class Binaries:
    """Paths of the programs."""

    kube_apiserver: Path
    controller_manager: Path
    extensions: Path | None
    """The API server for custom resources of a newer Kubernetes; None where it could not be had."""

    def program(self, name: str) -> Path:
        """One of 1.20's programs by its name: what a node needs besides."""
        return self.kube_apiserver.parent / name


def cache_folder() -> Path | None:
    """The folder with archives: CLUSTER_CACHE, the one beside a checkout, or the one that `build` fills."""
    named = os.environ.get("CLUSTER_CACHE")
    candidates = [Path(named)] if named else [ROOT.parent / "shared" / "cluster", BUILD / "archives"]
    return next((folder for folder in candidates if any(folder.glob(KUBE_ARCHIVE))), None)


def missing() -> str:
    """Why no API server can be started here; empty if one can."""
    absent = [program for program in ("etcd", "openssl", "tar", "zstd") if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not on PATH; install etcd-server, openssl, tar and zstd"
    if cache_folder() is None:
        return "no binaries of Kubernetes; set CLUSTER_CACHE to their folder or run tests/cluster/build"
    return ""


def binaries() -> Binaries:
    """Unpacks what is needed, once for each version of an archive.

    Raises:
        RuntimeError: there is no archive.
    """
    folder = cache_folder()
    if folder is None:
        raise RuntimeError(missing())
    kube = _unpacked(next(iter(sorted(folder.glob(KUBE_ARCHIVE)))), _PROGRAMS)
    extensions = sorted(folder.glob(EXTENSIONS_ARCHIVE))
    return Binaries(
        kube_apiserver=kube / "kube-apiserver",
        controller_manager=kube / "kube-controller-manager",
        extensions=_unpacked(extensions[-1], ()) / "apiextensions-apiserver" if extensions else None,
    )


def _unpacked(archive: Path, programs: tuple[str, ...]) -> Path:
    """The folder with an archive's programs; several processes may ask at the same time."""
    stat = archive.stat()
    target = BUILD / "bin" / f"{archive.name}-{stat.st_size}-{stat.st_mtime_ns}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / "bin"
        fresh.mkdir()
        if programs:
            subprocess.run(["tar", "--zstd", "-C", fresh, "-xf", archive, *programs], check=True)
        else:
            program = fresh / "apiextensions-apiserver"
            subprocess.run(["zstd", "-q", "-d", archive, "-o", program], check=True)
            program.chmod(0o755)
        try:
            fresh.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target
