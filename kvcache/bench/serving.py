# SPDX-License-Identifier: Apache-2.0
"""Serving benches: what a hit saves, what a miss costs, and what a load does to others.

One process an engine, one after another, on prompts of the same lengths; medians of several repetitions, the
first left out. This module is also what the child processes run:
`python -m kvcache.bench.serving NAME SETUP OPTIONS`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvcache.bench.engines import GPU_HIT, LAYERWISE, MARK, OURS, PLAIN, Engine, Setup, available, emit
from kvcache.control.client import ControlClient
from kvcache.control.snapshot import Snapshot
from kvcache.stats import WayStats

_SETTLE_S = 1.0
"""For stores that run behind the request."""
_PAIRS = 5
"""Of hits of a prompt, one in vLLM's own cache and one of the cache under test."""


def ttft(engine: Engine, setup: Setup, options: dict[str, Any]) -> None:
    """Time to first token, cold and as a hit after vLLM forgot the prompt (`gpu-hit`: while it did not).

    Before each hit stands one in vLLM's own cache in the same process, without a pause: from process to
    process, and with what a machine did a moment ago, that alone differs by half.
    """
    for _ in range(2):
        engine.run(engine.prompt(min(1000, setup.max_model_len // 4)), 4)
    forgets = setup.mode not in (GPU_HIT, PLAIN)
    for tokens in options["tokens"]:
        cold, hits, owns, equal, cached = [], [], [], 0, 0
        for repetition in range(options["repetitions"] + 1):
            prompt = engine.prompt(tokens)
            cold_s, first, _ = engine.run(prompt)
            time.sleep(_SETTLE_S)
            pairs = []
            for _ in range(_PAIRS):
                own_s = engine.run(prompt)[0]
                if forgets:
                    engine.forget()
                hit_s, again, cached = engine.run(prompt)
                pairs.append((own_s, hit_s))
                equal += first == again
            if repetition:
                cold.append(cold_s)
                owns += [own for own, _ in pairs]
                hits += [hit for _, hit in pairs]
        ratios = [hit / own for hit, own in zip(hits, owns, strict=True)]
        low, to_own, high = statistics.quantiles(ratios, n=4)
        emit(
            tokens=tokens,
            cold_ms=_ms(cold),
            hit_ms=_ms(hits),
            own_hit_ms=_ms(owns),
            to_own=round(to_own, 3),
            quartiles=f"{low:.3f} to {high:.3f}",
            cached=cached,
            equal=equal == (options["repetitions"] + 1) * _PAIRS,
        )


def miss(engine: Engine, setup: Setup, options: dict[str, Any]) -> None:
    """Throughput of prompts never seen again: what a cache costs that never hits."""
    requests, tokens, output = options["requests"], options["tokens"][0], options["output"]
    seconds = []
    for _ in range(options["repetitions"] + 1):
        prompts = [{"prompt_token_ids": engine.prompt(tokens)} for _ in range(requests)]
        started = time.perf_counter()
        engine.llm.generate(prompts, engine.params(output), use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    rate = [requests * (tokens + output) / s for s in seconds[1:]]
    emit(
        tokens=tokens,
        tokens_per_s=round(statistics.median(rate)),
        low=round(min(rate)),
        high=round(max(rate)),
    )


def interfere(engine: Engine, setup: Setup, options: dict[str, Any]) -> None:
    """Requests that decode while one long hit comes back: gaps between their tokens, and its first token."""
    tokens, others = options["tokens"][0], options["requests"]
    rows = [_interfere_once(engine, tokens, others, f"r{n}") for n in range(options["repetitions"] + 1)][1:]
    names = ("alone_p50_ms", "beside_p50_ms", "beside_max_ms", "hit_ttft_ms")
    medians = {
        name: round(statistics.median(column), 2)
        for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }
    growth = sorted(beside / alone for alone, beside, _, _ in rows)
    emit(
        tokens=tokens,
        **medians,
        growth=round(statistics.median(growth), 3),
        growth_low=round(growth[0], 3),
        growth_high=round(growth[-1], 3),
    )


def _interfere_once(engine: Engine, tokens: int, others: int, name: str) -> tuple[float, float, float, float]:
    big = engine.prompt(tokens)
    _, expected, _ = engine.run(big)
    time.sleep(_SETTLE_S)
    engine.forget()
    core = engine.llm.llm_engine
    for number in range(others):
        core.add_request(f"{name}-{number}", {"prompt_token_ids": engine.prompt(512)}, engine.params(300))
    gaps: list[tuple[float, float]] = []
    last = added = first = 0.0
    steps = 0
    while core.has_unfinished_requests():
        outputs = core.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request_id == name and not first and output.outputs and output.outputs[0].token_ids:
                first = now
                if list(output.outputs[0].token_ids) != expected:
                    raise RuntimeError("the hit's answer differs from the cold one")
        if any(output.request_id != name for output in outputs):
            if last:
                gaps.append((now, now - last))
            last, steps = now, steps + 1
            if steps == 120:
                added = now
                core.add_request(name, {"prompt_token_ids": big}, engine.params(1))
    alone = [gap for at, gap in gaps[20:] if at < added]
    beside = [gap for at, gap in gaps if added <= at <= first + 0.02]
    return (
        1e3 * statistics.median(alone),
        1e3 * statistics.median(beside),
        1e3 * max(beside),
        1e3 * (first - added),
    )


def multiturn(engine: Engine, setup: Setup, options: dict[str, Any]) -> None:
    """Conversations that grow in turn, more of them than vLLM's own cache holds: time to first token and the
    share of the prompt that was cached, turn by turn."""
    conversations = [engine.prompt(options["tokens"][0]) for _ in range(options["requests"])]
    for turn in range(options["turns"]):
        first_s, shares = [], []
        engine.random.shuffle(conversations)
        for conversation in conversations:
            seconds, answer, cached = _first_token(engine, conversation, options["output"])
            first_s.append(seconds)
            shares.append(cached / len(conversation))
            conversation += answer + engine.prompt(options["tokens"][0])
        longest = len(conversations[0]) - options["tokens"][0]
        emit(
            tokens=longest,
            turn=turn,
            ttft_ms=_ms(first_s),
            low_ms=round(1e3 * min(first_s), 1),
            high_ms=round(1e3 * max(first_s), 1),
            cached=round(statistics.mean(shares), 3),
        )


def _first_token(engine: Engine, prompt: list[int], max_tokens: int) -> tuple[float, list[int], int]:
    """Seconds to the first token of a request that runs alone, all its tokens, and prompt tokens cached."""
    core = engine.llm.llm_engine
    started, first = time.perf_counter(), 0.0
    core.add_request(f"turn-{started}", {"prompt_token_ids": list(prompt)}, engine.params(max_tokens))
    output = None
    while core.has_unfinished_requests():
        for output in core.step():
            if not first and output.outputs and output.outputs[0].token_ids:
                first = time.perf_counter() - started
    if output is None:
        raise RuntimeError("a request ended without an output")
    return first, list(output.outputs[0].token_ids), int(output.num_cached_tokens or 0)


RUNS: dict[str, Callable[[Engine, Setup, dict[str, Any]], None]] = {
    "ttft": ttft,
    "miss": miss,
    "interfere": interfere,
    "multiturn": multiturn,
}


def compare(name: str, setups: Sequence[Setup], options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs a bench on one engine after another, each in a process of its own; its figures as they come.

    A mode that cannot run here yields its reason, one that fails the last lines that it printed. After its
    figures ours yields the `ways` by which its bytes went.
    """
    for setup in setups:
        reason = available(setup.mode, setup.device)
        if reason:
            yield {"mode": setup.mode, "left_out": reason}
            continue
        arguments = [name, json.dumps(dataclasses.asdict(setup)), json.dumps(options)]
        last, rows = deque[str](maxlen=40), 0
        with subprocess.Popen(
            [sys.executable, "-m", "kvcache.bench.serving", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as child:
            for line in child.stdout or ():
                # A progress bar may stand on the same line.
                before, mark, figures = line.partition(MARK)
                if mark:
                    rows += 1
                    yield {"mode": setup.mode, **json.loads(figures)}
                else:
                    last.append(before)
        if child.returncode or not rows:
            yield {"mode": setup.mode, "failed": "".join(last)[-2000:]}


def _ms(seconds: list[float]) -> float:
    return round(1e3 * statistics.median(seconds), 1)


def prove_hits(engine: Engine, setup: Setup) -> None:
    """A cache that gives nothing back has no figures.

    Raises:
        RuntimeError: a prompt that the cache has seen was computed again.
    """
    if setup.mode in (PLAIN, GPU_HIT):
        return
    prompt = engine.prompt(min(1000, setup.max_model_len // 2))
    engine.run(prompt)
    time.sleep(_SETTLE_S)
    engine.forget()
    if not engine.run(prompt)[2]:
        raise RuntimeError(f"{setup.mode} gave nothing of a prompt back; its log above says why")


def ways(setup: Setup) -> list[str]:
    """The ways that the first rank has chosen, in words; empty where it cannot be asked."""

    async def ask() -> Snapshot:
        client = ControlClient(setup.runtime_dir, expected_ranks=1)
        try:
            return await client.snapshot()
        finally:
            client.close()

    rank = asyncio.run(ask()).ranks.get(0)
    return [] if rank is None else [_in_words(way) for way in rank.ways]


def _in_words(way: WayStats) -> str:
    if not way.bytes_per_second:
        return f"{way.direction} {way.way}"
    rate, link = way.bytes_per_second / 1e9, way.link_bytes_per_second / 1e9
    return f"{way.direction} {way.way} {way.multiprocessors}, {rate:.1f} of {link:.1f} GB/s"


def _child(bench: str, setup: Setup, options: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="kvcache-bench-") as folder:
        setup = dataclasses.replace(setup, runtime_dir=folder)
        engine = Engine(setup, seed=7)
        prove_hits(engine, setup)
        RUNS[bench](engine, setup, options)
        if setup.mode in (OURS, LAYERWISE):
            emit(ways=ways(setup))


if __name__ == "__main__":
    bench_name, setup_json, options_json = sys.argv[1:]
    _child(bench_name, Setup(**json.loads(setup_json)), json.loads(options_json))
