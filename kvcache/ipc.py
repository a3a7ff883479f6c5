# SPDX-License-Identifier: Apache-2.0
"""Requests and replies between the processes of one pod, over ZMQ on unix sockets.

A request is a DEALER message of two frames, a reply likewise: a correlation id of 8 bytes (little endian;
0 asks for no reply) and one msgpack struct. The struct's type travels as msgspec's tag, and sizes are checked
before anything is decoded. Nothing is made at import, so that a process may fork before it opens its first
socket; a server or client itself belongs to the process that made it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Union, cast

import msgspec
import zmq

logger = logging.getLogger(__name__)

MAX_PATH_BYTES = 107
"""`sun_path` of Linux has 108 bytes, one of them the terminating zero."""
MAX_MESSAGE_BYTES = 4 << 20

_ID_BYTES = 8
_NO_REPLY = 0
_MAX_FAILURE_CHARS = 500
_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 500
_CLOSE_TIMEOUT_S = 5.0
_AFTER_SOCKET_ERROR_S = 0.1
_SAME_VERSION = "run the same version on both sides"

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


class IpcError(Exception):
    """A request got no usable answer."""


class UnreachableError(IpcError):
    """Nobody serves the socket."""


class NoAnswerError(IpcError):
    """The peer did not answer within the deadline. It may still carry out the request."""


class BadMessageError(IpcError):
    """A message that is too large or does not have the agreed form."""


class RemoteError(IpcError):
    """The peer answered that it failed.

    Attributes:
        code: what failed, in CamelCase: `Malformed` or the name of the handler's exception.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The reply to a request that could not be carried out."""

    code: str
    text: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The reply to a request that has no result."""


def checked_path(path: str | Path) -> Path:
    """The path, if a unix socket can have it.

    Raises:
        IpcError: the path is longer than 107 bytes.
    """
    length = len(str(path).encode())
    if length > MAX_PATH_BYTES:
        raise IpcError(
            f"{path}: the path of a unix socket has at most {MAX_PATH_BYTES} bytes, this one has {length}; "
            "choose a shorter runtime_dir"
        )
    return Path(path)


def is_served(path: Path) -> bool:
    """True when a process listens on the unix socket now (it may hang all the same)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its backlog is full
        except OSError:
            return False
        return True


def pack_request(request_id: int, message: msgspec.Struct, max_bytes: int = MAX_MESSAGE_BYTES) -> list[bytes]:
    """Frames of a request.

    Raises:
        BadMessageError: the message is larger than `max_bytes`.
    """
    payload = msgspec.msgpack.encode(message)
    if len(payload) > max_bytes:
        raise BadMessageError(
            f"{type(message).__name__} has {len(payload)} bytes; send at most {max_bytes} at once"
        )
    return [request_id.to_bytes(_ID_BYTES, "little"), payload]


def unpack_reply(frames: list[bytes], reply: type[ReplyT]) -> ReplyT:
    """The reply in the frames.

    Raises:
        RemoteError: the peer answered that it failed.
        BadMessageError: it answered something else than `reply`.
    """
    if len(frames) != 2:
        raise BadMessageError(f"a reply of {len(frames)} frames was read, not 2; {_SAME_VERSION}")
    try:
        answer = _reply_decoder(reply).decode(frames[1])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadMessageError(
            f"a reply was read that is no {reply.__name__} ({error}); {_SAME_VERSION}"
        ) from error
    if isinstance(answer, Failure):
        raise RemoteError(answer.code, answer.text)
    return cast(ReplyT, answer)


@functools.cache
def _reply_decoder(reply: type[msgspec.Struct]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(Union[reply, Failure])  # noqa: UP007 (a type made at run time)


@dataclass
class ServerCounters:
    """What a server has met since it started. Written by its thread and by those that make its answers."""

    requests: int = 0
    malformed: int = 0
    failures: int = 0


Handler = Callable[[Any], msgspec.Struct | Future[Any]]
"""Of one type of request: the reply, or a future of it where that takes a while; others are answered
meanwhile."""


class _Deferred:
    """Replies that were made on other threads, for the thread that sends them."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable while there are any."""
        self._lock = threading.Lock()
        self._replies: deque[list[bytes]] = deque()
        self._closed = False

    def put(self, frames: list[bytes]) -> None:
        with self._lock:
            if not self._closed:
                self._replies.append(frames)
                os.eventfd_write(self.fd, 1)

    def take(self) -> list[list[bytes]]:
        with self._lock:
            os.eventfd_read(self.fd)
            taken = list(self._replies)
            self._replies.clear()
            return taken

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.fd)


