# SPDX-License-Identifier: Apache-2.0
"""The rank's end of the lookup: answers which chunks are stored and leases them to the request that asks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvcache.ipc import Done, Server, ServerCounters
from kvcache.lookup.wire import (
    DIGEST_BYTES,
    Hello,
    LookupReply,
    LookupRequest,
    Progress,
    ProgressReply,
    Release,
    lease_owner,
    socket_path,
)

logger = logging.getLogger(__name__)


class LookupBackend(Protocol):
    """What the server asks of the engine. Called on the server's thread, or on that of a scheduler in this
    process."""

    def lookup(self, request: LookupRequest, owner: str) -> LookupReply:
        """Leases to `owner` what is stored of the chunks, from the first on without a gap, and begins to
        fetch what is stored in slower tiers. Answers at once.

        Args:
            request: a whole number of hashes.
            owner: `<session>/<lookup id>`. Asked again, it holds what it held and what is new.
        """
        ...

    def progress(self, owner: str) -> LookupReply:
        """How far the owner's lookup is."""
        ...

    def release(self, owner: str) -> None:
        """Ends the owner's lookup and leases. An owner without any is no error."""
        ...

    def release_session(self, prefix: str) -> None:
        """Ends the leases of all owners whose name starts with `prefix`."""
        ...


class StaleSessionError(Exception):
    """A lookup of a scheduler that another one has taken the place of."""


_served_here: dict[Path, tuple[int, LookupServer]] = {}
"""Socket to the process that made its server, which a fork is not, and the server."""


def served_here(path: Path) -> LookupServer | None:
    """The server behind a socket if this process has it."""
    pid, server = _served_here.get(path, (0, None))
    return server if pid == os.getpid() else None


class LookupServer:
    """Serves one rank's lookups until it is closed.

    One session is served at a time: a `Hello` with another one ends the leases of the session before. A
    server that was restarted takes the session of the first message.

    Raises:
        IpcError: the socket cannot be opened; the text says why.
    """

    def __init__(self, runtime_dir: str | Path, rank: int, backend: LookupBackend) -> None:
        self._backend = backend
        self._session: str | None = None
        self._handlers: dict[type[Any], Callable[[Any], msgspec.Struct]] = {
            Hello: self._hello,
            LookupRequest: self._lookup,
            Progress: self._progress,
            Release: self._release,
        }
        self._server = Server(socket_path(runtime_dir, rank), self._handlers)
        _served_here[self.path] = (os.getpid(), self)

    @property
    def path(self) -> Path:
        return self._server.path

    @property
    def counters(self) -> ServerCounters:
        return self._server.counters

    def close(self) -> None:
        """Ends the thread and removes the socket. Leases stay: they end with the engine."""
        if _served_here.get(self.path, (0, None))[1] is self:
            del _served_here[self.path]
        self._server.close()

    def answer(self, message: msgspec.Struct) -> msgspec.Struct:
        """What the socket would answer, on the caller's thread. Raises what its handler raises."""
        self.counters.requests += 1
        return self._handlers[type(message)](message)

    def __enter__(self) -> LookupServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hello(self, message: Hello) -> Done:
        before, self._session = self._session, message.session
        if before not in (None, message.session):
            logger.info("%s: session %s follows %s, whose leases end", self.path, message.session, before)
            self._backend.release_session(lease_owner(str(before), ""))
        return Done()

    def _lookup(self, message: LookupRequest) -> LookupReply:
        if self._session is None:
            self._session = message.session
        if message.session != self._session:
            raise StaleSessionError(
                f"session {message.session} was read, {self._session} is served; "
                "give each vLLM a runtime_dir of its own"
            )
        count, rest = divmod(len(message.hashes), DIGEST_BYTES)
        if rest:
            raise ValueError(f"{len(message.hashes)} bytes of hashes were read; send {DIGEST_BYTES} a chunk")
        owner = lease_owner(message.session, message.lookup_id)
        reply = self._backend.lookup(message, owner)
        if not reply.chunks <= reply.most <= count:
            self._backend.release(owner)
            raise ValueError(
                f"the backend found {reply.chunks} and perhaps {reply.most} of {count} chunks; it must say 0 "
                f"to {count}, and no less for what may be"
            )
        return reply

    def _progress(self, message: Progress) -> ProgressReply:
        owners = [lease_owner(message.session, lookup_id) for lookup_id in message.lookup_ids]
        return ProgressReply([self._backend.progress(owner) for owner in owners])

    def _release(self, message: Release) -> Done:
        for lookup_id in message.lookup_ids:
            self._backend.release(lease_owner(message.session, lookup_id))
        return Done()
