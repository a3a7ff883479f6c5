# SPDX-License-Identifier: Apache-2.0
"""Connections to control sockets, kept for the next request.

A new connection takes more of the process that is asked than the answer does: it is accepted, greeted and
ended there on top. So one that has answered is kept. A request has a connection for itself while it runs, and
one that did not answer is not used again: no answer can be taken for another's, and no request waits behind
one that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from kvcache.ipc import (
    MAX_MESSAGE_BYTES,
    NoAnswerError,
    ReplyT,
    UnreachableError,
    checked_path,
    is_served,
    pack_request,
    unpack_reply,
)

_REQUEST_ID = 1


@dataclass(frozen=True)
class _Connection:
    socket: zmq.asyncio.Socket
    server: tuple[int, ...]
    """Which server's: a restarted one makes a socket file anew."""


class Connections:
    """To the sockets of any number of processes. For one event loop."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._idle: dict[Path, _Connection] = {}

    async def request(
        self, path: Path, message: msgspec.Struct, reply: type[ReplyT], timeout_s: float
    ) -> ReplyT:
        """Sends and waits for the answer.

        Raises:
            UnreachableError, NoAnswerError, RemoteError, BadMessageError.
        """
        frames = pack_request(_REQUEST_ID, message)
        connection = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._sent_idle(path, frames)
                if connection is None:
                    connection = self._open(path)
                    await connection.socket.send_multipart(frames)
                answer = await connection.socket.recv_multipart()
        except BaseException as error:
            if connection is not None:
                connection.socket.close(linger=0)
            if not isinstance(error, TimeoutError):
                raise
            if not is_served(path):
                raise UnreachableError(f"{path} is not served any more") from None
            raise NoAnswerError(f"{path} did not answer within {timeout_s:g} s") from None
        self._keep(path, connection)
        return unpack_reply(answer, reply)

    def forget_others(self, paths: Collection[Path]) -> None:
        """Ends idle connections to other sockets than these: a socket that is gone would be looked for."""
        for path in self._idle.keys() - set(paths):
            self._idle.pop(path).socket.close(linger=0)

    def close(self) -> None:
        self._idle.clear()
        self._context.destroy(linger=0)

    async def _sent_idle(self, path: Path, frames: list[bytes]) -> _Connection | None:
        """The kept connection that has taken the request; None if there is none to this server."""
        connection = self._idle.pop(path, None)
        if connection is None:
            return None
        if connection.server == _server(path):
            with contextlib.suppress(zmq.Again):  # the process is gone
                await connection.socket.send_multipart(frames, flags=zmq.NOBLOCK)
                return connection
        connection.socket.close(linger=0)
        return None

    def _open(self, path: Path) -> _Connection:
        server = _server(path)
        if not is_served(checked_path(path)):
            raise UnreachableError(f"{path} is not served")
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is kept for a process that is gone
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.connect(f"ipc://{path}")
        return _Connection(socket, server)

    def _keep(self, path: Path, connection: _Connection) -> None:
        other = self._idle.pop(path, None)
        if other is not None:
            other.socket.close(linger=0)
        self._idle[path] = connection


def _server(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_dev, status.st_ino, status.st_ctime_ns)
