# SPDX-License-Identifier: Apache-2.0
"""The programs that build images, each with the same command line here: buildah, podman, docker."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("docker", "buildah", "podman")
"""Docker first, where its daemon answers: what runs on its images, such as kind, looks for them there."""


class ToolError(Exception):
    """No image can be built here. The text says what to do."""


@dataclass(frozen=True)
class Tool:
    """One of `TOOLS`, found on this machine."""

    name: str

    @classmethod
    def found(cls, wanted: str | None = None) -> Tool:
        """The wanted one, or the first one that works here.

        Raises:
            ToolError: it is not here; docker counts only where its daemon answers.
        """
        for name in [wanted] if wanted else TOOLS:
            if name not in TOOLS:
                raise ToolError(f"{name} was read; TOOL is one of {', '.join(TOOLS)}")
            if shutil.which(name) and (name != "docker" or _docker_answers()):
                return cls(name)
        missing = wanted or " nor ".join(TOOLS)
        raise ToolError(
            f"there is no {missing} that works here; install one (Debian: apt-get install buildah)"
        )

    def build(self, containerfile: Path, tag: str, context: Path, arguments: Mapping[str, str]) -> list[str]:
        """Command line that builds `tag`."""
        command = [self.name, "build", f"--file={containerfile}", f"--tag={tag}"]
        if self.name == "buildah":
            # Stages are kept, so that a change of the sources compiles them and installs nothing anew.
            command += ["--layers", *self._isolation()]
        elif self.name == "podman":
            command += ["--layers"]
        command += [f"--build-arg={name}={value}" for name, value in arguments.items()]
        return [*command, str(context)]

    def import_base(self, archive: Path, tag: str, folder: Path) -> list[list[str]]:
        """Command lines that make an image called `tag` of a file system's tar.

        Args:
            folder: Where a Containerfile may be written.
        """
        if self.name == "docker":
            return [["docker", "import", str(archive), tag]]
        containerfile = folder / "Containerfile.base"
        containerfile.write_text(f'FROM scratch\nADD {archive.name} /\nCMD ["/bin/sh"]\n')
        command = [self.name, "build", f"--file={containerfile}", f"--tag={tag}"]
        return [[*command, *(self._isolation() if self.name == "buildah" else ()), str(archive.parent)]]

    def save(self, tag: str, archive: Path) -> list[str]:
        """Command line that writes an image as an archive of docker's form; `archive` must not exist."""
        if self.name == "buildah":
            return ["buildah", "push", "--quiet", tag, f"docker-archive:{archive}:{tag}"]
        return [self.name, "save", f"--output={archive}", tag]

    def remove(self, tag: str) -> list[str]:
        """Command line that forgets an image."""
        return [self.name, "rmi", tag]

    def environment(self) -> dict[str, str]:
        """Environment of all these commands."""
        return {**os.environ, "DOCKER_BUILDKIT": "1"}

    def _isolation(self) -> list[str]:
        # As root a chroot is enough for what the Containerfiles run, and wants nothing of the machine's
        # control groups, which crun refuses where v1 and v2 are mixed.
        return ["--isolation=chroot"] if os.geteuid() == 0 else []


def _docker_answers() -> bool:
    try:
        done = subprocess.run(["docker", "info"], capture_output=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
