# SPDX-License-Identifier: Apache-2.0
"""CUDA streams by their handles, and the marks that keep their order.

vLLM's thread puts copies in order while a request waits: torch's objects for streams and events take it tens
of microseconds each time.
"""

from __future__ import annotations

import torch

from kvcache import _native


def current_stream(device: int) -> int:
    """Handle of the stream that whatever this thread launches on the device is given to."""
    return torch._C._cuda_getCurrentRawStream(device)


def mark(device: int, stream: int) -> _native.Event:
    """An event behind what the stream was given so far."""
    event = _native.Event(device)
    event.record(stream)
    return event
