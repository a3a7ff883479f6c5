# SPDX-License-Identifier: Apache-2.0
"""The disk tier on disks that fail: never a wrong byte, never an end of serving, and back with the disk."""

from __future__ import annotations

import base64
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from kvcache.storage.tier import ClearScope, PutOutcome, StoredObject
from kvcache.storage.tiers.disk import DiskTier, directory
from kvcache.storage.tiers.disk.names import LAYOUT
from tests.storage.disk_rigs import Rig, file_of, files, put, put_all, used

Damage = Callable[[Path], None]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that failed is asked again at once."""
    monkeypatch.setattr(directory, "PAUSE_S", (0.0, 0.0))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB of its own."""
    target = tmp_path / "disk"
    target.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", target], capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    yield target
    subprocess.run(["umount", "--lazy", target], check=True)


@pytest.fixture
def breakable_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system in a file; see `break_disk`."""
    image, target = tmp_path / "image", tmp_path / "disk"
    target.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 20)
    commands: list[list[str | Path]] = [
        ["mkfs.ext4", "-q", image],
        ["mount", "-o", "loop,errors=remount-ro", image, target],
    ]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True)
        except FileNotFoundError as error:
            pytest.skip(f"there is no {error.filename} here")
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    yield target
    subprocess.run(["umount", "--lazy", target], check=True)


def break_disk(disk: Path) -> None:
    """As if ext4 had met an error: it is read-only from now on."""
    device = disk.stat().st_dev
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    trigger = Path(f"/sys/fs/ext4/{name}/trigger_fs_error")
    if not trigger.exists():
        pytest.skip("this kernel breaks no ext4 on demand")
    trigger.write_text("1")


def drained(tier: DiskTier) -> None:
    """Waits for jobs in the background."""
    tier.remove([]).result(30)


def cut(length: int) -> Damage:
    return lambda file: os.truncate(file, length)


def flip(offset: int) -> Damage:
    def damage(file: Path) -> None:
        with file.open("r+b") as opened:
            opened.seek(offset)
            byte = opened.read(1)[0]
            opened.seek(offset)
            opened.write(bytes([byte ^ 4]))

    return damage


def fill(content: bytes) -> Damage:
    def damage(file: Path) -> None:
        file.write_bytes(content)

    return damage


def another_version(file: Path) -> None:
    content = bytearray(file.read_bytes())
    struct.pack_into("<H", content, 8, 2)
    content[4080:4096] = xxhash.xxh3_128_digest(bytes(content[:4080]))
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("reason", "damage"),
    [
        ("ObjectTruncated", cut(0)),
        ("ObjectTruncated", cut(1)),
        ("ObjectTruncated", cut(4095)),
        ("ObjectTruncated", cut(4096)),
        ("ObjectTruncated", cut(5000)),
        ("ObjectTruncated", cut(4096 + 64 * 480 - 1)),
        ("ObjectCorrupt", flip(60)),
        ("ObjectCorrupt", flip(300)),
        ("ObjectCorrupt", flip(4096)),
        ("ObjectCorrupt", flip(4096 + 64 * 480 - 1)),
        ("ObjectForeign", flip(0)),
        ("ObjectForeign", fill(bytes(36864))),
        ("ObjectForeign", fill(b"#!/bin/sh\n" * 4000)),
        ("ObjectVersion", another_version),
    ],
)
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("engine", ["Auto", "Threads"])
def test_damaged_file_is_a_miss_and_goes(
    tmp_path: Path, reason: str, damage: Damage, engine: str, restart: bool
) -> None:
    rig = Rig()
    tier = rig.open(tmp_path, engine=engine)
    objects = rig.objects(3)
    put_all(tier, objects)
    if restart:
        tier.close()
    damage(file_of(tmp_path, objects[1].key))
    if restart:
        tier = rig.open(tmp_path, engine=engine)
    direct = tier.direct
    keys = [obj.key for obj in objects]
    assert rig.read(tier, keys) == [rig.payloads[keys[0]], None, rig.payloads[keys[2]]]
    assert tier.failures == {reason: 1}
    drained(tier)
    assert tier.head(keys).result(0)[1] is None
    assert len(files(tmp_path)) == 2
    assert tier.stats().used_bytes == used(tmp_path)
    assert tier.health().ready
    assert tier.direct == direct
    put_all(tier, [objects[1]])
    rig.check(tier, keys)
    tier.close()


@pytest.mark.parametrize("engine", ["Auto", "Threads"])
@pytest.mark.parametrize("shift", [0, 16])
def test_segments_of_an_object_are_checked_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, shift: int
) -> None:
    """Objects of up to eight segments, each of the size of a page or some bytes more or less."""
    monkeypatch.setattr("kvcache.storage.tiers.disk.transfers.SEGMENT_BYTES", 4096)
    rig = Rig()
    tier = rig.open(tmp_path, engine=engine)
    objects = [rig.object(tokens) for tokens in range(1, 65)]
    keys = [obj.key for obj in objects]
    put_all(tier, objects)
    assert rig.read(tier, keys, shift=shift) == [rig.payloads[key] for key in keys]
    whole = [*objects]
    for obj in rig.rng.sample(objects, 40):
        file = file_of(tmp_path, obj.key)
        last = 4096 + obj.payload.nbytes
        damage = rig.rng.choice((cut(rig.rng.randrange(last)), flip(rig.rng.randrange(4096, last))))
        damage(file)
        whole.remove(obj)
    expected = [rig.payloads[obj.key] if obj in whole else None for obj in objects]
    assert rig.read(tier, keys, shift=shift) == expected
    assert sum(tier.failures.values()) == 40
    tier.close()


def test_file_under_anothers_name_is_not_served(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path)
    one, other = rig.objects(2)
    put_all(tier, [one, other])
    shutil.copy(file_of(tmp_path, one.key), file_of(tmp_path, other.key))
    assert rig.read(tier, [one.key, other.key]) == [rig.payloads[one.key], None]
    assert tier.failures == {"ObjectMismatch": 1}
    tier.close()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A pipe, say, under an object's name, which an open would wait on for ever."""
    rig = Rig()
    tier = rig.open(tmp_path)
    objects = rig.objects(3)
    keys = [obj.key for obj in objects]
    put_all(tier, objects)
    file = file_of(tmp_path, keys[1])
    file.unlink()
    make(file)
    drained(tier)
    rig.read(tier, keys)
    assert rig.read(tier, keys) == [rig.payloads[keys[0]], None, rig.payloads[keys[2]]]
    assert tier.health().ready
    tier.close()
    make(tmp_path / LAYOUT / file.with_suffix(".part").name)
    again = rig.open(tmp_path)
    assert again.health().ready
    assert rig.read(again, keys) == [rig.payloads[keys[0]], None, rig.payloads[keys[2]]]
    again.close()


