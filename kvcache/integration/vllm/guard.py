# SPDX-License-Identifier: Apache-2.0
"""Hooks do not throw: one guard around every hook keeps the cache from taking vLLM down.

An exception in a hook costs cache use, never a request: it is counted by its type, logged once for each hook
and type with its traceback, and the hook answers with its neutral value.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

logger = logging.getLogger("vllm.kvcache")

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class Guard:
    """Counts what hooks caught; one for each connector."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self._logged: set[tuple[str, type[BaseException]]] = set()

    def caught(self, hook: str, error: Exception) -> None:
        """Counts the error, and logs it the first time that this hook meets its type."""
        self.failures[type(error).__name__] += 1
        if (hook, type(error)) not in self._logged:
            self._logged.add((hook, type(error)))
            logger.exception(
                "KV cache: %s failed (%s); vLLM goes on without the cache there", hook, error, exc_info=error
            )


def guarded(
    neutral: Callable[[], Any], on_error: str | None = None
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorates a hook of an object that has a `guard`.

    Args:
        neutral: makes the value that stands for "the cache has nothing to say".
        on_error: name of a method that is called with the hook's arguments to leave the object in a safe
            state, such as marking what was to be loaded as failed.
    """

    def decorate(hook: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(hook)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                owner: Any = self
                owner.guard.caught(hook.__name__, error)
                if on_error is not None:
                    getattr(owner, on_error)(*args, **kwargs)
                answer: R = neutral()
                return answer

        return call

    return decorate