class Server:
    """Answers requests on one unix socket, from a thread of its own, until it is closed.

    Nothing that a peer sends and nothing that a handler raises ends the thread: malformed messages and failed
    handlers are answered with `Failure` and counted.

    Args:
        path: the socket, for this user only. Its folder is made (mode 0700) if it is not there.
        handlers: a function for each type of request (a tagged struct); they run on the thread, one by one,
            and may defer their answer.
        max_bytes: a peer that sends a larger frame is disconnected.

    Raises:
        IpcError: the path is too long, another process serves it, or it cannot be bound.
    """

    def __init__(
        self,
        path: str | Path,
        handlers: Mapping[type[Any], Handler],
        *,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.path = checked_path(path)
        self.counters = ServerCounters()
        self._handlers = dict(handlers)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Union[tuple(handlers)])  # noqa: UP007
        self._logged: set[tuple[str, str]] = set()
        self._closing = threading.Lock()
        self._closed = False
        self._make_place()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        try:
            self._router.bind(f"ipc://{self.path}")
            self.path.chmod(0o600)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise IpcError(
                f"{self.path} cannot be bound ({error}); make its folder writable for this user"
            ) from error
        self._deferred = _Deferred()
        self._wake, self._woken = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._woken.bind("inproc://close")
        self._wake.connect("inproc://close")
        self._thread = threading.Thread(target=self._serve, name=f"ipc {self.path.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and removes the socket file. A handler that hangs is left behind after 5 s."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self.path.unlink(missing_ok=True)  # first: from here on the path may belong to another server
            self._wake.send(b"")
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning("%s: a handler still runs %g s after close", self.path, _CLOSE_TIMEOUT_S)
                return
            self._deferred.close()
            self._wake.close(linger=0)
            self._context.term()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_place(self) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise IpcError(
                f"{self.path.parent} cannot be made ({error.strerror}); choose another runtime_dir"
            ) from error
        if is_served(self.path):
            raise IpcError(
                f"{self.path} is served by another process; give each vLLM a runtime_dir of its own"
            )
        if self.path.is_socket():
            self.path.unlink()  # left behind by a process that was killed

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._deferred.fd, zmq.POLLIN)
        try:
            while True:
                try:
                    ready = dict(poller.poll())
                    if self._woken in ready:
                        return
                    if self._deferred.fd in ready:
                        for reply in self._deferred.take():
                            self._router.send_multipart(reply)
                    if self._router in ready:
                        self._answer(self._router.recv_multipart())
                except Exception:
                    self.counters.failures += 1
                    self._log_once("socket", f"{self.path}: the socket failed; going on")
                    time.sleep(_AFTER_SOCKET_ERROR_S)
        finally:
            self._router.close(linger=0)
            self._woken.close(linger=0)

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != _ID_BYTES:
            self.counters.malformed += 1  # without an id there is nobody to tell
            return
        peer, request_id, payload = frames
        reply = self._reply(payload)
        if int.from_bytes(request_id, "little") == _NO_REPLY:
            return
        if isinstance(reply, Future):
            reply.add_done_callback(partial(self._defer, peer, request_id))
        else:
            self._router.send_multipart([peer, request_id, reply])

    def _defer(self, peer: bytes, request_id: bytes, answer: Future[msgspec.Struct]) -> None:
        """On whatever thread has made the answer."""
        try:
            reply = msgspec.msgpack.encode(answer.result())
        except BaseException as error:
            self.counters.failures += 1
            logger.debug("%s: an answer failed", self.path, exc_info=error)
            reply = _failure(type(error).__name__, str(error))
        self._deferred.put([peer, request_id, reply])

    def _reply(self, payload: bytes) -> bytes | Future[msgspec.Struct]:
        try:
            request = self._decoder.decode(payload)
        except (
            Exception
        ) as error:  # msgspec's own errors, and UnicodeDecodeError or RecursionError of crafted bytes
            self.counters.malformed += 1
            return _failure("Malformed", f"the request has no agreed form ({error}); {_SAME_VERSION}")
        self.counters.requests += 1
        try:
            answer = self._handlers[type(request)](request)
            return answer if isinstance(answer, Future) else msgspec.msgpack.encode(answer)
        except Exception as error:
            self.counters.failures += 1
            name = type(request).__name__
            self._log_once(
                f"{name} {type(error).__name__}", f"{self.path}: {name} failed; answered as a failure"
            )
            return _failure(type(error).__name__, str(error))

    def _log_once(self, kind: str, text: str) -> None:
        """Logs the exception that is handled now, with its traceback the first time that this kind is met."""
        key = (self.path.name, kind)
        if key in self._logged:
            logger.debug(text, exc_info=True)
        else:
            self._logged.add(key)
            logger.exception(text)