def test_file_that_somebody_removed_is_a_miss(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path)
    objects = rig.objects(4)
    put_all(tier, objects)
    keys = [obj.key for obj in objects]
    sizes = tier.head(keys).result(0)
    file_of(tmp_path, keys[2]).unlink()
    assert None not in sizes
    assert rig.read(tier, keys) == [*(rig.payloads[key] for key in keys[:2]), None, rig.payloads[keys[3]]]
    put_all(tier, [objects[2]])
    rig.check(tier, keys)
    tier.close()
    again = rig.open(tmp_path)
    assert again.stats().used_bytes == used(tmp_path)
    again.close()


def test_full_disk_keeps_the_newest(small_disk: Path) -> None:
    """The capacity is more than the disk has: what others filled is made up for by giving up our own."""
    rig = Rig()
    tier = rig.open(small_disk, capacity=64 << 20)
    objects = [obj for _ in range(12) for obj in rig.objects(8)]
    outcomes = [put(tier, [obj])[0] for obj in objects]
    assert outcomes == [PutOutcome.STORED] * len(objects)
    there = [obj for obj in objects if tier.head([obj.key]).result(0)[0]]
    assert there == objects[-len(there) :]
    assert 15 < len(there) < 29
    rig.check(tier, [obj.key for obj in there])
    assert tier.stats().used_bytes == used(small_disk)
    assert tier.health().ready
    tier.close()


