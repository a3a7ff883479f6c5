# SPDX-License-Identifier: Apache-2.0
"""Which server of Valkey has a key, and the connections to it: one server, one that sentinels name, or a
cluster.

All connections are of the `valkey` client's pools: TLS, ACL user and password are its affair. The password's
file is read for each new connection, so that a new password counts at once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from valkey.cluster import parse_cluster_slots
from valkey.connection import Connection, ConnectionPool, SSLConnection
from valkey.crc import VALKEY_CLUSTER_HASH_SLOTS, key_slot
from valkey.credentials import CredentialProvider
from valkey.exceptions import AuthenticationError, ValkeyError
from valkey.exceptions import ConnectionError as ValkeyConnectionError

from kvcache.config.tiers import TlsConfig, ValkeyConfig
from kvcache.storage.tiers.valkey_wire import ReplyParser, Wire

READ_BYTES = 32 << 10
"""Of a connection's buffer for lines; what of a value comes along is copied, the rest goes past it."""
MAX_PASSWORD_BYTES = 4096
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""Seconds, seconds, times: an idle connection that somebody on the way forgot is found before it is used."""

Address = tuple[str, int]


class PasswordFile(CredentialProvider):
    """User and password of a new connection."""

    def __init__(self, username: str | None, path: str | None) -> None:
        self._username = username
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Raises AuthenticationError: the file cannot be read or holds no password."""
        password = "" if self._path is None else self._read(Path(self._path))
        return (password,) if self._username is None else (self._username, password)

    def _read(self, path: Path) -> str:
        try:
            with path.open("rb") as file:
                data = file.read(MAX_PASSWORD_BYTES + 1)
            password = data.decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise AuthenticationError(f"password_file {path} cannot be read ({error})") from None
        if not password or len(data) > MAX_PASSWORD_BYTES:
            raise AuthenticationError(
                f"password_file {path} is empty or has more than {MAX_PASSWORD_BYTES} bytes; write the "
                "password alone into it"
            )
        return password


class Pools:
    """A pool of connections for each address."""

    def __init__(self, config: ValkeyConfig, connect_s: float, password_file: str | None) -> None:
        self._options = _options(config, connect_s, password_file)
        self._class = Connection if config.tls is None else SSLConnection
        self._lock = threading.Lock()
        self._pools: dict[Address, ConnectionPool] = {}
        self._closed = False

    def get(self, address: Address) -> ConnectionPool:
        """Raises valkey.exceptions.ConnectionError: these pools were closed."""
        with self._lock:
            if self._closed:
                raise ValkeyConnectionError("the tier was closed")
            pool = self._pools.get(address)
            if pool is None:
                host, port = address
                pool = ConnectionPool(connection_class=self._class, host=host, port=port, **self._options)
                self._pools[address] = pool
            return pool

    def drop(self, address: Address) -> None:
        """Ends idle connections to the address."""
        with self._lock:
            pool = self._pools.get(address)
        if pool is not None:
            pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Wakes who waits on a connection."""
        with self._lock:
            self._closed = True
            pools = list(self._pools.values())
        for pool in pools:
            for connection in [*pool._in_use_connections, *pool._available_connections]:
                # Not `disconnect`, which takes the socket away under a thread that uses it.
                sock = connection._sock
                if sock is not None:
                    _shut(sock)


class Routes(ABC):
    """Where keys are. A place is a text; its server may change."""

    @abstractmethod
    def place_of(self, key: bytes) -> str: ...
    @abstractmethod
    def places(self) -> Sequence[str]: ...

    @abstractmethod
    def pool(self, place: str, due: float) -> ConnectionPool:
        """May ask around. Raises ValkeyError."""

    @abstractmethod
    def lost(self, place: str) -> None:
        """The place's server did not answer, or is no longer the one to write to."""

    @abstractmethod
    def refresh(self, due: float) -> None:
        """Asks again who has what, where that changes unasked. Raises ValkeyError."""

    @abstractmethod
    def close(self) -> None: ...


class SingleRoute(Routes):
    """One server."""

    def __init__(self, config: ValkeyConfig, connect_s: float) -> None:
        self._place = config.endpoints[0]
        self._address = address_of(self._place)
        self._pools = Pools(config, connect_s, config.password_file)

    def place_of(self, key: bytes) -> str:
        return self._place

    def places(self) -> Sequence[str]:
        return (self._place,)

    def pool(self, place: str, due: float) -> ConnectionPool:
        return self._pools.get(self._address)

    def lost(self, place: str) -> None:
        self._pools.drop(self._address)

    def refresh(self, due: float) -> None:
        pass

    def close(self) -> None:
        self._pools.close()


class SentinelRoute(Routes):
    """The server that the sentinels name; asked again when it is lost."""

    def __init__(self, config: ValkeyConfig, connect_s: float) -> None:
        self._master = config.sentinel_master or ""
        self._place = f"{self._master} of the sentinels {', '.join(config.endpoints)}"
        self._sentinels = [address_of(endpoint) for endpoint in config.endpoints]
        self._pools = Pools(config, connect_s, config.password_file)
        asking = config.model_copy(update={"username": None, "database": 0})
        self._sentinel_pools = Pools(asking, connect_s, config.sentinel_password_file)
        self._address: Address | None = None

    def place_of(self, key: bytes) -> str:
        return self._place

    def places(self) -> Sequence[str]:
        return (self._place,)

    def pool(self, place: str, due: float) -> ConnectionPool:
        address = self._address
        if address is None:
            address = self._address = self._discover(due)
        return self._pools.get(address)

    def lost(self, place: str) -> None:
        address, self._address = self._address, None
        if address is not None:
            self._pools.drop(address)

    def refresh(self, due: float) -> None:
        pass  # `lost` has seen to it

    def _discover(self, due: float) -> Address:
        def ask(wire: Wire) -> Address | None:
            words = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._master.encode())
            reply = wire.checked(wire.ask([words])[0])
            return (reply[0].decode(), int(reply[1])) if isinstance(reply, list) and len(reply) == 2 else None

        address: Address | None = first_answer(self._sentinel_pools, self._sentinels, due, ask)
        if address is None:
            raise ValkeyConnectionError(
                f"no sentinel knows a server named {self._master}; see sentinel_master"
            )
        return address

    def close(self) -> None:
        self._pools.close()
        self._sentinel_pools.close()


