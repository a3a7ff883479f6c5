# SPDX-License-Identifier: Apache-2.0
"""The request and reply layer on real sockets."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.ipc import (
    MAX_MESSAGE_BYTES,
    BadMessageError,
    Client,
    Done,
    IpcError,
    NoAnswerError,
    RemoteError,
    Server,
    UnreachableError,
    is_served,
)


class Echo(msgspec.Struct, frozen=True, tag="echo"):
    data: bytes


class Nap(msgspec.Struct, frozen=True, tag="nap"):
    seconds: float


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    text: str


def _nap(message: Nap) -> Done:
    time.sleep(message.seconds)
    return Done()


def _fail(message: Fail) -> Done:
    raise OSError(message.text)


def echo_server(path: Path, max_bytes: int = MAX_MESSAGE_BYTES) -> Server:
    return Server(path, {Echo: lambda message: message, Nap: _nap, Fail: _fail}, max_bytes=max_bytes)


@pytest.fixture
def path(socket_dir: Path) -> Path:
    return socket_dir / "a.sock"


@pytest.fixture
def server(path: Path) -> Iterator[Server]:
    with echo_server(path) as server:
        yield server


@pytest.fixture
def client(path: Path) -> Iterator[Client]:
    with Client(path) as client:
        yield client


@pytest.fixture
def raw(server: Server) -> Iterator[zmq.Socket[bytes]]:
    """A peer that sends what it likes."""
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(f"ipc://{server.path}")
    yield raw
    context.destroy(linger=0)


def test_answers_of_every_size(server: Server, client: Client) -> None:
    for size in (0, 1, 127, 65_537, MAX_MESSAGE_BYTES - 64):
        data = os.urandom(size)
        assert client.request(Echo(data), Echo, 5).data == data
    assert server.counters.requests == 5


def test_a_message_that_is_too_large_is_not_sent(server: Server, client: Client) -> None:
    with pytest.raises(BadMessageError, match=f"send at most {MAX_MESSAGE_BYTES}"):
        client.request(Echo(bytes(MAX_MESSAGE_BYTES)), Echo, 5)
    assert client.request(Echo(b"x"), Echo, 5).data == b"x"


def test_a_peer_that_sends_too_much_does_not_reach_a_handler(path: Path, client: Client) -> None:
    with echo_server(path, max_bytes=1000) as server:
        with pytest.raises(NoAnswerError):
            client.request(Echo(bytes(2000)), Echo, 0.2)
        assert server.counters.requests == 0
        assert client.request(Echo(b"small"), Echo, 5).data == b"small"


def test_the_handlers_error_comes_back_and_the_server_goes_on(server: Server, client: Client) -> None:
    for text in ("disk is full", "y" * 10_000):
        with pytest.raises(RemoteError, match=f"OSError: {text[:5]}") as error:
            client.request(Fail(text), Done, 5)
        assert error.value.code == "OSError"
        assert len(str(error.value)) < 600
    assert client.request(Echo(b"x"), Echo, 5).data == b"x"
    assert server.counters.failures == 2


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(frames=st.lists(st.binary(max_size=40), min_size=1, max_size=5))
def test_no_frames_end_the_server(
    server: Server, client: Client, raw: zmq.Socket[bytes], frames: list[bytes]
) -> None:
    raw.send_multipart(frames)
    assert client.request(Echo(b"x"), Echo, 5).data == b"x"


def test_malformed_payloads_are_answered_and_counted(server: Server, raw: zmq.Socket[bytes]) -> None:
    deep = b"\x91" * 100_000
    unknown = msgspec.msgpack.encode({"type": "no such request"})
    bad_text = b"\x82\xa4type\xa4fail\xa4text\xa2\xff\xfe"
    wrong_field = msgspec.msgpack.encode({"type": "echo", "data": 7})
    payloads = [b"", b"\xc1", deep, unknown, bad_text, wrong_field]
    for number, payload in enumerate(payloads, start=1):
        raw.send_multipart([number.to_bytes(8, "little"), payload])
        assert raw.poll(5000)
        request_id, reply = raw.recv_multipart()
        assert request_id == number.to_bytes(8, "little")
        assert msgspec.msgpack.decode(reply)["code"] == "Malformed"
    assert server.counters.malformed == len(payloads)
    assert server.counters.requests == 0


def test_an_answer_of_another_type_is_refused(server: Server, client: Client) -> None:
    with pytest.raises(BadMessageError, match="no Done"):
        client.request(Echo(b"x"), Done, 5)


def test_a_late_answer_is_never_taken_for_a_later_request(server: Server, client: Client) -> None:
    first = client.send(Echo(b"first"), time.monotonic() + 5)
    with pytest.raises(NoAnswerError):
        client.request(Nap(0.3), Done, 0.05)
    assert client.request(Echo(b"second"), Echo, 5).data == b"second"
    assert client.late_replies == 2
    with pytest.raises(NoAnswerError):
        client.receive(first, Echo, time.monotonic())


def test_post_asks_for_no_reply_unless_told(server: Server, client: Client) -> None:
    client.request(Echo(b"connected"), Echo, 5)
    assert client.post(Echo(b"unanswered")) == 0
    wanted = client.post(Echo(b"answered"), reply=True)
    assert wanted
    assert client.receive(wanted, Echo, time.monotonic() + 5).data == b"answered"
    assert client.late_replies == 0
    assert server.counters.requests == 3


def test_nobody_there_is_known_at_once(client: Client) -> None:
    with pytest.raises(UnreachableError, match="not served"):
        client.request(Echo(b"x"), Echo, timeout_s=3600)
    assert client.post(Echo(b"x")) is None


def test_a_client_survives_restarts_and_loses_what_was_meant_for_the_old_server(
    path: Path, client: Client
) -> None:
    for _ in range(3):
        with echo_server(path) as server:
            assert client.request(Echo(b"x"), Echo, 5).data == b"x"
            assert server.counters.requests == 1
        with pytest.raises((UnreachableError, NoAnswerError)):  # the client may not have seen the end yet
            client.request(Echo(b"for nobody"), Echo, 0.2)


def test_close_ends_thread_and_socket_file_and_can_be_repeated(path: Path) -> None:
    server = echo_server(path)
    assert is_served(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server.close()
    server.close()
    assert not path.exists()
    assert "ipc a.sock" not in {thread.name for thread in threading.enumerate()}


def test_close_does_not_wait_for_a_handler_that_hangs(
    path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache.ipc._CLOSE_TIMEOUT_S", 0.05)
    server = echo_server(path)
    client.send(Nap(0.4), time.monotonic() + 5)
    time.sleep(0.1)
    server.close()
    assert not path.exists()
    with echo_server(path), Client(path) as other:
        assert other.request(Echo(b"x"), Echo, 5).data == b"x"


def test_the_folder_is_made_private(socket_dir: Path) -> None:
    with echo_server(socket_dir / "new" / "a.sock") as server:
        assert stat.S_IMODE(server.path.parent.stat().st_mode) == 0o700


def test_the_socket_file_of_a_killed_process_is_replaced(path: Path, client: Client) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    assert path.exists()
    assert not is_served(path)
    with echo_server(path):
        assert client.request(Echo(b"x"), Echo, 5).data == b"x"


def test_a_second_server_is_refused_and_the_first_one_stays(server: Server, client: Client) -> None:
    with pytest.raises(IpcError, match="served by another process"):
        echo_server(server.path)
    assert client.request(Echo(b"x"), Echo, 5).data == b"x"


def test_what_is_no_socket_is_not_removed(path: Path) -> None:
    path.mkdir()
    with pytest.raises(IpcError, match="cannot be bound"):
        echo_server(path)
    assert path.is_dir()


@pytest.mark.parametrize("length", [107, 108])
def test_the_longest_path(socket_dir: Path, length: int) -> None:

    path = socket_dir / ("n" * (length - len(str(socket_dir)) - 1))
    if length > 107:
        with pytest.raises(IpcError, match="at most 107 bytes, this one has 108"):
            echo_server(path)
        with pytest.raises(IpcError, match="at most 107 bytes"):
            Client(path)
    else:
        with echo_server(path), Client(path) as client:
            assert client.request(Echo(b"x"), Echo, 5).data == b"x"


def test_a_folder_that_cannot_be_made(socket_dir: Path) -> None:
    (socket_dir / "file").touch()
    with pytest.raises(IpcError, match="cannot be made"):
        echo_server(socket_dir / "file" / "a.sock")


_CHILD = """
import os, sys, time
import msgspec
from kvcache.ipc import Server

