# SPDX-License-Identifier: Apache-2.0
"""A rank in the scheduler's own process (vLLM without parallelism): its lookup server is asked by a call.

A socket would hand each question from thread to thread, six times there and back, and wait each time for a
processor that the model's threads may hold: 0.15 ms on an idle machine, tens of them on a busy one.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TypeVar

import msgspec

from kvcache.ipc import BadMessageError, NoAnswerError, RemoteError, UnreachableError
from kvcache.lookup.server import served_here

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


class LocalClient:
    """As `kvcache.ipc.Client`, of a server in this process. Handlers run in the call; nothing is late."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids = itertools.count(1)
        self._answers: dict[int, msgspec.Struct | RemoteError] = {}

    def send(self, message: msgspec.Struct, deadline: float, *, reply: bool = True) -> int:
        """Raises UnreachableError where the server is closed."""
        server = served_here(self._path)
        if server is None:
            raise UnreachableError(f"{self._path} is not served any more")
        answer: msgspec.Struct | RemoteError
        try:
            answer = server.answer(message)
        except Exception as error:
            answer = RemoteError(type(error).__name__, str(error))
        request_id = next(self._ids)
        if reply:
            self._answers[request_id] = answer
        return request_id

    def post(self, message: msgspec.Struct, *, reply: bool = False) -> int | None:
        try:
            return self.send(message, 0.0, reply=reply)
        except UnreachableError:
            return None

    def receive(self, request_id: int, reply: type[ReplyT], deadline: float) -> ReplyT:
        """Raises NoAnswerError, RemoteError or BadMessageError."""
        answer = self._answers.pop(request_id, None)
        if answer is None:
            raise NoAnswerError(f"{self._path} was not asked this")
        if isinstance(answer, RemoteError):
            raise answer
        if not isinstance(answer, reply):
            raise BadMessageError(f"{type(answer).__name__} is no {reply.__name__}")
        return answer

    def close(self) -> None:
        self._answers.clear()
