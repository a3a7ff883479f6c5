# SPDX-License-Identifier: Apache-2.0
"""The pages after a hit against those after the cold prefill of the same prompt, bit for bit, in a real vLLM.

Dummy weights answer alike whatever the KV holds, so that answers prove nothing there; pages do.

    python -m tests.gpu.pages --model FOLDER --dummy-weights [--graphs] [--beside N] [--mode ours]
        [--compression Lossless] [--tensor-parallel N] [--pipeline-parallel N]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from kvcache.bench.engines import LAYERWISE, LMCACHE, NATIVE, OURS, Engine, Setup


def _core(engine: Engine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core


def _on_each_rank(engine: Engine, what: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls `what(worker, vLLM's blocks, *arguments)` in each rank's process; what they return, by rank."""
    total = _core(engine).vllm_config.cache_config.num_gpu_blocks
    return list(_core(engine).model_executor.collective_rpc(what, args=(total, *arguments)))


def _caches(worker: Any, total: int) -> list[tuple[torch.Tensor, int]]:
    """The pages of each of the rank's layers and the axis of their blocks."""
    caches = getattr(worker, "worker", worker).model_runner.kv_caches
    return [(cache, next(axis for axis, size in enumerate(cache.shape) if size == total)) for cache in caches]


def _keep(worker: Any, total: int, blocks: list[int]) -> None:
    """Keeps a copy of the blocks' pages: uint8 [blocks, bytes], a tensor a layer."""
    kept = []
    for cache, axis in _caches(worker, total):
        held = cache.index_select(axis, torch.tensor(blocks, device=cache.device))
        kept.append(held.movedim(axis, 0).reshape(len(blocks), -1).view(torch.uint8))
    worker.kept_pages = [*getattr(worker, "kept_pages", []), kept]


def _equal(worker: Any, _: int, blocks: int) -> list[list[bool]]:
    """Whether the first pages of the two copies are equal, by layer and block; the copies are let go of."""
    one, two = worker.kept_pages
    worker.kept_pages = []
    return [(a[:blocks] == b[:blocks]).all(dim=1).tolist() for a, b in zip(one, two, strict=True)]


def _poison(worker: Any, total: int) -> None:
    """Overwrites every page: freed ones still hold what they held, and may be given out again."""
    for cache, _ in _caches(worker, total):
        cache.fill_(-3.0)


def _first_token(engine: Engine, name: str, prompt: list[int]) -> tuple[int, float]:
    """Steps until the request has its first token and keeps its pages: prompt tokens cached, and seconds."""
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
                _on_each_rank(engine, _keep, list(blocks[:whole]))
                return int(output.num_cached_tokens or 0), seconds
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
    """One prompt, cold and as a hit beside `beside` decoding requests; whether what came back is equal.

    What was not given back is computed once more, in batches of other sizes, and may differ by rounding.
    """
    prompt = engine.prompt(tokens)
    _, cold_s = _first_token(engine, f"cold{number}-", prompt)
    _drain(engine)
    time.sleep(1.0)
    _forget(engine)
    _on_each_rank(engine, _poison)
    core = engine.llm.llm_engine
    for other in range(beside):
        core.add_request(
            f"other{number}-{other}", {"prompt_token_ids": engine.prompt(200)}, engine.params(400)
        )
    for _ in range(20 if beside else 0):
        core.step()
    cached, hit_s = _first_token(engine, f"hit{number}-", prompt)
    _drain(engine)
    ranks = _on_each_rank(engine, _equal, cached // _core(engine).vllm_config.cache_config.block_size)
    equal = torch.tensor([layer for rank in ranks for layer in rank])
    print(  # noqa: T201
        f"{tokens} tokens beside {beside}: cached {cached}, {int(equal.all(dim=1).sum())} of {len(equal)} "
        f"layers of {len(ranks)} ranks equal, {int(equal.all(dim=0).sum())} of {equal.shape[1]} blocks, "
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
    parser.add_argument("--compression", choices=("None", "Lossless"), default="None")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--tokens", default="777,2048,32768")
    parser.add_argument("--cache-gib", type=float, default=16.0)
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    lengths = [int(number) for number in options.tokens.split(",")]
    arguments: dict[str, Any] = {
        "tensor_parallel_size": options.tensor_parallel,
        "pipeline_parallel_size": options.pipeline_parallel,
    }
    if options.tensor_parallel * options.pipeline_parallel > 1:
        arguments["distributed_executor_backend"] = "mp"
    if options.compression != "None":
        arguments["dtype"] = "bfloat16"
    if options.device == "cuda":
        arguments |= {"gpu_memory_utilization": 0.6, "max_num_batched_tokens": 8192}
    setup = Setup(
        mode=options.mode,
        model=options.model,
        device=options.device,
        max_model_len=max(lengths) + 64,
        cache_gib=options.cache_gib,
        dummy_weights=options.dummy_weights,
        graphs=options.graphs,
        engine=arguments,
        compression=options.compression,
    )
    engine = Engine(setup, seed=11)
    right = [compare(engine, tokens, options.beside, number) for number, tokens in enumerate(lengths)]
    return 0 if all(right) else 1


if __name__ == "__main__":
    raise SystemExit(main())
