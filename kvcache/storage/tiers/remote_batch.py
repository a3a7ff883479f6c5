# SPDX-License-Identifier: Apache-2.0
"""The machinery of a remote tier: batches that end at their deadline, threads, and an alarm clock."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcache.storage.tiers.remote_client import Read

logger = logging.getLogger("vllm.kvcache")

A = TypeVar("A")
T = TypeVar("T")


@dataclass(eq=False)
class Part:
    """What one thread does of a batch, at one place."""

    place: str
    silence_s: float
    """A place from which nothing came for so long when the deadline passes is to blame for it."""
    started: float | None = None
    ended: bool = False


class Batch(Generic[A]):
    """The answers to one call: given out when all parts have ended, or at the deadline with what is there.

    Args:
        answers: one for each object, until a better one comes.
        reads: closed before the answers are given out.
    """

    def __init__(self, answers: Sequence[A], reads: Sequence[Read] = ()) -> None:
        self.future: Future[list[A]] = Future()
        self.future.set_running_or_notify_cancel()
        self.parts: list[Part] = []
        self._answers = list(answers)
        self._reads = reads
        self._lock = threading.Lock()
        self._open = True

    @property
    def open(self) -> bool:
        return self._open

    def answer(self, index: int, value: A) -> None:
        self._answers[index] = value

    def part(self, place: str, silence_s: float) -> Part:
        """One more part, which must end; made before the last of the others ends."""
        self.parts.append(Part(place, silence_s))
        return self.parts[-1]

    def end(self, part: Part) -> None:
        part.ended = True
        if all(other.ended for other in self.parts):
            self.close()

    def close(self) -> bool:
        """Gives out the answers; False if that was done before."""
        with self._lock:
            if not self._open:
                return False
            self._open = False
        for read in self._reads:
            read.close()
        self._reads = ()
        self.future.set_result(list(self._answers))
        return True


class Source(Iterator[T]):
    """Items that several threads take, in order.

    Args:
        items: all of them.
        go_on: asked before each item is handed out, with the item; False ends it for this taker.
    """

    def __init__(
        self, items: Sequence[T], lock: threading.Lock, position: list[int], go_on: Callable[[T], bool]
    ):
        self._items = items
        self._lock = lock
        self._position = position
        self._go_on = go_on

    @classmethod
    def shared(cls, items: Sequence[T]) -> Callable[[Callable[[T], bool]], Source[T]]:
        """A maker of sources that share the items."""
        lock, position = threading.Lock(), [0]
        return lambda go_on: cls(items, lock, position, go_on)

    def __next__(self) -> T:
        with self._lock:
            at = self._position[0]
            if at >= len(self._items) or not self._go_on(self._items[at]):
                raise StopIteration
            self._position[0] = at + 1
            return self._items[at]


class Workers:
    """Some threads that run tasks in order.

    They are daemons, which `concurrent.futures` has not: a client that hangs in native code must not keep the
    process from ending.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Of closed workers, the caller runs it."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._tasks.put(task)
        if closed:
            task()

    def close(self, timeout_s: float) -> bool:
        """Waits at most so long for what was submitted; whether all threads have ended."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._tasks.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException:  # a panic of a native client is no Exception
                logger.exception("KV cache: a thread of a remote tier met an error of its own")
            del task  # it may hold memory of a batch


class AlarmClock:
    """Runs short callbacks at given times of `time.monotonic`, on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._alarms: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()
        self._running = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def at(self, when: float, callback: Callable[[], object]) -> None:
        with self._changed:
            heapq.heappush(self._alarms, (when, next(self._count), callback))
            self._changed.notify()

    def close(self) -> None:
        """Runs what is left at once."""
        with self._changed:
            self._running = False
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._running:
                    wait = self._alarms[0][0] - time.monotonic() if self._alarms else None
                    if wait is not None and wait <= 0:
                        break
                    self._changed.wait(wait)
                if not self._alarms:
                    return
                callback = heapq.heappop(self._alarms)[2]
            try:
                callback()
            except Exception:
                logger.exception("KV cache: a deadline of a remote tier met an error of its own")
            del callback
