# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that cannot say which one they took."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One on 127.0.0.1 that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
