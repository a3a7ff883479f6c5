# SPDX-License-Identifier: Apache-2.0
"""The tier in Mooncake Store, a distributed store in the memory of many machines: one object a chunk, under
`kvcache/NAMESPACE/CHUNKHASH-RANK-GROUP`.

The store's own client (`mooncake-transfer-engine`, or its variant for the machine's accelerator) lives in
this process; give it memory to share by `segment`, or let processes of the store do that. Its calls have no
deadline: one that the master leaves without an answer keeps its thread, and only that; whoever waits is told
in time. What leaves when memory is short is the store's decision. `ttl_s` has no meaning here.

The client can neither list objects nor spare pinned ones: clearing by namespace or tenant, and inspecting,
need `admin_endpoint`, the master's HTTP port (`metrics_port`).
"""

from __future__ import annotations

import http.client
import importlib
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any

from kvcache.config.tiers import MooncakeConfig, RemoteTierConfig
from kvcache.storage.object_format import HEADER_BYTES
from kvcache.storage.tier import PutOutcome, TierContext
from kvcache.storage.tiers.remote import RemoteTier
from kvcache.storage.tiers.remote_client import (
    FAILED,
    UNREACHABLE,
    DeadlineError,
    Listed,
    Load,
    Read,
    RemoteClient,
    RemoteError,
    Write,
)

PREFIX = "kvcache/"
PAGE = 500
MAX_LIST_BYTES = 256 << 20
"""Of the master's list of keys: two million of them."""

# Of the client's error codes, those that say more than that it failed.
NO_ROOM = (-200,)
EXISTS = -705
RPC_FAILED = -900


class MooncakeClient(RemoteClient):
    """A client of one store, which connects with the first ping.

    Args:
        config: of the store.
        time_s: for a connection to the master, and for a list of its objects.

    Raises:
        ValueError: the client's package cannot be loaded.
    """

    when_full = "give the store more memory: segment, or more of its own processes"

    def __init__(self, config: MooncakeConfig, time_s: float) -> None:
        self._module = _load()
        self._config = config
        self._time_s = time_s
        self._place = config.master
        self.where = f"mooncake master {config.master}"
        self._store: Any = None
        self._own_address = ""

    def place_of(self, name: str) -> str:
        return self._place

    def places(self) -> Sequence[str]:
        return (self._place,)

    def ping(self, place: str, due: float) -> None:
        if self._store is None:
            self._reach_master(due)
            self._store = self._set_up()
        if self.store.batch_is_exist([PREFIX + ".ping"])[0] < 0:
            raise RemoteError(UNREACHABLE, f"{self.where} does not answer; is it running there?")

    def sizes(self, place: str, names: Sequence[str], due: float) -> list[int | None]:
        keys = [PREFIX + name for name in names]
        store = self.store
        there = store.batch_is_exist(keys)
        if any(code < 0 for code in there):
            raise RemoteError(UNREACHABLE, f"{self.where} does not answer; is it running there?")
        found = [key for key, code in zip(keys, there, strict=True) if code == 1]
        replicas = store.batch_get_replica_desc(found) if found else {}
        return [_size(replicas.get(key, ())) for key in keys]

    def read(
        self, place: str, source: Iterator[Read], due: float, load: Load
    ) -> Generator[tuple[Read, bool], None, None]:
        store = self.store
        for read in source:
            handle = store.get_buffer(PREFIX + read.name)
            if time.monotonic() > due:
                raise DeadlineError(f"{self.where} did not give an object in time")
            found = False
            if handle is not None:
                # Into the client's own buffer first: its calls know no end, and the target has one.
                view = memoryview(handle)
                found = view.nbytes == read.num_bytes and read.fill(0, view) == read.num_bytes
                view.release()
                del handle  # its room in the client's buffer
            elif store.batch_is_exist([PREFIX + read.name])[0] != 0:
                text = f"{self.where} did not give an object that it has; look at the machine that holds it"
                raise RemoteError(FAILED, f"{text}, and at mooncake.buffer")
            yield read, found

    def write(
        self, place: str, source: Iterator[Write], time_s: float
    ) -> Generator[tuple[Write, PutOutcome], None, None]:
        store = self.store
        for write in source:
            code = store.put_parts(PREFIX + write.name, write.header, write.payload)
            if code == 0:
                outcome = PutOutcome.STORED
            elif code == EXISTS:
                outcome = PutOutcome.PRESENT
            elif code in NO_ROOM:
                outcome = PutOutcome.DECLINED
            else:
                raise self._error("a put", code)
            yield write, outcome

    def remove(self, place: str, names: Sequence[str], due: float) -> int:
        # By force: what was asked about lately is under a lease of the master's.
        codes = self.store.batch_remove([PREFIX + name for name in names], True)
        if any(code == RPC_FAILED for code in codes):
            raise self._error("a removal", RPC_FAILED)
        return sum(code == 0 for code in codes)

    def pages(self, place: str, namespace: str | None, step_s: float) -> Iterator[list[Listed]]:
        start = PREFIX + (namespace + "/" if namespace is not None else "")
        names = [key.removeprefix(PREFIX) for key in self._keys(step_s) if key.startswith(start)]
        for at in range(0, len(names), PAGE):
            page = names[at : at + PAGE]
            sizes = self.sizes(place, page, time.monotonic() + step_s)
            yield [Listed(name, size) for name, size in zip(page, sizes, strict=True) if size is not None]

    def headers(self, place: str, names: Sequence[str], due: float) -> list[bytes | None]:
        store = self.store
        found: list[bytes | None] = []
        for name in names:
            handle = store.get_buffer(PREFIX + name)
            found.append(None if handle is None else bytes(memoryview(handle)[:HEADER_BYTES]))
            del handle
        return found

    def close(self) -> None:
        """Nothing wakes its calls."""

    def release(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    @property
    def store(self) -> Any:
        """Mooncake's own client. Raises RemoteError before the first ping that was answered."""
        if self._store is None:
            raise RemoteError(UNREACHABLE, f"{self.where} has not answered yet")
        return self._store

    def _reach_master(self, due: float) -> None:
        """That it lives, not only its machine: the set-up holds Python's own lock, so that one which waits
        for a silent master would stop all that the process does. A master ends a connection on which
        something else than a call comes."""
        host, _, port = self._config.master.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), max(0.001, due - time.monotonic())) as sock:
                self._own_address = sock.getsockname()[0]
                sock.settimeout(max(0.001, due - time.monotonic()))
                with suppress(ConnectionResetError):
                    sock.sendall(bytes(64))
                    sock.recv(1)
        except OSError as error:
            text = f"{self.where}: {error or 'no answer in time'}; is it running there?"
            raise RemoteError(UNREACHABLE, text, missed=isinstance(error, TimeoutError)) from error

    def _set_up(self) -> Any:
        config = self._config
        store = self._module.MooncakeDistributedStore()
        code = store.setup(
            config.local_hostname or self._own_address,
            config.metadata_server,
            config.segment,
            config.buffer,
            config.protocol,
            config.device,
            config.master,
        )
        if code != 0:
            raise self._error("the set-up of its client", code)
        return store

    def _keys(self, time_s: float) -> list[str]:
        if self._config.admin_endpoint is None:
            text = (
                f"{self.where} lists its objects on its HTTP port alone; name it in mooncake.admin_endpoint"
            )
            raise RemoteError(FAILED, text)
        connection = http.client.HTTPConnection(self._config.admin_endpoint, timeout=time_s)
        try:
            connection.request("GET", "/get_all_keys")
            answer = connection.getresponse()
            text = answer.read(MAX_LIST_BYTES).decode()
            if answer.status != 200 or len(text) >= MAX_LIST_BYTES:
                raise ValueError(f"status {answer.status}, {len(text)} bytes")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise RemoteError(FAILED, f"{self.where}: no list from admin_endpoint: {error}") from error
        finally:
            connection.close()
        return text.split()

    def _error(self, what: str, code: int) -> RemoteError:
        reason = UNREACHABLE if code == RPC_FAILED else FAILED
        return RemoteError(reason, f"{self.where}: {what} failed with code {code}; see its log")


