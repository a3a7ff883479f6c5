# SPDX-License-Identifier: Apache-2.0
"""The pages after a hit against those after the cold prefill of the same prompt, bit for bit, in a real vLLM.

Dummy weights answer alike whatever the KV holds, so that answers prove nothing there; pages do.

    python -m tests.gpu.pages --model FOLDER --dummy-weights [--graphs] [--beside N] [--mode ours]
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch

from kvcache.bench.engines import LAYERWISE, LMCACHE, NATIVE, OURS, Engine, Setup


def _core(engine: Engine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core


def _caches(engine: Engine) -> list[tuple[torch.Tensor, int]]:
    """Each layer's pages and the axis of their blocks."""
    worker = _core(engine).model_executor.driver_worker
    caches = getattr(worker, "worker", worker).model_runner.kv_caches
    total = _core(engine).vllm_config.cache_config.num_gpu_blocks
    return [(cache, next(axis for axis, size in enumerate(cache.shape) if size == total)) for cache in caches]


def _pages(engine: Engine, blocks: list[int]) -> list[torch.Tensor]:
    """A copy of the blocks' pages: uint8 [blocks, bytes], a tensor a layer."""
    pages = []
    for cache, axis in _caches(engine):
        held = cache.index_select(axis, torch.tensor(blocks, device=cache.device))
        pages.append(held.movedim(axis, 0).reshape(len(blocks), -1).view(torch.uint8))
    return pages


def _poison(engine: Engine) -> None:
    """Overwrites every page: freed ones still hold what they held, and may be given out again."""
    for cache, _ in _caches(engine):
        cache.fill_(-3.0)


def _first_token(engine: Engine, name: str, prompt: list[int]) -> tuple[list[torch.Tensor], int, float]:
    """Steps until the request has its first token: its pages then, prompt tokens cached, and seconds."""
    core = engine.llm.llm_engine
    started = time.perf_counter()
    core.add_request(name, {"prompt_token_ids": list(prompt)}, engine.params(4))
    while core.has_unfinished_requests():
        for output in core.step():
            if output.request_id.startswith(name) and output.outputs and output.outputs[0].token_ids:
                seconds = time.perf_counter() - started
                scheduler = _core(engine).scheduler
                request = next(key for key in scheduler.requests if key.startswith(name))
                blocks = scheduler.kv_cache_manager.get_block_ids(request)[0]
                size = _core(engine).vllm_config.cache_config.block_size
                whole = (len(prompt) - 1) // size
                return _pages(engine, list(blocks[:whole])), int(output.num_cached_tokens or 0), seconds
    raise RuntimeError(f"{name} ended without a token")


def _drain(engine: Engine) -> None:
    core = engine.llm.llm_engine
    while core.has_unfinished_requests():
        core.step()


def _forget(engine: Engine) -> None:
    """Steps until blocks that stores still read are free, then drops vLLM's own cache."""
    deadline = time.monotonic() + 10
    while not engine.llm.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise RuntimeError("vLLM did not drop its own prefix cache within 10 s")
        engine.llm.llm_engine.step()
        time.sleep(0.01)


def compare(engine: Engine, tokens: int, beside: int, number: int) -> bool:
    """One prompt, cold and as a hit beside `beside` decoding requests; whether the pages are equal."""
    prompt = engine.prompt(tokens)
    cold, _, cold_s = _first_token(engine, f"cold{number}-", prompt)
    _drain(engine)
    time.sleep(1.0)
    _forget(engine)
    _poison(engine)
    core = engine.llm.llm_engine
    for other in range(beside):
        core.add_request(
            f"other{number}-{other}", {"prompt_token_ids": engine.prompt(200)}, engine.params(400)
        )
    for _ in range(20 if beside else 0):
        core.step()
    hit, cached, hit_s = _first_token(engine, f"hit{number}-", prompt)
    _drain(engine)
    equal = torch.stack([(one == two).all(dim=1) for one, two in zip(cold, hit, strict=True)])
    print(  # noqa: T201
        f"{tokens} tokens beside {beside}: cached {cached}, {int(equal.all(dim=1).sum())} of {len(equal)} "
        f"layers equal, {int(equal.all(dim=0).sum())} of {equal.shape[1]} blocks, "
        f"first token {1e3 * cold_s:.1f} ms cold, {1e3 * hit_s:.1f} ms hit",
        flush=True,
    )
    return bool(equal.all()) and cached > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dummy-weights", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--graphs", action="store_true", help="full CUDA graphs for decoding steps")
    parser.add_argument("--mode", choices=(OURS, LAYERWISE, NATIVE, LMCACHE), default=OURS)
    parser.add_argument("--beside", type=int, default=0, help="requests that decode meanwhile")
    parser.add_argument("--tokens", default="777,2048,32768")
    parser.add_argument("--cache-gib", type=float, default=16.0)
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    lengths = [int(number) for number in options.tokens.split(",")]
    setup = Setup(
        mode=options.mode,
        model=options.model,
        device=options.device,
        max_model_len=max(lengths) + 64,
        cache_gib=options.cache_gib,
        dummy_weights=options.dummy_weights,
        graphs=options.graphs,
        engine={"gpu_memory_utilization": 0.6, "max_num_batched_tokens": 8192}
        if options.device == "cuda"
        else {},
    )
    engine = Engine(setup, seed=11)
    right = [compare(engine, tokens, options.beside, number) for number, tokens in enumerate(lengths)]
    return 0 if all(right) else 1


if __name__ == "__main__":
    raise SystemExit(main())
