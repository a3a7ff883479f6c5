# SPDX-License-Identifier: Apache-2.0
"""Several jobs in threads, one answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import TypeVar

logger = logging.getLogger("vllm.kvcache")

T = TypeVar("T")
R = TypeVar("R")

_logged: set[type[BaseException]] = set()


def gather(
    executor: Executor, jobs: Sequence[Callable[[], T]], finish: Callable[[list[T | None]], R]
) -> Future[R]:
    """Runs the jobs; the future holds what `finish` makes of their results, None for one that raised (it is
    logged) or that was not run since the executor is shut down. It cannot be cancelled.
    """
    answer: Future[R] = Future()
    answer.set_running_or_notify_cancel()
    results: list[T | None] = [None] * len(jobs)
    left = len(jobs)
    lock = threading.Lock()

    def ended() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            answer.set_result(finish(results))

    def done(position: int, future: Future[T]) -> None:
        if not future.cancelled():
            error = future.exception()
            if error is None:
                results[position] = future.result()
            else:
                _log(error)
        ended()

    if not jobs:
        answer.set_result(finish([]))
    for position, job in enumerate(jobs):
        try:
            future = executor.submit(job)
        except RuntimeError:  # it is shut down
            ended()
        else:
            future.add_done_callback(partial(done, position))
    return answer


def _log(error: BaseException) -> None:
    if type(error) not in _logged:
        _logged.add(type(error))
        logger.error("KV cache, disk tier: a job ended in an error", exc_info=error)