def open_mooncake(config: RemoteTierConfig, context: TierContext) -> RemoteTier:
    """The tier of a configuration that has `mooncake`. Waits for the master's first answer, one deadline at
    most; where none comes the tier is there all the same, and asks again.

    Raises:
        ValueError: the configuration has no `mooncake`, the client's package cannot be loaded, its buffer is
            too small, or the file of encryption keys is no good.
    """
    if config.mooncake is None:
        raise ValueError("open_mooncake: the configuration has no mooncake; open what it has")
    # Reads and writes of all connections at the same time, each with its own copy.
    needed = 2 * config.connections * (HEADER_BYTES + context.shape.chunk_bytes)
    if config.mooncake.buffer < needed:
        raise ValueError(
            f"mooncake.buffer is {config.mooncake.buffer} bytes; {config.connections} connections with "
            f"chunks of {context.shape.chunk_bytes} bytes need {needed}: write more, or fewer connections"
        )
    deadline_s = config.deadline_ms / 1000
    return RemoteTier(
        "remote",
        MooncakeClient(config.mooncake, deadline_s),
        context,
        deadline_s=deadline_s,
        connections=config.connections,
        write_queue_bytes=config.write_queue,
    )


def _load() -> Any:
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ValueError(
            f"mooncake: its client cannot be loaded ({error}); install mooncake-transfer-engine or the "
            "variant for this machine, and the libraries libibverbs1, libnuma1 and libcurl4"
        ) from error


def _size(replicas: Sequence[Any]) -> int | None:
    """Of an object whose first complete replica lies in memory."""
    for replica in replicas:
        if replica.status.name == "COMPLETE" and replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
    return None
