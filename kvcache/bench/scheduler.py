# SPDX-License-Identifier: Apache-2.0
"""What the connector costs vLLM's scheduler: one lookup of a long prompt, and a step with many requests.

The connector's two sides run as in vLLM, the rank's in a process of its own: lookups go over its socket, and
metadata and reports are pickled as vLLM does. Only the model is left out, since nothing here depends on it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

BLOCK, CHUNK = 16, 256
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 151_936,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "bfloat16",
}
_RUNNING_PROMPT = 1_000


@dataclass(frozen=True)
class SchedulerResult:
    """Microseconds."""

    what: str
    size: int
    """Tokens of the prompt, or requests in the step."""
    median_us: float
    p99_us: float
    low_us: float


def scheduler_results(
    tokens: int = 128 * 1024, running: int = 256, runs: int = 200
) -> Iterator[SchedulerResult]:
    """Lookup of a prompt that one rank has in full, of one that it does not have, and decoding steps."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(_MODEL))
        for save_decode_cache in (False, True):
            with _engine(folder, tokens, running, save_decode_cache) as engine:
                if not save_decode_cache:
                    known, unknown = _ids(tokens), _ids(tokens)
                    engine.store(known)
                    yield _result("lookup, hit", tokens, engine.lookups(known, tokens - 1, runs))
                    yield _result("lookup, miss", tokens, engine.lookups(unknown, 0, runs))
                what = "step, decode tokens stored" if save_decode_cache else "step"
                yield _result(what, running, engine.steps(running, runs))


