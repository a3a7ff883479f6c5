# SPDX-License-Identifier: Apache-2.0
"""The engines that the serving benches compare: plain vLLM, and vLLM with one KV cache or another."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

OURS = "ours"
LAYERWISE = "ours-layerwise"
NATIVE = "native"
LMCACHE = "lmcache"
PLAIN = "plain"
GPU_HIT = "gpu-hit"
"""Plain vLLM whose own prefix cache answers: the floor of any hit."""

_CHUNK_TOKENS = 256


@dataclass(frozen=True)
class Setup:
    """One engine of a comparison; travels to the process that runs it as JSON."""

    mode: str
    model: str
    device: str
    """`cuda` or `cpu`."""
    max_model_len: int
    cache_gib: float
    dummy_weights: bool
    graphs: bool = False
    """Full CUDA graphs for decoding steps; else eager."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vllm.LLM."""
    tiers: dict[str, Any] = field(default_factory=dict)
    """Of ours, below host memory."""
    compression: str = "None"
    """Of ours."""
    runtime_dir: str = ""
    """Of ours: where its processes can be asked; empty for the usual place."""


def available(mode: str, device: str) -> str:
    """Why the mode cannot run here; empty if it can."""
    if mode == LMCACHE and importlib.util.find_spec("lmcache") is None:
        return "lmcache is not installed"
    if mode in (LMCACHE, NATIVE) and device == "cpu":
        return "it needs a GPU"
    return ""


def connector_config(setup: Setup) -> dict[str, Any] | None:
    """vLLM's `kv_transfer_config` for the mode; None for plain vLLM."""
    capacity = int(setup.cache_gib * (1 << 30))
    if setup.mode in (OURS, LAYERWISE):
        return {
            "kv_connector": "LMCacheConnectorV1Dynamic",
            "kv_connector_module_path": "kvcache.integration.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "chunk_size": _CHUNK_TOKENS,
                "use_layerwise": setup.mode == LAYERWISE,
                "compression": setup.compression if setup.mode == OURS else "None",
                "tiers": {"cpu": {"capacity": str(capacity)}, **setup.tiers},
                **({"runtime_dir": setup.runtime_dir} if setup.runtime_dir else {}),
            },
        }
    if setup.mode == NATIVE:
        extra = {"cpu_bytes_to_use": capacity}
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    if setup.mode == LMCACHE:
        return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    return None


def _environment(setup: Setup) -> dict[str, str]:
    """Variables that must be set before vLLM is imported."""
    variables = {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0", "VLLM_NO_USAGE_STATS": "1"}
    variables["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
    if setup.device == "cpu":
        variables |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if setup.mode == LMCACHE:
        variables |= {
            "LMCACHE_CHUNK_SIZE": str(_CHUNK_TOKENS),
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": str(setup.cache_gib),
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_LOG_LEVEL": "ERROR",
        }
    return variables


class Engine:
    """A running vLLM and random prompts for it."""

    def __init__(self, setup: Setup, seed: int) -> None:
        os.environ.update(_environment(setup))
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        self._sampling = SamplingParams
        self.random = random.Random(seed)  # noqa: S311
        arguments: dict[str, Any] = {
            "model": setup.model,
            "skip_tokenizer_init": True,
            "max_model_len": setup.max_model_len,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "enforce_eager": not setup.graphs,
            **({"load_format": "dummy"} if setup.dummy_weights else {}),
            **({"dtype": "float32", "distributed_executor_backend": "uni"} if setup.device == "cpu" else {}),
            **setup.engine,
        }
        if setup.graphs:
            arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        config = connector_config(setup)
        if config is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**config)
        self.llm = LLM(**arguments)
        vocabulary = int(self.llm.llm_engine.model_config.get_vocab_size())
        self._tokens = range(min(1000, vocabulary // 2), vocabulary - 10)

    def prompt(self, tokens: int) -> list[int]:
        """Token ids that were never seen before, as good as surely."""
        return [self.random.choice(self._tokens) for _ in range(tokens)]

    def params(self, max_tokens: int) -> Any:
        return self._sampling(temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)

    def run(self, prompt: list[int], max_tokens: int = 1) -> tuple[float, list[int], int]:
        """Seconds, generated tokens and tokens that were cached."""
        started = time.perf_counter()
        output = self.llm.generate([{"prompt_token_ids": prompt}], self.params(max_tokens), use_tqdm=False)[0]
        seconds = time.perf_counter() - started
        return seconds, list(output.outputs[0].token_ids), int(output.num_cached_tokens or 0)

    def forget(self) -> None:
        """Makes vLLM drop its own prefix cache, once the cache under test has let go of its blocks.

        Raises:
            RuntimeError: it does not within some seconds: what follows were no hit of the cache.
        """
        if not wait_for(lambda: bool(self.llm.reset_prefix_cache()), timeout_s=10.0):
            raise RuntimeError("vLLM did not drop its own prefix cache within 10 s")


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Polls the condition; whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


MARK = "BENCH "
"""Starts a line of figures among the engine's own output."""


def emit(**figures: Any) -> None:
    """One line of JSON for the parent process."""
    print(MARK + json.dumps(figures), flush=True)  # noqa: T201
