# SPDX-License-Identifier: Apache-2.0
"""The parser of answers: whatever the pieces in which they come, and whatever else comes."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from valkey.exceptions import ConnectionError as ValkeyConnectionError
from valkey.exceptions import InvalidResponse, MovedError, OutOfMemoryError

from kvcache.storage.object_format import HEADER_BYTES
from kvcache.storage.tiers.remote_client import Expired, Read
from kvcache.storage.tiers.valkey_wire import LINE_BYTES, ReplyParser, packed
from tests.storage.disk_rigs import aligned

WORDS = st.binary(max_size=40)


@contextmanager
def parser_of(pieces: list[bytes], buffer: int = 256, end: bool = True) -> Iterator[ReplyParser]:
    """A parser whose server sends these pieces, and then goes away."""
    ours, theirs = socket.socketpair()
    parser = ReplyParser(buffer)
    parser.on_connect(SimpleNamespace(_sock=ours, socket_timeout=20.0))  # type: ignore[arg-type]

    def send() -> None:
        for piece in pieces:
            theirs.sendall(piece)
        if end:
            theirs.close()

    sender = threading.Thread(target=send)
    sender.start()
    yield parser
    ours.close()
    sender.join()
    theirs.close()


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def encoded(value: Any) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))


@given(
    st.lists(
        st.recursive(
            st.none() | st.integers(-(2**63), 2**63 - 1) | WORDS, lambda inner: st.lists(inner, max_size=4)
        ),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.integers(0, 1 << 20), max_size=6),
    st.integers(1, 300),
)
def test_answers_come_out_as_they_were(values: list[Any], cuts: list[int], buffer: int) -> None:
    with parser_of(split(b"".join(map(encoded, values)), cuts), buffer) as parser:
        assert [parser.read_response() for _ in values] == values


@given(st.data())
def test_values_go_to_their_place(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9000), min_size=1, max_size=4))
    objects = [data.draw(st.randoms(use_true_random=False)).randbytes(HEADER_BYTES + size) for size in sizes]
    stream = b"".join(encoded(value) for value in objects) + b"$-1\r\n" + encoded(b"short") + b"+OK\r\n"
    pieces = split(stream, data.draw(st.lists(st.integers(0, 1 << 20), max_size=6)))
    with parser_of(pieces, data.draw(st.integers(1, 6000))) as parser:
        for size, value in zip(sizes, objects, strict=True):
            memory = aligned(size + 2 * 4096)
            read = Read(0, "name", memory[4096 : 4096 + size])
            assert parser.read_into(read) is True
            assert bytes(read.header) + bytes(read.target) == value
            assert bytes(memory[:4096]) + bytes(memory[4096 + size :]) == bytes(2 * 4096)
        other = Read(0, "name", aligned(10))
        assert parser.read_into(other) is False  # none
        assert parser.read_into(other) is False  # of another size
        assert parser.read_response() == b"OK"


@pytest.mark.parametrize(
    "answer",
    [
        b"$x\r\n",
        b"$-2\r\n",
        b"*-7\r\n",
        b"%1\r\n",
        b"$5\r\nhello!!",
        b"$99999999999\r\n",
        b"*1048577\r\n",
        b":1:2\r\n",
        b"\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"-" + b"x" * (2 * LINE_BYTES),
    ],
)
def test_what_is_no_answer(answer: bytes) -> None:
    with parser_of([answer]) as parser, pytest.raises((InvalidResponse, ValkeyConnectionError)):
        parser.read_response()


@pytest.mark.parametrize("answer", [b":1\r\n", b"*1\r\n", b"+OK\r\n", b"$4097\r\n" + bytes(4097) + b"xx"])
def test_what_is_no_value(answer: bytes) -> None:
    with parser_of([answer]) as parser, pytest.raises(InvalidResponse):
        parser.read_into(Read(0, "name", aligned(1)))


def test_errors_of_the_server() -> None:
    with parser_of([b"-OOM no room\r\n-MOVED 7 h:1\r\n-LOADING wait\r\n"]) as parser:
        assert isinstance(parser.read_response(), OutOfMemoryError)
        assert isinstance(parser.read_into(Read(0, "name", aligned(1))), MovedError)
        with pytest.raises(ValkeyConnectionError):
            parser.read_response()


@given(st.integers(0, HEADER_BYTES + 4000))
def test_a_value_that_is_cut_off(length: int) -> None:
    value = encoded(bytes(HEADER_BYTES + 4000))[:length]
    with parser_of([value]) as parser, pytest.raises(ValkeyConnectionError):
        parser.read_into(Read(0, "name", aligned(4000)))


def test_the_deadline_is_of_the_whole_and_not_of_each_receive() -> None:
    ours, theirs = socket.socketpair()
    parser = ReplyParser(256)
    parser.on_connect(SimpleNamespace(_sock=ours, socket_timeout=20.0))  # type: ignore[arg-type]
    going = True

    def drip() -> None:
        theirs.sendall(b"$8096\r\n")
        while going:
            theirs.sendall(b"x")
            time.sleep(0.001)

    thread = threading.Thread(target=drip)
    thread.start()
    parser.due = time.monotonic() + 0.3
    with pytest.raises(TimeoutError):
        parser.read_into(Read(0, "name", aligned(4000)))
    going = False
    thread.join()
    ours.close()
    theirs.close()


def test_nothing_is_written_into_a_target_that_was_given_back() -> None:
    target = aligned(4000)
    read = Read(0, "name", target)
    with parser_of([encoded(b"y" * (HEADER_BYTES + 4000))]) as parser:
        read.close()
        with pytest.raises(Expired):
            parser.read_into(read)
    assert bytes(target) == bytes(4000)


def test_whether_something_came_unasked() -> None:
    with parser_of([], end=False) as parser:
        assert not parser.can_read(0)
    with parser_of([b"+x\r\n"], end=False) as parser:
        assert parser.can_read(5)
        assert parser.read_response() == b"x"
    with parser_of([]) as parser, pytest.raises(ValkeyConnectionError):
        parser.can_read(5)


@given(st.lists(WORDS, min_size=1, max_size=6))
def test_commands_are_packed_as_the_client_packs_them(words: list[bytes]) -> None:
    from valkey.connection import PythonRespSerializer

    if b" " in words[0]:  # the client takes the first word apart
        return
    theirs = b"".join(PythonRespSerializer(1 << 20, lambda word: word).pack(*words))
    assert packed(*words) == theirs
