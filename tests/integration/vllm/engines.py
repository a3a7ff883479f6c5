# SPDX-License-Identifier: Apache-2.0
"""A vLLM with the connector inside the test's process, and a plain one in a process of its own to compare
with.

vLLM keeps its connector in a global, so that one process can hold one engine with a connector and none
without; the plain one therefore lives apart, for the whole session.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import vllm

from kvcache.integration.vllm.adapter import LMCacheConnectorV1Impl
from kvcache.integration.vllm.vllm_stats import figures_of
from kvcache.integration.vllm.worker import WorkerSide
from kvcache.memory.objects import MemoryObj
from kvcache.stats import RankStats, SchedulerStats

BLOCK = 128
"""vLLM's block size on the CPU."""
CHUNK = 256
NUM_BLOCKS = 64
ANSWER = 12
"""Tokens of an answer, unless a test asks for another number."""

Tokens = list[int]
_VLLM = tuple(int(number) for number in vllm.__version__.split(".")[:2])


def _llm_arguments(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 4096,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
        **more,
    }


def _sampling(max_tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)


def _serve(pipe: Connection, model: Path) -> None:
    from vllm import LLM

    llm = LLM(**_llm_arguments(model, enable_prefix_caching=False))
    while (asked := pipe.recv()) is not None:
        prompt, max_tokens = asked
        output = llm.generate([{"prompt_token_ids": prompt}], _sampling(max_tokens), use_tqdm=False)[0]
        pipe.send(list(output.outputs[0].token_ids))


class Reference:
    """What vLLM answers without any cache, one request at a time."""

    def __init__(self, model: Path) -> None:
        self._answers: dict[tuple[int, ...], Tokens] = {}
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, model), daemon=True)
        self._process.start()
        theirs.close()

    def __call__(self, prompt: Sequence[int], max_tokens: int = ANSWER) -> Tokens:
        key = (max_tokens, *prompt)
        if key not in self._answers:
            self._pipe.send((list(prompt), max_tokens))
            self._answers[key] = self._pipe.recv()
        return self._answers[key]

    def all(self, prompts: Iterable[Sequence[int]], max_tokens: int = ANSWER) -> list[Tokens]:
        return [self(prompt, max_tokens) for prompt in prompts]

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.kill()


def _ours(connector: Any) -> LMCacheConnectorV1Impl:
    """Our part of vLLM's connector, which may be one of several."""
    children = getattr(connector, "_connectors", [connector])
    (impl,) = [child._impl for child in children if hasattr(child, "_impl")]
    assert isinstance(impl, LMCacheConnectorV1Impl)
    return impl


def _labels(metric: Any) -> list[str]:
    return [value for name, value in metric.labels.items() if name not in ("engine", "model_name")]


@dataclass
class Answer:
    """What came of one prompt."""

    tokens: Tokens
    cached_tokens: int
    """Prompt tokens that were not computed, by vLLM's own account."""
    finish_reason: str | None