class _Engine:
    """The scheduler's side of one vLLM, and the way to its rank."""

    def __init__(self, connector: Any, rank: Connection) -> None:
        self._connector = connector
        self._rank = rank
        self._names = iter(range(1 << 62))

    def store(self, prompt: list[int]) -> None:
        """Has the rank store a prompt's KV."""
        request = self._request(prompt)
        self._ask(request)
        blocks = list(range(1, len(prompt) // BLOCK + 1))
        self._step(_output(new=[(request, blocks, 0, len(prompt))]))
        self._connector.request_finished(request, blocks)

    def lookups(self, prompt: list[int], expected: int, runs: int) -> list[float]:
        """Seconds of each lookup."""
        seconds = []
        for _ in range(runs):
            request = self._request(prompt)
            started = time.perf_counter()
            found = self._ask(request)
            seconds.append(time.perf_counter() - started)
            self._connector.request_finished(request, [])
            if found != expected:
                raise RuntimeError(f"the lookup found {found} tokens, not {expected}")
        return seconds

    def steps(self, running: int, runs: int) -> list[float]:
        """Seconds in the connector's hooks of each step in which all requests generate a token."""
        requests = [self._request(_ids(_RUNNING_PROMPT + index % BLOCK)) for index in range(running)]
        per_request = 2 * _RUNNING_PROMPT // BLOCK
        tables = [
            list(range(1 + index * per_request, 1 + (index + 1) * per_request)) for index in range(running)
        ]
        used = [-(-len(request.all_token_ids) // BLOCK) for request in requests]
        for request in requests:
            self._ask(request)
        self._step(
            _output(
                new=[
                    (request, tables[index][: used[index]], 0, len(request.all_token_ids))
                    for index, request in enumerate(requests)
                ]
            )
        )
        seconds = []
        for _ in range(runs):
            cached = []
            for index, request in enumerate(requests):
                computed = len(request.all_token_ids)
                request.append_output_token_ids(7)
                more = -(-(computed + 1) // BLOCK) > used[index]
                new = ([tables[index][used[index]]],) if more else None
                used[index] += more
                cached.append((request, new, computed))
            seconds.append(self._step(_output(cached=cached)))
        for request in requests:
            self._connector.request_finished(request, [])
        return seconds

    def _request(self, prompt: list[int]) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id=f"request-{next(self._names)}",
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=10_000),
            pooling_params=None,
        )

    def _ask(self, request: Any) -> int:
        found, _ = self._connector.get_num_new_matched_tokens(request, 0)
        return int(found)

    def _step(self, output: Any) -> float:
        """Seconds in the scheduler's hooks."""
        from vllm.v1.outputs import KVConnectorOutput

        started = time.perf_counter()
        metadata = self._connector.build_connector_meta(output)
        spent = time.perf_counter() - started
        self._rank.send(metadata)
        report = KVConnectorOutput(kv_connector_worker_meta=self._rank.recv())
        started = time.perf_counter()
        self._connector.update_connector_output(report)
        self._connector.get_kv_connector_stats()
        self._connector.take_events()
        self._connector.has_pending_push_work()
        return spent + time.perf_counter() - started


@contextmanager
def _engine(folder: Path, tokens: int, running: int, save_decode_cache: bool) -> Iterator[_Engine]:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    blocks = max(tokens // BLOCK, running * 2 * _RUNNING_PROMPT // BLOCK) + 2
    with tempfile.TemporaryDirectory(prefix="kvc-") as sockets:
        extra = {
            "chunk_size": CHUNK,
            "runtime_dir": sockets,
            "save_decode_cache": save_decode_cache,
            "tiers": {"cpu": {"capacity": 256 << 20}},
        }
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        rank = context.Process(target=_serve_rank, args=(theirs, str(folder), extra, blocks), daemon=True)
        rank.start()
        theirs.close()
        try:
            pipe.recv()
            connector = _connector(str(folder), extra, blocks, KVConnectorRole.SCHEDULER)
            yield _Engine(connector, pipe)
            connector.shutdown()
        finally:
            pipe.close()
            rank.join(timeout=30)


def _serve_rank(pipe: Connection, folder: str, extra: dict[str, Any], blocks: int) -> None:
    """The worker's side: carries out the steps that come over the pipe until it is closed."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = _config(folder, extra)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
        initialize_model_parallel(1, 1, backend="gloo")
        connector = _connector(folder, extra, blocks, KVConnectorRole.WORKER)
        pages = {"layer": torch.zeros(blocks, 1, BLOCK, 2 * 16, dtype=torch.bfloat16)}
        connector.register_kv_caches(pages)
    pipe.send("ready")
    while True:
        try:
            metadata = pipe.recv()
        except EOFError:
            break
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(None)
        connector.wait_for_save()
        connector.get_finished(set())
        pipe.send(connector.build_connector_worker_meta())
        connector.clear_connector_metadata()
    connector.shutdown()


def _connector(folder: str, extra: dict[str, Any], blocks: int, role: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from kvcache.integration.vllm.connector import LMCacheConnectorV1Dynamic

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
    pages = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    connector = LMCacheConnectorV1Dynamic(_config(folder, extra), role, pages)
    if role.name == "SCHEDULER" and connector._impl.reason:
        raise RuntimeError(f"the cache is off: {connector._impl.reason}")
    return connector


def _config(folder: str, extra: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK if torch.cuda.is_available() else None,
        max_model_len=_MODEL["max_position_embeddings"],
        kv_transfer_config={
            "kv_connector": "LMCacheConnectorV1Dynamic",
            "kv_connector_module_path": "kvcache.integration.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
    ).create_engine_config()


def _output(
    new: Sequence[tuple[Any, list[int], int, int]] = (),
    cached: Sequence[tuple[Any, Any, int]] = (),
) -> Any:
    """What vLLM scheduled: new requests with blocks, computed and scheduled tokens, and running ones with
    their new blocks and computed tokens, each of which generates a token."""
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    scheduled = {request.request_id: tokens for request, _, _, tokens in new}
    scheduled |= {request.request_id: 1 for request, _, _ in cached}
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData.from_request(request, (blocks,)) for request, blocks, _, _ in new
    ]
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=[request.request_id for request, _, _ in cached],
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[blocks for _, blocks, _ in cached],
        num_computed_tokens=[computed for _, _, computed in cached],
        num_output_tokens=[request.num_output_tokens for request, _, _ in cached],
    )
    output.num_scheduled_tokens = scheduled
    output.total_num_scheduled_tokens = sum(scheduled.values())
    return output


def _ids(count: int) -> list[int]:
    """Token ids as a tokenizer gives them: a Python list of integers, each an object of its own."""
    return [int(number) for number in np.random.default_rng().integers(1000, 150_000, count)]


def _result(what: str, size: int, seconds: list[float]) -> SchedulerResult:
    ordered = sorted(second * 1e6 for second in seconds)
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return SchedulerResult(what, size, statistics.median(ordered), p99, ordered[0])