class ClusterRoute(Routes):
    """The nodes of a cluster by their slots. Before the first answer, all keys are at one place that stands
    for the configured nodes.
    """

    REFRESH_S = 1.0
    """A node that sends many keys elsewhere is believed once."""

    def __init__(self, config: ValkeyConfig, connect_s: float) -> None:
        self._seeds = [address_of(endpoint) for endpoint in config.endpoints]
        self._unknown = f"cluster of {', '.join(config.endpoints)}"
        self._pools = Pools(config, connect_s, config.password_file)
        self._slots: list[str] = [self._unknown] * VALKEY_CLUSTER_HASH_SLOTS
        self._addresses: dict[str, Address] = {}
        self._refreshed = float("-inf")

    def place_of(self, key: bytes) -> str:
        return self._slots[key_slot(key)]

    def places(self) -> Sequence[str]:
        return tuple(self._addresses) or (self._unknown,)

    def pool(self, place: str, due: float) -> ConnectionPool:
        if place not in self._addresses:
            self.refresh(due)
        address = self._addresses.get(place)
        if address is None:  # any node answers a ping
            address = next(iter(self._addresses.values()))
        return self._pools.get(address)

    def lost(self, place: str) -> None:
        address = self._addresses.get(place)
        if address is not None:
            self._pools.drop(address)

    def refresh(self, due: float) -> None:
        if time.monotonic() - self._refreshed < self.REFRESH_S and self._addresses:
            return
        known = [*self._addresses.values(), *self._seeds]

        def ask(wire: Wire) -> Any:
            return wire.checked(wire.ask([(b"CLUSTER", b"SLOTS")])[0]) or None

        for address in dict.fromkeys(known):
            try:
                reply = first_answer(self._pools, [address], due, ask)
            except ValkeyError:
                if address == known[-1]:
                    raise
                continue
            if reply is not None:
                self._take(parse_cluster_slots(reply, current_host=address[0]))
                return
        raise ValkeyConnectionError(f"{self._unknown}: no node knows who has which slots; see `CLUSTER INFO`")

    def close(self) -> None:
        self._pools.close()

    def _take(self, ranges: dict[tuple[int, int], dict[str, Any]]) -> None:
        slots = [self._unknown] * VALKEY_CLUSTER_HASH_SLOTS
        addresses: dict[str, Address] = {}
        for (first, last), servers in ranges.items():
            host, port = servers["primary"]
            place = f"{host}:{port}"
            addresses[place] = (host, port)
            slots[first : last + 1] = [place] * (last + 1 - first)
        self._slots, self._addresses, self._refreshed = slots, addresses, time.monotonic()


def make_routes(config: ValkeyConfig, connect_s: float) -> Routes:
    """`connect_s`: for a connection, and for each answer while it is being set up."""
    if config.mode == "Sentinel":
        return SentinelRoute(config, connect_s)
    return ClusterRoute(config, connect_s) if config.mode == "Cluster" else SingleRoute(config, connect_s)


def first_answer(
    pools: Pools, addresses: Sequence[Address], due: float, ask: Callable[[Wire], Any]
) -> Any | None:
    """Of the first server that answers with something.

    Raises:
        ValkeyError: the last server's, if none answered at all.
    """
    error: ValkeyError | None = None
    heard = False
    for address in addresses:
        try:
            pool = pools.get(address)
            connection = pool.get_connection("")
            try:
                answer = ask(Wire(connection, due))
            except BaseException:
                connection.disconnect()
                raise
            finally:
                pool.release(connection)
        except ValkeyError as problem:
            error = problem
        except OSError as problem:
            error = ValkeyConnectionError(f"{address[0]}:{address[1]}: {problem or 'no answer in time'}")
        else:
            heard = True
            if answer is not None:
                return answer
    if error is not None and not heard:
        raise error
    return None


def address_of(endpoint: str) -> Address:
    """Of `host:port` or `[IPv6]:port`."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def _options(config: ValkeyConfig, connect_s: float, password_file: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "db": config.database,
        "parser_class": ReplyParser,
        "socket_read_size": READ_BYTES,
        "socket_connect_timeout": connect_s,
        "socket_timeout": connect_s,
        "socket_keepalive": True,
        "socket_keepalive_options": _KEEPALIVE,
        "client_name": "kvcache",
        "lib_name": None,  # two more round trips that older servers refuse
        "lib_version": None,
    }
    if config.username is not None or password_file is not None:
        options["credential_provider"] = PasswordFile(config.username, password_file)
    return options | (_tls_options(config.tls) if config.tls is not None else {})


def _tls_options(tls: TlsConfig) -> dict[str, Any]:
    return {
        "ssl_ca_certs": tls.ca_file,
        "ssl_certfile": tls.cert_file,
        "ssl_keyfile": tls.key_file,
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
    }


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