class Echo(msgspec.Struct, frozen=True, tag="echo"):
    data: bytes

if os.fork():  # the parent only waits: the import made nothing that a child could not use
    os.wait()
    sys.exit(0)
server = Server(sys.argv[1], {Echo: lambda message: message})
print(os.getpid(), flush=True)
time.sleep(3600)
"""


def test_a_server_in_a_forked_process_is_killed_and_comes_back(path: Path, client: Client) -> None:
    root = str(Path(__file__).parents[2])
    for _ in range(2):
        command = [sys.executable, "-c", _CHILD, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert client.request(Echo(b"x"), Echo, 10).data == b"x"
            os.kill(pid, signal.SIGKILL)
            parent.wait(10)
        assert path.exists()
        with pytest.raises((UnreachableError, NoAnswerError)):
            client.request(Echo(b"for nobody"), Echo, 0.2)


def test_a_deferred_answer_holds_up_nobody(socket_dir: Path) -> None:
    pending: list[Future[Done]] = []

    def defer(_: Nap) -> Future[Done]:
        pending.append(Future())
        return pending[-1]

    path = socket_dir / "s.sock"
    deadline = time.monotonic() + 30
    server = Server(path, {Nap: defer, Echo: lambda message: message})
    with server, Client(path) as waiting, Client(path) as other:
        late, failed = (waiting.send(Nap(0.0), deadline) for _ in range(2))
        while len(pending) < 2:
            time.sleep(0.001)
        assert other.request(Echo(b"meanwhile"), Echo, 10).data == b"meanwhile"
        threading.Timer(0.05, pending[0].set_result, [Done()]).start()
        waiting.receive(late, Done, deadline)
        pending[1].set_exception(ValueError("not today"))
        with pytest.raises(RemoteError, match="ValueError: not today"):
            waiting.receive(failed, Done, deadline)
        assert server.counters.failures == 1
        waiting.send(Nap(0.0), deadline)
        while len(pending) < 3:
            time.sleep(0.001)
    pending[2].set_result(Done())  # the server is gone, and nobody minds
