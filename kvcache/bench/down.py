# SPDX-License-Identifier: Apache-2.0
"""What a remote tier costs a real vLLM while its server is down.

Two engines in processes of their own, one with the remote tier and one without, answer the same new prompts
in turn, now the one first and now the other, so that what else the machine does meets both. A server of
Valkey or Redis is there at first; then it is stopped (it hangs: connections are taken and nothing is
answered), set free, and killed (it refuses). The first request after that may cost the deadline; those that
follow count.

This module is also what the child processes run: `python -m kvcache.bench.down SETUP`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Any

from kvcache.bench.engines import MARK, OURS, Engine, Setup, emit, wait_for
from kvcache.bench.remote import free_port, valkey_server

DEADLINE_MS = 1000
OUTPUT_TOKENS = 8
_WARM_UP = 3
_STEADY_S = 2.0
"""From the fault to the requests that count: the first ones, which may wait, are over."""


@dataclasses.dataclass(frozen=True)
class DownResult:
    """Of one fault. Seconds are of a whole request."""

    fault: str
    """`none`, `hangs` or `refuses`."""
    state: str
    """Of the tier, at the end."""
    deadline_s: float
    first_extra_s: float
    """Of the first request after the fault began, over the median without the tier."""
    requests: int
    with_s: float
    without_s: float
    """Medians."""
    ratio: float
    """With the tier to without: the geometric mean of two medians, that of the pairs in which the one comes
    first and that of the others, since the second of a pair finds other caches than the first."""
    low: float
    high: float
    """Quartiles of the pairs' ratios."""
    quick_ratio: float
    """Of the lower quartiles of both: what else the machine does only adds to a time."""


class _Child:
    """An engine in a process of its own."""

    def __init__(self, setup: Setup) -> None:
        command = [sys.executable, "-m", "kvcache.bench.down", json.dumps(dataclasses.asdict(setup))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def answer(self, prompt: Sequence[int]) -> tuple[float, str, list[int]]:
        """Seconds, the remote tier's state, and the tokens of an answer.

        Raises:
            RuntimeError: the engine has ended.
        """
        wire, lines = self._wire(self._process.stdin), self._wire(self._process.stdout)
        wire.write(json.dumps(list(prompt)) + "\n")
        wire.flush()
        for line in lines:
            if line.startswith(MARK):
                found = json.loads(line.removeprefix(MARK))
                return found["seconds"], found["state"], found["tokens"]
        raise RuntimeError("an engine has ended; its log above says why")

    def close(self) -> None:
        self._wire(self._process.stdin).close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @staticmethod
    def _wire(pipe: IO[str] | None) -> IO[str]:
        if pipe is None:
            raise RuntimeError("the engine's process has no pipe")
        return pipe


def down_results(model: str, *, tokens: int = 512, rounds: int = 40) -> Iterator[DownResult]:
    """Results with the server there, hanging and refusing.

    Args:
        model: folder.
        tokens: of a prompt.
        rounds: pairs of requests for each fault.

    Raises:
        ValueError: there is no server to start.
        RuntimeError: an engine ended, the engines' answers differ, or the fault was not noticed.
    """
    dice = random.Random(11)  # noqa: S311
    port = free_port()
    plain = Setup(OURS, model, "cpu", tokens + 64, cache_gib=0.5, dummy_weights=False)
    remote = {"valkey": {"endpoints": [f"127.0.0.1:{port}"]}, "deadline_ms": DEADLINE_MS}
    with ExitStack() as stack:
        server = stack.enter_context(valkey_server(port))
        ours = _Child(dataclasses.replace(plain, tiers={"remote": remote}))
        stack.callback(ours.close)
        without = _Child(plain)
        stack.callback(without.close)

        def prompt() -> list[int]:
            return [dice.randrange(3, 330) for _ in range(tokens)]

        for _ in range(_WARM_UP):
            for child in (ours, without):
                child.answer(prompt())

        def resume() -> None:
            server.send_signal(signal.SIGCONT)
            if not wait_for(lambda: ours.answer(prompt()[:64])[1] == "Ready", timeout_s=90.0):
                raise RuntimeError("the tier did not come back with its server within 90 s")

        def hang() -> None:
            server.send_signal(signal.SIGSTOP)
            stack.callback(server.send_signal, signal.SIGCONT)

        def kill() -> None:
            server.kill()
            server.wait()

        faults: list[tuple[str, Callable[[], None], Callable[[], None] | None]] = [
            ("none", lambda: None, None),
            ("hangs", hang, resume),
            ("refuses", kill, None),
        ]
        for fault, begin, end in faults:
            begin()
            yield _measure(fault, ours, without, prompt, rounds)
            if end is not None:
                end()


def _measure(
    fault: str, ours: _Child, without: _Child, prompt: Callable[[], list[int]], rounds: int
) -> DownResult:
    first = ours.answer(prompt())[0]
    until = time.monotonic() + _STEADY_S
    while time.monotonic() < until:
        ours.answer(prompt())
    pairs: list[tuple[float, float]] = []
    state = ""
    for number in range(rounds):
        asked, seconds, answers = prompt(), [0.0, 0.0], []
        for at in (0, 1) if number % 2 else (1, 0):
            seconds[at], seen, answer = (ours, without)[at].answer(asked)
            state = state if at else seen
            answers.append(answer)
        if answers[0] != answers[1]:
            raise RuntimeError(f"{fault}: with the tier the answer is another than without")
        pairs.append((seconds[0], seconds[1]))
    if (state == "Ready") != (fault == "none"):
        raise RuntimeError(f"{fault}: the tier's state is {state}; the server is not what it should be")
    ratios = [a / b for a, b in pairs]
    low, _, high = statistics.quantiles(ratios, n=4)
    base = statistics.median(b for _, b in pairs)
    quick = [statistics.quantiles(side, n=4)[0] for side in zip(*pairs, strict=True)]
    return DownResult(
        fault,
        state,
        DEADLINE_MS / 1000,
        first - base,
        rounds,
        statistics.median(a for a, _ in pairs),
        base,
        statistics.geometric_mean(statistics.median(ratios[first::2]) for first in (0, 1)),
        low,
        high,
        quick[0] / quick[1],
    )


def _serve(engine: Engine) -> None:
    """Answers each line of standard input, a prompt's tokens, by a line of figures."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    for line in sys.stdin:
        seconds, tokens, _ = engine.run(json.loads(line), OUTPUT_TOKENS)
        tiers = connector._impl.stats().tiers
        emit(seconds=seconds, tokens=tokens, state=tiers[1].state if len(tiers) > 1 else "")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    _serve(Engine(Setup(**json.loads(sys.argv[1])), seed=7))