@dataclass
class Engine:
    """A vLLM with the connector; the scheduler's and the worker's half are both at hand.

    Args:
        model: folder.
        extra: `kv_connector_extra_config`.
        role: `kv_role`.
        policy: `kv_load_failure_policy`.
        more: further arguments of `vllm.LLM`.
    """

    model: Path
    extra: dict[str, Any] = field(default_factory=dict)
    role: str = "kv_both"
    policy: str = "recompute"
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from vllm import LLM

        ours = {
            "kv_connector": "LMCacheConnectorV1Dynamic",
            "kv_connector_module_path": "kvcache.integration.vllm.connector",
            "kv_role": self.role,
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": {
                "chunk_size": CHUNK,
                "tiers": {"cpu": {"capacity": "64Mi"}},
                **self.extra,
            },
        }
        self.llm = LLM(**_llm_arguments(self.model, **{"kv_transfer_config": ours, **self.more}))
        self._first_metrics = self._metrics()
        self._names = itertools.count()

    def answers(self, prompts: Sequence[Any], max_tokens: int = ANSWER, **sampling: Any) -> list[Answer]:
        """Of all prompts at once; a prompt is token ids, or a dictionary for vLLM."""
        asked = [p if isinstance(p, dict) else {"prompt_token_ids": list(p)} for p in prompts]
        outputs = self.llm.generate(asked, _sampling(max_tokens, **sampling), use_tqdm=False)
        return [
            Answer(list(o.outputs[0].token_ids), o.num_cached_tokens or 0, o.outputs[0].finish_reason)
            for o in outputs
        ]

    def answer(self, prompt: Any, max_tokens: int = ANSWER, **sampling: Any) -> Answer:
        return self.answers([prompt], max_tokens, **sampling)[0]

    def add(self, prompt: Sequence[int], max_tokens: int) -> str:
        """Queues a request, for `llm_engine.step` to carry on; its id."""
        name = f"request-{next(self._names)}"
        asked = {"prompt_token_ids": list(prompt)}
        self.llm.llm_engine.add_request(name, asked, _sampling(max_tokens))
        return name

    def forget_gpu(self) -> None:
        """vLLM's own prefix cache is empty after this."""
        assert self.llm.reset_prefix_cache()

    def store(self, prompt: Sequence[int], answer: Tokens) -> None:
        """The prompt is in the cache after this, and not in vLLM's own."""
        assert self.answer(prompt).tokens == answer
        self.forget_gpu()

    def forget_all(self) -> None:
        """The cache's tiers too."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    @property
    def worker(self) -> LMCacheConnectorV1Impl:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return _ours(get_kv_transfer_group())

    @property
    def side(self) -> WorkerSide:
        """The worker's, of an engine whose cache is on."""
        side = self.worker._worker
        assert side is not None
        return side

    @property
    def scheduler(self) -> LMCacheConnectorV1Impl:
        return _ours(self.vllm_scheduler.connector)

    @property
    def vllm_scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def rank_stats(self) -> RankStats:
        stats = self.worker.stats()
        assert isinstance(stats, RankStats)
        return stats

    @property
    def scheduler_stats(self) -> SchedulerStats:
        stats = self.scheduler.stats()
        assert isinstance(stats, SchedulerStats)
        return stats

    def stored(self) -> list[MemoryObj]:
        """The chunks that can be hit now."""
        return [entry.obj for entry in self.side.engine.storage.cpu._index.values()]

    def metric(self, name: str, source: str | None = None) -> int:
        """A counter of vLLM since this engine started."""
        key = (name, source)
        return int(self._metrics().get(key, 0) - self._first_metrics.get(key, 0))

    def _metrics(self) -> dict[tuple[str, str | None], float]:
        return {
            (metric.name, metric.labels.get("source")): metric.value
            for metric in self.llm.get_metrics()
            if hasattr(metric, "value")
        }

    def check_clean(self, *, failures: bool = False, counts: bool = True) -> None:
        """Nothing is left of any request, nothing was caught, and both accounts of prompt tokens agree
        (unless another connector has loaded too)."""
        scheduler, rank = self.scheduler_stats, self.rank_stats
        assert [tier.leases for tier in rank.tiers] == [0] * len(rank.tiers)
        assert failures or (scheduler.failures, rank.failures) == ({}, {})
        side = self.scheduler._scheduler
        assert side is not None
        assert side._trackers == {}
        assert (len(side._promised), len(side._saves), side._doubts.open_loads) == (0, 0, 0)
        hits = sum(scheduler.hit_cache_tokens.values())
        assert scheduler.hit_gpu_tokens + hits + scheduler.computed_tokens == scheduler.prompt_tokens
        if not failures and counts:
            # vLLM counts a load that failed as external all the same.
            assert scheduler.hit_gpu_tokens == self.source("local_cache_hit")
            assert hits == self.source("external_kv_transfer")
            assert scheduler.computed_tokens == self.source("local_compute")
        if _VLLM >= (0, 28):
            # Before 0.28, `vllm.LLM` (not the server) dropped the reports of steps that end no request's
            # token.
            self._check_vllms_metrics()

    def _check_vllms_metrics(self) -> None:
        """What vLLM shows of the cache, unless it happened after the last step."""
        shown = {
            (metric.name.removeprefix("vllm:kvcache_"), *_labels(metric)): metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith("vllm:kvcache_")
        }
        for stats in (self.scheduler_stats, self.rank_stats):
            for name, values in figures_of(stats).items():
                for labels, value in values.items():
                    key = (name, *(labels.split("/") if labels else ()))
                    # vLLM's reader cuts counters down to integers.
                    assert name == "failures" or shown[key] == int(value), key

    def source(self, name: str) -> int:
        """Prompt tokens by where they came from, as vLLM counts them."""
        return self.metric("vllm:prompt_tokens_by_source", name)

    def close(self) -> None:
        """Idempotent."""
        if hasattr(self, "llm"):
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
            gc.collect()
