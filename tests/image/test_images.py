# SPDX-License-Identifier: Apache-2.0
"""The command lines that build images, and what the Containerfiles must say."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from pathlib import Path

import pytest

from image import base, images
from image.images import IMAGES, digest, read_versions
from image.tools import Tool, ToolError
from kvcache_operator.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = read_versions((ROOT / "image" / "versions.env").read_text())


@pytest.mark.parametrize("name", IMAGES)
def test_images_run_as_a_user_who_is_not_root_and_say_what_they_are(name: str) -> None:
    text = (ROOT / "image" / f"Containerfile.{name}").read_text()
    last = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER 1000:1000$", last, re.M)
    assert not re.search(r"^USER (root|0)", last[last.index("USER 1000") :], re.M)
    for label in ("title", "version", "revision", "licenses"):
        assert f"org.opencontainers.image.{label}=" in last
    assert re.search(r"^ENTRYPOINT \[", last, re.M)
    assert len(re.findall(r"^FROM ", text, re.M)) > 1, "built in stages: no compiler in what runs"


@pytest.mark.parametrize("name", IMAGES)
def test_containerfiles_get_each_argument_that_they_ask_for(name: str) -> None:
    text = (ROOT / "image" / f"Containerfile.{name}").read_text()
    wanted = set(re.findall(r"^ARG ([A-Z_]+)$", text, re.M))
    options = images.Options((name,), base="a-base:1", tag=None, archive=False)
    given = images.Builder(Tool("docker"), options)._arguments(name)
    assert wanted == set(given) | ({"BUILD_BASE"} & wanted)
    assert all(given.values())


def test_the_operator_names_the_images_that_are_built() -> None:
    settings = Settings()
    assert settings.image_cpu == IMAGES["engine-cpu"]
    assert settings.image_cuda == IMAGES["engine-cuda"]


def test_no_image_name_holds_a_registry() -> None:
    for name in (*IMAGES.values(), VERSIONS["DEBIAN_IMAGE"], VERSIONS["VLLM_CUDA_IMAGE"]):
        assert "." not in name.partition("/")[0].partition(":")[0]


@pytest.mark.parametrize("name", ["buildah", "podman", "docker"])
def test_a_build_names_file_tag_arguments_and_context(name: str) -> None:
    value = secrets.token_hex(4)
    command = Tool(name).build(Path("Containerfile.x"), "x:1", Path("context"), {"BASE": value})
    assert command[:2] == [name, "build"]
    assert {"--file=Containerfile.x", "--tag=x:1", f"--build-arg=BASE={value}"} <= set(command)
    assert command[-1] == "context"


def test_an_unknown_tool_is_refused() -> None:
    with pytest.raises(ToolError, match="kaniko was read"):
        Tool.found("kaniko")


def test_a_digest_changes_with_names_contents_and_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "ROOT", tmp_path)
    folder = tmp_path / "sources"
    folder.mkdir()
    seen = set()
    for name, content in (("a", "1"), ("a", "2"), ("b", "2")):
        file = folder / name
        file.write_text(content)
        seen.add(digest([folder], ["text"]))
        file.unlink()
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "b").write_text("x")
    (folder / "b").write_text("2")
    assert digest([folder], ["text"]) in seen
    assert digest([folder], ["other"]) not in seen
    assert len(seen) == 3


def test_the_base_is_a_minimal_debian_without_documentation() -> None:
    if base.sources(VERSIONS["DEBIAN_SUITE"]) is None:
        pytest.skip(f"no package sources of Debian {VERSIONS['DEBIAN_SUITE']} here")
    command = base.command(VERSIONS["DEBIAN_SUITE"], ["python3", "libnuma1"], Path("base.tar"))
    assert "--variant=minbase" in command
    assert "--include=python3,libnuma1" in command
    assert "--dpkgopt=path-exclude=/usr/share/doc/*" in command


def test_packages_installs_nothing_that_is_there(tmp_path: Path) -> None:
    if shutil.which("dpkg-query") is None:
        pytest.skip("dpkg-query is not on PATH")
    program = tmp_path / "apt-get"
    program.write_text('#!/bin/sh\necho "$@" >>calls\n')
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ROOT / "image" / "packages"
    subprocess.run(["sh", script, "dpkg", "coreutils"], cwd=tmp_path, env=env, check=True)
    assert not (tmp_path / "calls").exists()


def test_what_images_are_built_from_is_in_the_context() -> None:
    """The context leaves all out but what .dockerignore lets in: each COPY from it must be among that."""
    allowed = {
        line.removeprefix("!").strip()
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for name in IMAGES:
        for line in re.findall(
            r"^COPY (?!--from)(.*)$", (ROOT / "image" / f"Containerfile.{name}").read_text(), re.M
        ):
            for source in line.split()[:-1]:
                parts = Path(source).parts
                starts = {"/".join(parts[: count + 1]) for count in range(len(parts))}
                assert starts & allowed, f"{source} of {name} is not in the context"
