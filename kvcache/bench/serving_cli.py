# SPDX-License-Identifier: Apache-2.0
"""Options and tables of the serving benches."""

from __future__ import annotations

import argparse
from typing import Any

from kvcache.bench.engines import GPU_HIT, LAYERWISE, LMCACHE, NATIVE, OURS, PLAIN, Setup
from kvcache.bench.serving import compare

_MODES = {
    "ttft": [GPU_HIT, OURS, LAYERWISE, NATIVE, LMCACHE],
    "miss": [PLAIN, OURS, NATIVE, LMCACHE],
    "interfere": [PLAIN, OURS, NATIVE],
    "multiturn": [PLAIN, OURS, NATIVE, LMCACHE],
}
_COLUMNS = {
    "ttft": "mode tokens cold_ms hit_ms own_hit_ms to_own quartiles cached equal",
    "miss": "mode tokens tokens_per_s low high",
    "interfere": "mode tokens alone_p50_ms beside_p50_ms growth growth_low growth_high beside_max_ms "
    "hit_ttft_ms",
    "multiturn": "mode turn tokens ttft_ms low_ms high_ms cached",
}
_HELP = {
    "ttft": "time to first token, cold and as a hit",
    "miss": "throughput of prompts never seen again",
    "interfere": "requests that decode while a long hit comes back",
    "multiturn": "conversations that grow, more than vLLM's own cache holds",
}
_TOKENS = {"ttft": "2048,8192,32768", "miss": "4096", "interfere": "32768", "multiturn": "1024"}
_REQUESTS = {"miss": 48, "multiturn": 8}
SERVING = tuple(_HELP)
_GPU_BLOCK, _CPU_BLOCK = 16, 128
"""Tokens of a block where nothing else is asked of vLLM."""


def add_parsers(
    parsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> list[argparse.ArgumentParser]:
    """Adds the serving benches to the command line."""
    made = []
    for name, text in _HELP.items():
        parser = parsers.add_parser(name, help=text)
        parser.add_argument("--model", required=True, help="folder of the model")
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
        parser.add_argument(
            "--dummy-weights", action="store_true", help="the folder holds a configuration alone"
        )
        parser.add_argument("--modes", default=",".join(_MODES[name]), help="default: %(default)s")
        parser.add_argument("--tokens", default=_TOKENS[name])
        parser.add_argument("--requests", type=int, default=_REQUESTS.get(name, 16))
        parser.add_argument("--output", type=int, default=128, help="tokens a request generates")
        if name == "multiturn":
            parser.add_argument("--turns", type=int, default=5)
        parser.add_argument("--repetitions", type=int, default=3)
        parser.add_argument("--cache-gib", type=float, default=24.0)
        parser.add_argument(
            "--block-size", type=int, help="tokens of vLLM's blocks; vLLM's own choice if left out"
        )
        parser.add_argument(
            "--compression", choices=("None", "Lossless"), default="None", help="of the mode ours"
        )
        parser.add_argument("--gpu-memory", type=float, default=0.6, help="vLLM's gpu_memory_utilization")
        made.append(parser)
    return made


def run(options: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Runs the bench that the options name; its rows and their columns. Prints each row as it comes."""
    tokens = [int(number) for number in options.tokens.split(",")]
    on_gpu = options.device == "cuda"
    turns = options.turns if options.what == "multiturn" else 1
    longest = turns * (max(tokens) + options.output)
    arguments: dict[str, Any] = {}
    if on_gpu:
        arguments |= {"gpu_memory_utilization": options.gpu_memory, "max_num_batched_tokens": 8192}
    if options.block_size:
        arguments["block_size"] = options.block_size
    if turns > 1:
        # Room for half of the conversations, and for each of them.
        room = max(longest + 256, options.requests * longest // 2)
        block_size = options.block_size or (_GPU_BLOCK if on_gpu else _CPU_BLOCK)
        arguments["num_gpu_blocks_override"] = -(-room // block_size)
    setups = [
        Setup(
            mode=mode,
            model=options.model,
            device=options.device,
            max_model_len=longest + 64,
            cache_gib=options.cache_gib,
            dummy_weights=options.dummy_weights,
            graphs=on_gpu and options.what not in ("ttft", "multiturn"),
            engine=arguments,
            compression=options.compression,
        )
        for mode in options.modes.split(",")
    ]
    chosen = {
        "tokens": tokens,
        "repetitions": options.repetitions,
        "requests": options.requests,
        "output": options.output,
        "turns": turns,
    }
    columns = _COLUMNS[options.what]
    print(columns.replace(" ", "\t"), flush=True)  # noqa: T201
    rows = []
    for row in compare(options.what, setups, chosen):
        rows.append(row)
        if "ways" in row:
            print(f"  ways: {'; '.join(row['ways'])}", flush=True)  # noqa: T201
            continue
        print("\t".join(str(row.get(name, "")) for name in columns.split()), flush=True)  # noqa: T201
        for trouble in ("left_out", "failed"):
            if trouble in row:
                print(f"  {trouble}: {row[trouble]}", flush=True)  # noqa: T201
    return rows, columns
