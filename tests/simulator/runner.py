# SPDX-License-Identifier: Apache-2.0
"""A double of vLLM's model runner: all ranks of it, over real pages and the real worker connectors.

It keeps a request's tokens and blocks as vLLM's runner V1 does, and computes by `values.Model`: a token's KV
is right only if that of every token before it is, in every layer of every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvcache.integration.vllm.connector import LMCacheConnectorV1Dynamic
from tests.simulator.copies import Streams
from tests.simulator.values import Lanes, Model


@dataclass
class Rank:
    """One worker."""

    connector: LMCacheConnectorV1Dynamic
    tensors: dict[str, torch.Tensor]
    """Layer to its pages, float64 [blocks, heads, block size, lanes of a head]; in memory heads lie within
    tokens."""
    streams: Streams | None = None

    @property
    def pages(self) -> list[Lanes]:
        """The same memory as uint64 [blocks, block size, lanes]."""
        plain = [tensor.transpose(1, 2).flatten(2).view(torch.int64) for tensor in self.tensors.values()]
        return [pages.numpy().view(np.uint64) for pages in plain]


@dataclass
class _State:
    """What the runner knows of a request."""

    root: int
    prompt: list[int]
    outputs: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    hashed: list[int] = field(default_factory=list)
    """Tokens that `prefixes` stands for."""
    prefixes: list[int] = field(default_factory=list)
    """Hash of the tokens up to each position."""


_Inputs = dict[str, tuple[_State, int, int]]
"""Requests to state, hashed up to the step's last token, and to the positions `[computed, end)` of it."""


