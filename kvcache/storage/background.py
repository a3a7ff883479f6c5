# SPDX-License-Identifier: Apache-2.0
"""A thread for what must not hold up those who ask for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger("vllm.kvcache")

RunSoon = Callable[[Callable[[], None]], None]
"""Has a function called from elsewhere, in order."""


class Background:
    """Runs functions one after the other. Thread-safe; the thread starts with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def run_soon(self, work: Callable[[], None]) -> None:
        """Not run any more after `close`."""
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._work.put(work)

    def close(self, timeout_s: float) -> bool:
        """Ends the thread when what it runs is done; False if that takes longer."""
        with self._lock:
            self._closed = True
        if self._thread is None:
            return True
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._closed:
                continue
            try:
                work()
            except Exception:
                logger.exception("KV cache: %s failed", self._name)
