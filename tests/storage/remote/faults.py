# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that does to connections what networks and servers do on bad days."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

PIECE = 16 << 10


@dataclass
class Fault:
    """What happens to what the server sends, and to the connection. All can be changed while it runs."""

    refuse: bool = False
    """Connections are reset when they are made."""
    hang: bool = False
    """Connections are taken, and nothing comes through in either direction."""
    delay_s: float = 0.0
    """Before each piece."""
    bytes_per_second: float = 0.0
    """Of each connection; 0: without limit."""
    truncate_after: int | None = None
    """Bytes of the server's after which the connection is closed."""
    drop_after: int | None = None
    """Bytes of the server's after which nothing comes any more, and the connection stays."""
    flip_after: int | None = None
    """Bytes of the server's after which one bit of each piece is wrong."""


class FaultProxy:
    """Listens on a port of 127.0.0.1 for a server behind it."""

    def __init__(self, target: int, seed: int = 0) -> None:
        self.fault = Fault()
        self._target = target
        self._rng = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._running = True
        self.accepted = 0
        self.met = 0
        """How often a fault did something to a connection or a piece."""
        self._thread(self._accept)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Ends all connections there are."""
        for sock in self._sockets:
            _end(sock)
        self._sockets.clear()

    def close(self) -> None:
        self._running = False
        _end(self._listener)
        self.cut()

    def _accept(self) -> None:
        while self._running:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            if self.fault.refuse:
                self.met += 1
                # Linger of 0: a reset instead of a proper end.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                client.close()
                continue
            self._sockets.append(client)
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                _end(client)
                continue
            self._sockets.append(server)
            self._thread(partial(self._pump, client, server, False))
            self._thread(partial(self._pump, server, client, True))

    def _pump(self, source: socket.socket, sink: socket.socket, from_server: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(PIECE):
                self.met += self.fault.hang
                while self.fault.hang and self._running:
                    time.sleep(0.01)
                fault = self.fault
                if fault.delay_s or fault.bytes_per_second:
                    self.met += 1
                    time.sleep(fault.delay_s)
                if fault.bytes_per_second:
                    time.sleep(len(data) / fault.bytes_per_second)
                if from_server:
                    if fault.drop_after is not None and passed >= fault.drop_after:
                        self.met += 1
                        continue
                    if fault.flip_after is not None and passed >= fault.flip_after:
                        self.met += 1
                        data = self._flipped(data)
                    if fault.truncate_after is not None and passed + len(data) > fault.truncate_after:
                        self.met += 1
                        sink.sendall(data[: max(0, fault.truncate_after - passed)])
                        break
                sink.sendall(data)
                passed += len(data)
        _end(source)
        _end(sink)

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)

    @staticmethod
    def _thread(target: Callable[[], None]) -> None:
        threading.Thread(target=target, daemon=True).start()


def _end(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        sock.close()
