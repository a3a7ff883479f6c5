# SPDX-License-Identifier: Apache-2.0
"""Loads that start while their step is still being planned, where scheduler and worker are one process.

Between the allocation of a prompt's blocks and the worker's hooks vLLM takes the prompt over: 5 ms for 32,768
tokens, in which the link could bring a sixteenth of them. Without parallelism vLLM does both in one thread,
so that the scheduler's side may call its only rank at once.

Not where vLLM has other connectors too: one may learn only in a step's first hooks that it is to read a page
which others have been given since.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Protocol

from kvcache.integration.vllm.metadata import ReqMeta


class LoadsAhead(Protocol):
    """The rank, as the scheduler's side sees it."""

    def load_ahead(self, session: str, step: int, request: ReqMeta) -> None:
        """Starts a load whose step's metadata will name it in the same words.

        Args:
            session: of the scheduler's lookups.
            step: number of the step that is being planned.
            request: with a load that the step waits for, and the blocks that were allocated to it.
        """
        ...


_ranks: weakref.WeakValueDictionary[tuple[Path, int], LoadsAhead] = weakref.WeakValueDictionary()
"""By the cache's runtime folder and the process that has it, which a fork is not."""


def announce(runtime_dir: Path, rank: LoadsAhead) -> None:
    """This process has the only rank of the vLLM with this runtime folder. Good for as long as it lives."""
    _ranks[runtime_dir, os.getpid()] = rank


def load_ahead(runtime_dir: Path, session: str, step: int, request: ReqMeta) -> None:
    """Starts the load if the rank is in this process; else it starts with its step."""
    rank = _ranks.get((runtime_dir, os.getpid()))
    if rank is not None:
        rank.load_ahead(session, step, request)
