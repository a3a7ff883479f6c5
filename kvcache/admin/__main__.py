# SPDX-License-Identifier: Apache-2.0
"""Starts the admin sidecar: `python -m kvcache.admin`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import uvicorn

from kvcache.admin.app import create_app
from kvcache.admin.service import Settings
from kvcache.bearer import TokenFile
from kvcache.config import CONFIG_FILE_ENV
from kvcache.ipc import IpcError, checked_path

logger = logging.getLogger("kvcache.admin")

ENV_PREFIX = "KVCACHE_ADMIN_"
_STOP_TIMEOUT_S = 5
_MAX_CONNECTIONS = 256
"""At a time; more are answered 503, so that whoever floods the sidecar does not take the pod's memory."""


def rank_count(text: str) -> int:
    """At least 1. The function's name stands in argparse's messages."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} was read; give at least 1")
    return count


def port_number(text: str) -> int:
    """0 to 65535. The function's name stands in argparse's messages."""
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} was read; give 0 (any free one) to 65535")
    return port


def server_url(text: str) -> str:
    """Of a server: scheme, host, and maybe a port and a path. The name stands in argparse's messages."""
    example = "such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} was read ({error}); give one {example}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise argparse.ArgumentTypeError(f"{text!r} was read; give scheme, host and port, {example}")
    if parts.username is not None or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} was read; leave out user, query and fragment, {example}")
    return text


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    def env(name: str) -> str | None:
        return environ.get(ENV_PREFIX + name) or None

    parser = argparse.ArgumentParser(
        prog="kvcache.admin",
        description="Statistics, metrics, readiness and flushes of one vLLM with its KV cache, over HTTP.",
        epilog=f"Each option can come from the environment: --vllm-url as {ENV_PREFIX}VLLM_URL.",
    )
    add = parser.add_argument
    add("--runtime-dir", default=env("RUNTIME_DIR") or "/run/kvcache", help="folder of the sockets")
    add("--host", default=env("HOST") or "127.0.0.1", help="address to listen on")
    add(
        "--port",
        type=port_number,
        default=env("PORT") or "8081",
        help="port to listen on; 0 for any free one",
    )
    add("--token-file", default=env("TOKEN_FILE"), help="file with the token that clients must send")
    add(
        "--vllm-url",
        type=server_url,
        default=env("VLLM_URL"),
        help="vLLM's server, for flushes of the gpu tier",
    )
    add(
        "--config-file",
        default=environ.get(CONFIG_FILE_ENV) or None,
        help=f"the mounted configuration, handed to vLLM when it changes; also from {CONFIG_FILE_ENV}",
    )
    add("--expected-ranks", type=rank_count, default=env("EXPECTED_RANKS"), help="ranks that must be ready")
    return parser


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens on the address.

    Raises:
        OSError: the name does not resolve, or the address cannot be had.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Serves until a signal ends it. Returns 1 if the address cannot be had; exits with 2 for bad options."""
    parser = _parser(environ)
    options = parser.parse_args(arguments)
    settings = Settings(
        options.runtime_dir,
        options.token_file,
        options.vllm_url,
        options.expected_ranks,
        config_file=options.config_file,
    )
    try:
        checked_path(f"{options.runtime_dir}/control.scheduler.sock")
    except IpcError as error:
        parser.error(f"argument --runtime-dir: {error}")
    # uvicorn stops by itself and raises the signal again afterwards; that must not look like a crash.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        listener = _bound(options.host, options.port)
    except OSError as error:
        print(
            f"kvcache.admin: cannot listen on {options.host} port {options.port} ({error.strerror}); "
            "choose another address with --host and --port",
            file=sys.stderr,
        )
        return 1
    token_file = TokenFile(options.token_file)
    if token_file.token() is None:
        logger.warning("%s Until then every route that needs the token answers 503.", token_file.problem)
    with listener:
        host, port = listener.getsockname()[:2]
        print(f"kvcache.admin listens on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        uvicorn.Server(
            uvicorn.Config(
                create_app(settings),
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                timeout_graceful_shutdown=_STOP_TIMEOUT_S,
                limit_concurrency=_MAX_CONNECTIONS,
            )
        ).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