def _failure(code: str, text: str) -> bytes:
    return msgspec.msgpack.encode(Failure(code, text[:_MAX_FAILURE_CHARS]))


class Client:
    """Sends requests to one server. For one thread at a time.

    It may be made before the server is there and outlives the server's restarts. Nothing is kept for a server
    that is away: a message that cannot be sent now fails. An answer that comes after its deadline is dropped
    by its id and never taken for the answer to a later request.

    Args:
        path: the server's socket.
        context: to share one I/O thread between clients; its owner ends it. One of its own if None.

    Raises:
        IpcError: the path is too long.
    """

    def __init__(self, path: str | Path, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self.path = checked_path(path)
        self.late_replies = 0
        self._ids = itertools.count(_NO_REPLY + 1)
        self._context = zmq.Context() if context is None else context
        self._owns_context = context is None
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.connect(f"ipc://{self.path}")

    def request(self, message: msgspec.Struct, reply: type[ReplyT], timeout_s: float) -> ReplyT:
        """Sends and waits for the answer.

        Raises:
            UnreachableError, NoAnswerError, RemoteError, BadMessageError.
        """
        deadline = time.monotonic() + timeout_s
        return self.receive(self.send(message, deadline), reply, deadline)

    def send(self, message: msgspec.Struct, deadline: float, *, reply: bool = True) -> int:
        """Sends; returns the id to `receive` the answer with (0 without `reply`).

        Waits (until `deadline` on the monotonic clock) only while the connection to a server that is there is
        being made.

        Raises:
            UnreachableError, NoAnswerError, BadMessageError.
        """
        request_id = next(self._ids) if reply else _NO_REPLY
        frames = pack_request(request_id, message)
        if not self._try_send(frames):
            if not is_served(self.path):
                raise UnreachableError(f"{self.path} is not served; its process is gone or not yet there")
            if not self._poll(zmq.POLLOUT, deadline) or not self._try_send(frames):
                raise NoAnswerError(f"{self.path} took no message within the deadline")
        return request_id

    def post(self, message: msgspec.Struct, *, reply: bool = False) -> int | None:
        """Sends if that is possible at once; the id (0 without `reply`), or None if it was not possible."""
        request_id = next(self._ids) if reply else _NO_REPLY
        return request_id if self._try_send(pack_request(request_id, message)) else None

    def receive(self, request_id: int, reply: type[ReplyT], deadline: float) -> ReplyT:
        """The answer to a request that was sent. Answers to others are dropped.

        Raises:
            NoAnswerError, RemoteError, BadMessageError.
        """
        wanted = request_id.to_bytes(_ID_BYTES, "little")
        while self._poll(zmq.POLLIN, deadline):
            frames = self._socket.recv_multipart()
            if frames[0] == wanted:
                return unpack_reply(frames, reply)
            self.late_replies += 1
        raise NoAnswerError(f"{self.path} did not answer within the deadline")

    def close(self) -> None:
        self._socket.close(linger=0)
        if self._owns_context:
            self._context.term()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try_send(self, frames: list[bytes]) -> bool:
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
            return True
        return False

    def _poll(self, event: int, deadline: float) -> bool:
        left_ms = max(0.0, deadline - time.monotonic()) * 1000
        # Rounded up: a poll of 0 ms near the deadline would spin.
        return bool(self._socket.poll(int(left_ms) + (left_ms % 1 > 0), event))
