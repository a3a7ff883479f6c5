# SPDX-License-Identifier: Apache-2.0
"""Engines for the tests on a real vLLM."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm.engines import Engine, Reference, Tokens

# Scheduler and worker in the test's process, so that both halves of the connector are within reach.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


class Log(logging.Filter):
    """What the connector logged, a line a record. A filter, since vLLM takes handlers off when it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.text += record.getMessage() + "\n"
        return True


StartEngine = Callable[..., Engine]
MakePrompt = Callable[[int], Tokens]


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> Iterator[Reference]:
    """The tiny model on a vLLM without the connector."""
    plain = Reference(tiny_model)
    yield plain
    plain.close()


@pytest.fixture(scope="session")
def make_prompt() -> MakePrompt:
    """Token ids that no prompt before shares a prefix with, the same ones in every run."""
    dice = random.Random(20_24)
    return lambda length: [dice.randrange(3, 330) for _ in range(length)]


@pytest.fixture
def log() -> Iterator[Log]:
    """Of the connector, whatever vLLM does to the loggers above it."""
    logger, seen = logging.getLogger("vllm.kvcache"), Log()
    logger.addFilter(seen)
    yield seen
    logger.removeFilter(seen)


@pytest.fixture
def start_engine(tiny_model: Path, reference: Reference) -> Iterator[StartEngine]:
    """Starts a vLLM with the connector; it ends with the test."""
    started: list[Engine] = []

    def start(extra: dict[str, Any] | None = None, model: Path = tiny_model, **arguments: Any) -> Engine:
        started.append(Engine(model, extra or {}, **arguments))
        return started[-1]

    yield start
    for engine in started:
        engine.close()
