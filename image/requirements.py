# SPDX-License-Identifier: Apache-2.0
"""Which packages of the lock each image gets: what the project's extras ask for, and all that those need.

What a package asks for and the lock leaves out on purpose (vLLM's image libraries, say) is left out here too.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

EXTRAS = {"engine-cpu": ("cpu", "admin", "cli", "remote"), "operator": ("operator",)}
"""Extras of pyproject.toml that an image is made of; one that is not there is left out."""
_OPERATOR_SHARES = ("pydantic", "pyyaml")
"""What `kvcache.config` needs: the operator has no other part of the cache, and none of its dependencies."""


class RequirementError(Exception):
    """The lock and what is installed do not fit. The text says where."""


def read_lock(text: str) -> dict[str, str]:
    """Pins of a lock: canonical name to `NAME==VERSION`."""
    lines = [line.strip() for line in text.splitlines()]
    pins = [line for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.partition("==")[0]): pin for pin in pins}


def read_installed() -> dict[str, list[Requirement]]:
    """What each package of this environment asks for, by its canonical name; the lock is installed whole."""
    found: dict[str, list[Requirement]] = {}
    for distribution in metadata.distributions():
        found[canonicalize_name(distribution.name)] = [
            Requirement(line) for line in distribution.requires or ()
        ]
    return found


def closure(
    roots: Iterable[Requirement],
    requires: Mapping[str, Iterable[Requirement]],
    lock: Mapping[str, str],
    python: str,
) -> list[str]:
    """Pins of all packages that `roots` need, themselves included, sorted.

    Args:
        requires: What each package asks for, by canonical name.
        lock: Pins by canonical name.
        python: Version that the image has, `3.11` say; markers are read for it.

    Raises:
        RequirementError: a root is not in the lock, or a package of the lock is not installed.
    """
    pins: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(roots)
    for root in waiting:
        if canonicalize_name(root.name) not in lock:
            raise RequirementError(f"{root.name} is not in the lock; add it, with all that it needs")
    environment = {key: str(value) for key, value in default_environment().items()} | {
        "python_version": python,
        "python_full_version": f"{python}.0",
    }
    while waiting:
        wanted = waiting.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if name not in lock or (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name not in requires:
            raise RequirementError(f"{lock[name]} is in the lock and not installed; run make setup")
        pins.add(lock[name])
        for need in requires[name]:
            if need.marker is None or any(
                need.marker.evaluate({**environment, "extra": extra}) for extra in (*extras, "")
            ):
                waiting.append(need)
    return sorted(pins, key=str.lower)


def project_roots(pyproject: str) -> dict[str, list[Requirement]]:
    """What each image is asked to hold, and `build`: what builds the wheel of the project."""
    tables = tomllib.loads(pyproject)
    project = tables["project"]
    base = [Requirement(line) for line in project["dependencies"]]
    shared = [need for need in base if canonicalize_name(need.name) in _OPERATOR_SHARES]
    roots = {}
    for image, names in EXTRAS.items():
        lines = [line for name in names for line in project["optional-dependencies"].get(name, ())]
        roots[image] = [*(shared if image == "operator" else base), *map(Requirement, lines)]
    build = [Requirement(line) for line in tables["build-system"]["requires"]]
    return roots | {"build": [*build, Requirement("cmake"), Requirement("ninja")]}


def collect_wheels(source: Path, pins: Sequence[str], target: Path) -> None:
    """Makes `target` a folder of the wheels of `pins`, as links, and of a `requirements.txt` that names them.

    Raises:
        RequirementError: there is no wheel for a pin.
    """
    found: dict[tuple[str, str], Path] = {}
    for wheel in source.glob("*.whl"):
        name, built, *_ = parse_wheel_filename(wheel.name)
        found[name, built.public] = wheel
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for pin in pins:
        project, _, version = pin.partition("==")
        wheel_of = found.get((canonicalize_name(project), Version(version).public))
        if wheel_of is None:
            raise RequirementError(
                f"there is no wheel of {pin} in {source.name}; remove {source.name}, run again"
            )
        (target / wheel_of.name).hardlink_to(wheel_of)
    (target / "requirements.txt").write_text("\n".join(pins) + "\n")
