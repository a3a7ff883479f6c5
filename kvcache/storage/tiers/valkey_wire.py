# SPDX-License-Identifier: Apache-2.0
"""The wire of Valkey (RESP2) on connections of the `valkey` client: answers by a deadline, and values
straight into the memory that they are for.

The client's own parsers copy a value two or three times on its way (socket, parser, `bytes`) and time each
receive by itself, so that a server that drips costs for ever. `ReplyParser` takes their place (the client's
`parser_class`); the client still connects, authenticates and keeps the pools.

Protocol: https://valkey.io/topics/protocol/
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

from typing_extensions import Buffer
from valkey.cluster import ClusterParser
from valkey.connection import AbstractConnection
from valkey.exceptions import AskError, InvalidResponse, MovedError, TryAgainError
from valkey.exceptions import ConnectionError as ValkeyConnectionError

from kvcache.storage.object_format import HEADER_BYTES
from kvcache.storage.tiers.remote_client import Read

Reply = bytes | int | None | list[Any] | Exception

ELSEWHERE = (MovedError, AskError, TryAgainError)
"""Answers of a cluster's node that is not the one for a key."""
LINE_BYTES = 64 << 10
"""A longer line is no answer: the longest that a server sends are errors."""
MAX_ITEMS = 1 << 20


class ReplyParser:
    """A parser as the client wants them. `due` (of `time.monotonic`) bounds what is received; without it each
    receive has the connection's own time.
    """

    def __init__(self, socket_read_size: int) -> None:
        self._buffer = memoryview(bytearray(socket_read_size))
        self._start = self._end = 0
        self._sock: socket.socket | None = None
        self._timeout: float | None = None
        self.due: float | None = None

    def on_connect(self, connection: AbstractConnection) -> None:
        self._sock = connection._sock  # each parser of the client does so
        self._timeout = connection.socket_timeout
        self._start = self._end = 0
        self.due = None

    def on_disconnect(self) -> None:
        self._sock = None

    def can_read(self, timeout: float) -> bool:
        """Whether there is an answer that nobody asked for, or the connection's end."""
        if self._start < self._end:
            return True
        sock = self._socket()
        sock.settimeout(timeout)
        try:
            self._fill(sock)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return False
        return True

    def read_response(self, disable_decoding: bool = False) -> Reply:
        """One answer; an error of the server is returned.

        Raises:
            InvalidResponse: this is not RESP2.
        """
        line = self._line()
        kind, text = line[:1], line[1:]
        if kind == b"+":
            return text
        if kind == b"-":
            error: Exception = ClusterParser.parse_error(text.decode("utf-8", "replace"))
            if isinstance(error, ValkeyConnectionError):
                raise error
            return error
        number = _number(line)
        if kind == b":":
            return number
        if number == -1:
            return None
        if kind == b"$" and 0 <= number <= LINE_BYTES:
            value = bytearray(number)
            self._receive(memoryview(value))
            self._line_end()
            return bytes(value)
        if kind == b"*" and 0 <= number <= MAX_ITEMS:
            return [self.read_response() for _ in range(number)]
        raise InvalidResponse(f"the answer begins with {line[:32]!r}, which is none that was asked for")

    def read_into(self, read: Read) -> bool | Exception:
        """The answer to GET, into the read's memory; False where there is no value of that size.

        Raises:
            kvcache.storage.tiers.remote_client.Expired: nobody waits for it any more.
            InvalidResponse: this is not RESP2, or no answer to GET.
        """
        line = self._line()
        if line[:1] == b"-":
            error: Exception = ClusterParser.parse_error(line[1:].decode("utf-8", "replace"))
            return error
        number = _number(line)
        if line[:1] != b"$" or number < -1:
            raise InvalidResponse(f"the answer begins with {line[:32]!r}, which is no value")
        if number == -1:
            return False
        if number != read.num_bytes:
            self._skip(number)
            self._line_end()
            return False
        self._receive(read.header)
        position = self._take(read)
        while position < number:
            with read:
                position += self._recv(read.target[position - HEADER_BYTES :])
        self._line_end()
        return True

    def arm(self) -> None:
        """Gives the socket's next operation the time that is left.

        Raises:
            TimeoutError: none is.
        """
        left = self._timeout if self.due is None else self.due - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        self._socket().settimeout(left)

    def _take(self, read: Read) -> int:
        """Moves what was received already of the payload; the position behind it."""
        data = self._buffer[self._start : min(self._end, self._start + read.target.nbytes)]
        self._start += data.nbytes
        return read.fill(HEADER_BYTES, data)

    def _skip(self, number: int) -> None:
        left = number
        while left:
            if self._start == self._end:
                self.arm()
                self._fill(self._socket())
            step = min(left, self._end - self._start)
            self._start += step
            left -= step

    def _receive(self, target: memoryview) -> None:
        data = self._buffer[self._start : min(self._end, self._start + target.nbytes)]
        target[: data.nbytes] = data
        self._start += data.nbytes
        position = data.nbytes
        while position < target.nbytes:
            position += self._recv(target[position:])

    def _line(self) -> bytes:
        """Up to the line's end, which is taken too."""
        parts = b""
        while True:
            data = bytes(self._buffer[self._start : self._end])
            parts += data
            at = parts.find(b"\r\n")
            if at >= 0:
                self._start = self._end - (len(parts) - at - 2)
                return parts[:at]
            if len(parts) > LINE_BYTES:
                raise InvalidResponse(f"the answer begins with {parts[:32]!r} and has no end")
            self.arm()
            self._fill(self._socket())

    def _line_end(self) -> None:
        end = bytearray(2)
        self._receive(memoryview(end))
        if end != b"\r\n":
            raise InvalidResponse("a value does not end where its length says")

    def _fill(self, sock: socket.socket) -> None:
        self._start = self._end = 0
        self._end = _some(sock.recv_into(self._buffer))

    def _recv(self, target: memoryview) -> int:
        self.arm()
        return _some(self._socket().recv_into(target))

    def _socket(self) -> socket.socket:
        if self._sock is None:
            raise ValkeyConnectionError("the connection was closed")
        return self._sock