def test_full_disk_of_others_is_named_and_left_when_there_is_room(small_disk: Path) -> None:
    rig = Rig()
    tier = rig.open(small_disk, capacity=64 << 20)
    put_all(tier, old := rig.objects(4))
    hog = small_disk / "hog"
    with pytest.raises(OSError, match="No space"), hog.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    tier.clear(ClearScope(keys={obj.key for obj in old[1:]})).result(30)
    with pytest.raises(OSError, match="No space"), hog.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    big = rig.objects(6)
    assert put(tier, big)[1:] == [PutOutcome.DECLINED] * 5
    health = tier.health()
    assert (health.state, health.ready, health.readable) == ("DiskFull", False, True)
    assert f"{small_disk}: No space left on device; " in health.detail
    assert tier.stats().used_bytes == used(small_disk)
    hog.unlink()
    put_all(tier, more := rig.objects(3))
    assert tier.health().ready
    rig.check(tier, [obj.key for obj in more])
    assert tier.stats().used_bytes == used(small_disk)
    tier.close()


def test_disk_that_broke_is_read_and_a_new_one_is_written(breakable_disk: Path) -> None:
    rig = Rig()
    tier = rig.open(breakable_disk, capacity=4 << 20)
    objects = rig.objects(6)
    put_all(tier, objects[:4])
    keys = [obj.key for obj in objects]
    break_disk(breakable_disk)
    assert put(tier, objects[4:]) == [PutOutcome.FAILED] * 2
    health = tier.health()
    assert (health.state, health.readable) == ("DiskReadOnly", True)
    assert "Read-only file system" in health.detail
    rig.check(tier, keys[:4])
    assert not tier.clear(ClearScope()).result(30).complete
    rig.check(tier, keys[:4])
    tier.close()
    tier = rig.open(breakable_disk, capacity=4 << 20)  # restarted while it is read-only
    assert tier.health().state == "DiskReadOnly"
    rig.check(tier, keys[:4])
    assert put(tier, objects[4:]) == [PutOutcome.FAILED] * 2
    subprocess.run(["umount", "--lazy", breakable_disk], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", breakable_disk], check=True)
    put(tier, objects[:1])  # notices
    tier.head([]).result(0)
    drained(tier)
    put_all(tier, objects)
    assert tier.health().ready
    rig.check(tier, keys)
    assert tier.stats().used_bytes == used(breakable_disk)
    tier.close()


def test_directory_that_cannot_be_written_for_a_while(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path)
    objects = rig.objects(6)
    put_all(tier, objects[:4])
    keys = [obj.key for obj in objects]
    if subprocess.run(["chattr", "+i", tmp_path / LAYOUT], capture_output=True).returncode:
        pytest.skip("no directory can be made immutable here")
    try:
        assert put(tier, objects[4:]) == [PutOutcome.FAILED] * 2
        assert tier.health()[::2] == ("DiskReadOnly", True)
        rig.check(tier, keys[:4])
        cleared = tier.clear(ClearScope()).result(30)
        assert not cleared.complete
        assert "Operation not permitted" in cleared.detail
    finally:
        subprocess.run(["chattr", "-i", tmp_path / LAYOUT], check=True)
    put_all(tier, objects[4:])
    assert tier.health().ready
    rig.check(tier, keys)
    assert tier.stats().used_bytes == used(tmp_path)
    tier.close()


def test_forbidden_directory_is_named(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    tier = Rig().open(tmp_path)
    assert tier.health().state in ("DiskReadOnly", "DiskForbidden")
    tmp_path.chmod(0o700)
    tier.close()


@pytest.mark.parametrize("which", ["directory", "layout", "unmounted"])
def test_vanished_directory_is_a_miss_until_it_is_back(
    tmp_path: Path, request: pytest.FixtureRequest, which: str
) -> None:
    rig = Rig()
    place = request.getfixturevalue("small_disk") if which == "unmounted" else tmp_path / "cache"
    tier = rig.open(place, capacity=1 << 20)
    objects = rig.objects(4)
    keys = [obj.key for obj in objects]
    put_all(tier, objects)
    if which == "unmounted":
        subprocess.run(["umount", "--lazy", place], check=True)
    else:
        shutil.rmtree(place if which == "directory" else place / LAYOUT)
    assert set(put(tier, rig.objects(2))) <= {PutOutcome.FAILED}
    assert rig.read(tier, keys) == [None] * 4
    if which == "directory":
        health = tier.health()
        assert (health.state, health.readable) == ("DiskVanished", False)
        assert "mount it or make it again" in health.detail
        drained(tier)
        assert not place.exists()  # nobody makes it anew in the place where a disk should be
        assert not tier.clear(ClearScope()).result(30).complete
        place.mkdir()
    elif which == "unmounted":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True)
    tier.head(keys).result(0)
    drained(tier)
    put_all(tier, objects)
    rig.check(tier, keys)
    assert tier.health().ready
    assert tier.stats().used_bytes == used(place)
    tier.close()


def test_directory_that_comes_late(tmp_path: Path) -> None:
    rig = Rig()
    blocker = tmp_path / "mnt"
    blocker.write_text("a file where the directory should be")
    tier = rig.open(blocker)
    assert tier.health().state in ("DiskVanished", "DiskError")
    assert put(tier, rig.objects(2)) == [PutOutcome.FAILED] * 2
    blocker.unlink()
    blocker.mkdir()
    tier.head([]).result(0)
    drained(tier)
    put_all(tier, objects := rig.objects(2))
    rig.check(tier, [obj.key for obj in objects])
    assert tier.health().ready
    tier.close()


def test_one_lost_directory_leaves_the_others(tmp_path: Path) -> None:
    rig = Rig()
    tier = rig.open(tmp_path / "a", tmp_path / "b", capacity=8 << 20)
    objects = rig.objects(40)
    put_all(tier, objects)
    lost = {obj.key for obj in objects if file_or_none(tmp_path / "b", obj)}
    kept = [obj.key for obj in objects if obj.key not in lost]
    assert lost
    assert kept
    (tmp_path / "b").rename(tmp_path / "away")
    put_all(tier, objects[:0] + rig.objects(20))  # all go to the one that is there
    health = tier.health()
    assert (health.state, health.readable, health.writable) == ("DiskVanished", True, True)
    rig.check(tier, kept)
    assert tier.head(sorted(lost)).result(0) == [None] * len(lost)
    put_all(tier, again := [obj for obj in objects if obj.key in lost])
    (tmp_path / "away").rename(tmp_path / "b")
    tier.head([]).result(0)
    drained(tier)
    assert tier.health().ready
    rig.check(tier, [obj.key for obj in objects])
    drained(tier)
    # What both have had meanwhile is there once.
    assert len(again) == len(lost)
    assert tier.stats().used_bytes == used(tmp_path / "a", tmp_path / "b") == 60 * rig.object_bytes
    tier.close()


def file_or_none(place: Path, obj: StoredObject) -> Path | None:
    try:
        return file_of(place, obj.key)
    except FileNotFoundError:
        return None


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV, errno.ENOMEM])
def test_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    rig = Rig()
    tier = rig.open(tmp_path, engine="Threads")
    put_all(tier, before := rig.objects(3))
    real = os.pwritev
    calls = 0

    def fails(*arguments: object) -> int:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise OSError(number, os.strerror(number))
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", fails)
    outcomes = put(tier, objects := rig.objects(10))
    assert sorted(outcome.name for outcome in outcomes) == 5 * ["FAILED"] + 5 * ["STORED"]
    monkeypatch.undo()
    stored = [obj.key for obj, outcome in zip(objects, outcomes, strict=True) if outcome is PutOutcome.STORED]
    rig.check(tier, [*(obj.key for obj in before), *stored])
    assert tier.stats().used_bytes == used(tmp_path) == 8 * rig.object_bytes
    put(tier, objects)
    rig.check(tier, [obj.key for obj in objects])
    assert tier.health().ready
    tier.close()


