# SPDX-License-Identifier: Apache-2.0
"""`kvcache inspect` on a directory: all that is there, and what of it is damaged. Nothing is changed."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcache.cli import app
from kvcache.storage.inspection import inspect_place
from kvcache.storage.sealing import Sealer
from kvcache.storage.tiers.disk.names import LAYOUT, ObjectName
from tests.storage.disk_rigs import Rig, file_of, put_all, used


def snapshot(place: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in place.rglob("*") if file.is_file()
    }


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["inspect", *arguments])
    return result.exit_code, result.output


def test_everything_that_lies_there_is_told(tmp_path: Path) -> None:
    rig = Rig(rank=2)
    tier = rig.open(tmp_path)
    objects = [*rig.chain(4, tenant=b"t" * 16), rig.object(9)]
    put_all(tier, objects)
    damaged = file_of(tmp_path, objects[1].key)
    content = bytearray(damaged.read_bytes())
    content[4096 + 100] ^= 1
    damaged.write_bytes(content)
    os.truncate(file_of(tmp_path, objects[2].key), 5000)
    moved = ObjectName.of(rig.object(9))
    (tmp_path / LAYOUT / moved.file).write_bytes(file_of(tmp_path, objects[4].key).read_bytes())
    part = tmp_path / LAYOUT / ObjectName.of(rig.object()).part
    part.write_bytes(b"half")
    (tmp_path / LAYOUT / "notes.txt").write_text("mine")
    (tmp_path / "kvcache-objects-v0").mkdir()
    before = snapshot(tmp_path)

    found = inspect_place(str(tmp_path))
    states = {obj.chunk_hash: obj.state for obj in found.objects}
    assert states == {
        objects[0].key.chunk_hash.hex(): "Ok",
        objects[1].key.chunk_hash.hex(): "ObjectCorrupt",
        objects[2].key.chunk_hash.hex(): "ObjectTruncated",
        objects[3].key.chunk_hash.hex(): "Ok",
        objects[4].key.chunk_hash.hex(): "Ok",
        moved.key.chunk_hash.hex(): "ObjectMismatch",
    }
    assert len(found.bad) == 3
    one = next(obj for obj in found.objects if obj.chunk_hash == objects[3].key.chunk_hash.hex())
    assert (one.rank, one.tenant, one.parent) == (2, (b"t" * 16).hex(), objects[2].key.chunk_hash.hex())
    assert (one.num_tokens, one.payload_bytes, one.stored_bytes) == (64, 64 * 480, rig.object_bytes)
    assert (one.form, one.sealed_by) == ("3 layers x 2 x 40 bfloat16", "")
    assert one.last_used == file_of(tmp_path, objects[3].key).stat().st_mtime
    assert found.stored_bytes == used(tmp_path) - len(b"half") - len("mine")
    assert (found.parts, found.unknown) == ([part.name], ["notes.txt"])
    assert found.other_layouts == ["kvcache-objects-v0"]
    assert snapshot(tmp_path) == before

    unchecked = inspect_place(str(tmp_path), verify=False)
    assert sorted(obj.state for obj in unchecked.bad) == ["ObjectMismatch", "ObjectTruncated"]
    assert {obj.state for obj in unchecked.objects if not obj.bad} == {"Unchecked"}
    tier.close()


def test_sealed_objects_are_checked_with_and_without_the_key(tmp_path: Path) -> None:
    def keys(name: str, line: str) -> Path:
        path = tmp_path / name
        path.write_text(line)
        path.chmod(0o400)
        return path

    right, wrong = (keys(name, f"k1 {base64.b64encode(os.urandom(32)).decode()}") for name in "rw")
    rig = Rig()
    tier = rig.open(tmp_path / "cache", encryption_key_file=str(right))
    put_all(tier, rig.objects(2))
    tier.close()
    place = str(tmp_path / "cache")
    for sealer in (None, Sealer(right)):
        found = inspect_place(place, sealer=sealer)
        assert [(obj.state, obj.sealed_by) for obj in found.objects] == 2 * [("Ok", "k1")]
    assert {obj.state for obj in inspect_place(place, sealer=Sealer(wrong)).objects} == {"ObjectCorrupt"}
    assert run(place, "--key-file", str(right))[0] == 0
    assert run(place, "--key-file", str(wrong))[0] == 2


def test_command_prints_tables_and_json(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path)
    put_all(tier, objects := rig.objects(30))
    tier.close()
    status, text = run(str(tmp_path), "--limit", "3")
    assert status == 0
    assert "... and 27 more" in text
    assert "30 objects, 1.1 MiB, 0 damaged" in text
    os.truncate(file_of(tmp_path, objects[7].key), 4100)
    status, text = run(str(tmp_path), "--limit", "1")
    assert status == 2
    assert objects[7].key.chunk_hash.hex()[:12] in text  # the damaged one comes first
    assert "30 objects, 1.0 MiB, 1 damaged" in text
    status, text = run(str(tmp_path), "--json")
    document: dict[str, Any] = json.loads(text)
    assert status == 2
    assert document["damaged"] == 1
    assert len(document["objects"]) == 30
    assert document["stored_bytes"] == used(tmp_path)


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("missing", "cannot be read (No such file or directory); name a directory of the disk tier"),
        ("nothing://host", "no store is known by nothing://"),
    ],
)
def test_places_that_are_none_are_named(tmp_path: Path, place: str, problem: str) -> None:
    status, text = run(place if "://" in place else str(tmp_path / place))
    assert status == 1
    assert problem in text