class Wire:
    """A connection with a `ReplyParser` in use: commands in a row, then answers. `due` bounds each step."""

    def __init__(self, connection: AbstractConnection, due: float) -> None:
        self._connection = connection
        self._parser: ReplyParser = connection._parser
        self.due = due
        self.moved = False
        """Another node is the one for some key that was asked for."""

    @property
    def due(self) -> float | None:
        return self._parser.due

    @due.setter
    def due(self, due: float) -> None:
        self._parser.due = due

    def send(self, *pieces: Buffer) -> None:
        """Packed commands, in pieces of any size, which are not copied."""
        for piece in pieces:
            self._parser.arm()
            self._connection.send_packed_command([piece], check_health=False)

    def reply(self) -> Reply:
        return self._parser.read_response()

    def reply_into(self, read: Read) -> bool | Exception:
        return self._parser.read_into(read)

    def checked(self, reply: Reply | bool) -> Reply | bool:
        """The answer, None where another node is the one to ask.

        Raises:
            ValkeyError: the answer is an error.
        """
        if isinstance(reply, ELSEWHERE):
            self.moved = True
            return None
        if isinstance(reply, Exception):
            raise reply
        return reply

    def ask(self, commands: Sequence[Sequence[bytes]]) -> list[Reply]:
        """Sends short commands at once; their answers, errors among them."""
        self.send(b"".join(packed(*command) for command in commands))
        return [self.reply() for _ in commands]


def packed(*words: bytes) -> bytes:
    """A command as RESP."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def _number(line: bytes) -> int:
    digits = line[1:]
    if len(digits) > 20 or not digits.removeprefix(b"-").isdigit():
        raise InvalidResponse(f"the answer begins with {line[:32]!r}, which is not RESP2")
    return int(digits)


def _some(count: int) -> int:
    if count == 0:
        raise ValkeyConnectionError("the server closed the connection")
    return count
