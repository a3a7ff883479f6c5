# SPDX-License-Identifier: Apache-2.0
"""Futures of tiers, put together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def done(value: A) -> Future[A]:
    """A future that is done."""
    future: Future[A] = Future()
    future.set_result(value)
    return future


def then(first: Future[A], follow: Callable[[A], Future[B]]) -> Future[B]:
    """Done as what `follow` begins once the first is done; failed if either fails."""
    result: Future[B] = Future()

    def begin(first: Future[A]) -> None:
        try:
            follow(first.result()).add_done_callback(end)
        except BaseException as error:
            result.set_exception(error)

    def end(second: Future[B]) -> None:
        try:
            result.set_result(second.result())
        except BaseException as error:
            result.set_exception(error)

    first.add_done_callback(begin)
    return result


def mapped(first: Future[A], convert: Callable[[A], B]) -> Future[B]:
    """Done with what `convert` makes of the first one's result; failed if either fails."""
    return then(first, lambda value: done(convert(value)))


def gathered(futures: Sequence[Future[A]], otherwise: Callable[[BaseException], A]) -> Future[list[A]]:
    """All results in order; `otherwise` stands in for one that failed."""
    result: Future[list[A]] = Future()
    values: dict[int, A] = {}
    lock = threading.Lock()

    def take(index: int, future: Future[A]) -> None:
        try:
            value = future.result()
        except BaseException as error:
            value = otherwise(error)
        with lock:
            values[index] = value
            last = len(values) == len(futures)
        if last:
            result.set_result([values[at] for at in range(len(futures))])

    if not futures:
        result.set_result([])
    for index, future in enumerate(futures):
        future.add_done_callback(partial(take, index))
    return result