def test_disk_that_works_again_is_ready_without_being_asked_for_objects(small_disk: Path) -> None:
    """Who is told that a tier is not ready does not ask it for objects: it finds out by itself."""
    rig = Rig()
    tier = rig.open(small_disk, capacity=64 << 20)
    hog = small_disk / "hog"
    with pytest.raises(OSError, match="No space"), hog.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert put(tier, rig.objects(1)) == [PutOutcome.DECLINED]
    assert tier.health().state == "DiskFull"
    drained(tier)
    assert tier.health().state == "DiskFull"
    hog.unlink()
    end = time.monotonic() + 60
    while not tier.health().ready:
        assert time.monotonic() < end
        drained(tier)
    assert {file.name for file in (small_disk / LAYOUT).iterdir()} == {"ledger"}
    put_all(tier, rig.objects(1))
    tier.close()


def test_read_that_fails_is_a_miss_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "PAUSE_S", (1000.0, 1000.0))
    rig = Rig()
    tier = rig.open(tmp_path, engine="Threads")
    put_all(tier, objects := rig.objects(3))
    keys = [obj.key for obj in objects]

    def fails(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        assert rig.read(tier, keys[:1]) == [None]
    health = tier.health()
    assert (health.state, health.readable) == ("DiskError", False)
    assert "Input/output error; look at the kernel's log" in health.detail
    assert tier.head(keys).result(0) == [None] * 3  # left alone for a while
    assert put(tier, rig.objects(1)) == [PutOutcome.FAILED]
    tier.close()
    again = rig.open(tmp_path)
    rig.check(again, keys[1:])
    again.close()


def test_file_system_without_direct_io_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some let a file be opened for direct I/O and refuse the first transfer."""
    rig = Rig()
    tier = rig.open(tmp_path, engine="Threads")
    direct_at_first = tier.direct
    if not direct_at_first:
        pytest.skip("the file system of the temporary folder has no direct I/O")
    real = os.pwritev

    def refuses_direct(fd: int, *rest: object) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", refuses_direct)
    put(tier, rig.objects(1))
    put_all(tier, objects := rig.objects(3))
    assert not tier.direct
    rig.check(tier, [obj.key for obj in objects])
    assert tier.health().ready
    tier.close()


def test_sealed_objects_show_nothing_and_survive_a_rotation(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys"

    def write(*names: str) -> None:
        keys_file.unlink(missing_ok=True)
        keys_file.write_text("".join(f"{name} {secrets[name]}\n" for name in names))
        keys_file.chmod(0o400)

    secrets = {name: base64.b64encode(os.urandom(32)).decode() for name in ("old", "new")}
    write("old")
    rig, place = Rig(), tmp_path / "cache"
    plain = rig.objects(3)
    tier = rig.open(place)
    put_all(tier, plain)
    tier.close()

    tier = rig.open(place, encryption_key_file=str(keys_file))
    put_all(tier, first := [*rig.objects(5), rig.object(9, shift=3), rig.object(1)])
    for obj in first:
        content = file_of(place, obj.key).read_bytes()
        assert rig.payloads[obj.key][:48] not in content
    rig.check(tier, [obj.key for obj in first])
    # What lay there plain is not trusted, and does not stay.
    assert rig.read(tier, [obj.key for obj in plain]) == [None] * 3
    drained(tier)
    assert tier.failures == {"ObjectUnsealed": 3}
    assert len(files(place)) == len(first)
    write("new", "old")
    put_all(tier, second := rig.objects(4))
    rig.check(tier, [obj.key for obj in (*first, *second)])
    tier.close()

    write("new")
    tier = rig.open(place, encryption_key_file=str(keys_file))
    assert rig.read(tier, [obj.key for obj in first]) == [None] * len(first)
    rig.check(tier, [obj.key for obj in second])
    tier.close()
    tier = rig.open(place)
    assert rig.read(tier, [obj.key for obj in second]) == [None] * 4
    assert tier.failures == {"ObjectSealed": 4}
    tier.close()