class Runner:
    """Executes what the scheduler scheduled.

    Args:
        model: the arithmetic.
        ranks: the workers; the first one's output is the batch's.
        vllm_config: of the engine.
        block_size: tokens of a page.
        asynchronous: the scheduler does not wait for a step's tokens before it schedules the next.
        root_of: the root of a request's prefixes.
        drafts: guesses the tokens that follow a prefix, right or wrong; None without speculative decoding.
        replays: whether the next step is the replay of a full CUDA graph, which calls no layer's hooks.
        hooks_fail: whether they do not come in a step that should have them.
    """

    def __init__(
        self,
        model: Model,
        ranks: list[Rank],
        vllm_config: Any,
        block_size: int,
        *,
        asynchronous: bool,
        root_of: Callable[[str], int],
        drafts: Callable[[int], list[int]] | None,
        replays: Callable[[], bool],
        hooks_fail: Callable[[], bool],
    ) -> None:
        self._model = model
        self._ranks = ranks
        self._config = vllm_config
        self._block_size = block_size
        self._asynchronous = asynchronous
        self._root_of = root_of
        self._drafts = drafts
        self._replays = replays
        self._hooks_fail = hooks_fail
        self._states: dict[str, _State] = {}
        self._batch_before: set[str] = set()
        self._aggregator = KVOutputAggregator(len(ranks))
        self.draft_tokens: dict[str, list[int]] = {}
        """Of the last step, for the scheduler."""
        self.wrong_reads: dict[str, set[int]] = {}
        """Of the last step: requests to blocks that they found wrong, on any rank."""
        self.written: dict[str, list[int]] = {}
        """Of the last step: requests to blocks that they wrote from the first token on."""

    def execute(self, step: Any) -> ModelRunnerOutput:
        """One step on all ranks."""
        for req_id in step.finished_req_ids:
            self._states.pop(req_id, None)
        outputs: list[ModelRunnerOutput | None] = []
        inputs: _Inputs = {}
        metadata = {} if self._replays() else {"layer": "attention"}
        hooks = bool(metadata) and not self._hooks_fail()
        for index, rank in enumerate(self._ranks):
            kv_transfer_state._KV_CONNECTOR_AGENT = rank.connector
            rank.connector.handle_preemptions(step.kv_connector_metadata)
            if index == 0:
                self._update_states(step)
                inputs = {req_id: self._inputs(step, req_id) for req_id in step.num_scheduled_tokens}
                self.wrong_reads = {req_id: set() for req_id in inputs}
            with (
                set_forward_context(metadata, self._config),
                KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(step) as connector_output,
            ):
                self._forward(inputs, index, rank, hooks=hooks)
            output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
            output.kv_connector_output = connector_output
            outputs.append(output)
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        combined = self._aggregator.aggregate(outputs)
        assert combined is not None
        combined.req_ids = list(step.num_scheduled_tokens)
        combined.req_id_to_index = {req_id: index for index, req_id in enumerate(combined.req_ids)}
        combined.sampled_token_ids = self._sample(step, inputs)
        self._batch_before = set(step.num_scheduled_tokens)
        size = self._block_size
        self.written = {
            req_id: state.blocks[-(-computed // size) : -(-end // size)]
            for req_id, (state, computed, end) in inputs.items()
        }
        return combined

    def _update_states(self, step: Any) -> None:
        for new in step.scheduled_new_reqs:
            self._states[new.req_id] = _State(
                self._root_of(new.req_id), list(new.prompt_token_ids), blocks=list(new.block_ids[0])
            )
        cached = step.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            state = self._states[req_id]
            known = cached.num_output_tokens[index]
            if known < len(state.outputs):
                # A step whose load failed: its token was not taken.
                del state.outputs[known:]
            new_blocks = cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:
                assert new_blocks is not None
                state.blocks = list(new_blocks[0])
            elif new_blocks is not None:
                state.blocks.extend(new_blocks[0])
            if self._asynchronous and req_id not in self._batch_before and known > 0:
                state.outputs = list(cached.all_token_ids[req_id][-known:])

    def _inputs(self, step: Any, req_id: str) -> tuple[_State, int, int]:
        """A request's state, hashed up to the step's last token, and the positions that it computes."""
        state = self._states[req_id]
        computed = _computed(step, req_id)
        end = computed + step.num_scheduled_tokens[req_id]
        drafted = step.scheduled_spec_decode_tokens.get(req_id, [])
        tokens = state.prompt + state.outputs + list(drafted)
        assert end <= len(tokens), f"{req_id}: {end} of {len(tokens)} tokens are to be computed"
        self._hash(state, tokens)
        return state, computed, end

    def _hash(self, state: _State, tokens: list[int]) -> None:
        if tokens[: len(state.hashed)] != state.hashed:
            state.hashed, state.prefixes = [], []
        last = state.prefixes[-1] if state.prefixes else state.root
        state.prefixes.extend(self._model.hashes(last, tokens[len(state.hashed) :]))
        state.hashed = tokens

    def _forward(self, inputs: _Inputs, index: int, rank: Rank, *, hooks: bool) -> None:
        """Computes the step on one rank: in each layer all new KV is written, then all is read."""
        if not inputs:
            return
        for layer, (name, pages) in enumerate(zip(rank.tensors, rank.pages, strict=True)):
            if hooks:
                rank.connector.wait_for_layer_load(name)
            if rank.streams is not None:
                rank.streams.kernel()
            for req_id, (state, computed, end) in inputs.items():
                kv = self._model.kv(state.prefixes[computed:end], index, layer)
                self._write(pages, state.blocks, computed, ~kv if self.wrong_reads[req_id] else kv)
            for req_id, (state, _, end) in inputs.items():
                self.wrong_reads[req_id] |= self._wrong_blocks(pages, state, index, layer, end)
            if hooks:
                rank.connector.save_kv_layer(name, rank.tensors[name], None)

    def _write(self, pages: Lanes, table: list[int], start: int, kv: Lanes) -> None:
        size = self._block_size
        first = start // size
        blocks = table[first : -(-(start + len(kv)) // size)]
        held = self._model.as_tokens(pages[blocks].reshape(-1, pages.shape[-1])).copy()
        held[start - first * size :][: len(kv)] = kv
        pages[blocks] = self._model.as_pages(held).reshape(len(blocks), size, -1)

    def _wrong_blocks(self, pages: Lanes, state: _State, rank: int, layer: int, end: int) -> set[int]:
        """Blocks that do not hold the KV of the request's tokens up to `end`."""
        blocks = state.blocks[: -(-end // self._block_size)]
        held = self._model.as_tokens(pages[blocks].reshape(-1, pages.shape[-1]))[:end]
        wrong = (held != self._model.kv(state.prefixes[:end], rank, layer)).any(axis=1).nonzero()[0]
        return {blocks[int(position) // self._block_size] for position in wrong}

    def _sample(self, step: Any, inputs: _Inputs) -> list[list[int]]:
        sampled: list[list[int]] = []
        self.draft_tokens = {}
        for req_id, (state, _, end) in inputs.items():
            known = len(state.prompt) + len(state.outputs)
            drafted = step.scheduled_spec_decode_tokens.get(req_id, [])
            tokens: list[int] = []
            for position in range(known - 1, end):
                token = self._model.next_token(state.prefixes[position])
                tokens.append(token ^ 1 if self.wrong_reads[req_id] else token)
                accepted = len(tokens) - 1
                if accepted >= len(drafted) or drafted[accepted] != tokens[-1]:
                    break
            if tokens:
                state.outputs.extend(tokens)
                if self._drafts is not None:
                    self._hash(state, state.prompt + state.outputs)
                    self.draft_tokens[req_id] = self._drafts(state.prefixes[-1])
            sampled.append(tokens)
        return sampled


def _computed(step: Any, req_id: str) -> int:
    for new in step.scheduled_new_reqs:
        if new.req_id == req_id:
            return int(new.num_computed_tokens)
    cached = step.scheduled_cached_reqs
    return int(cached.num_computed_tokens[cached.req_ids.index(req_id)])
