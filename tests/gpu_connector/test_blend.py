# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from kvcache import _native
from kvcache.gpu_connector.base import layer_slices
from kvcache.gpu_connector.blend import VLLMBufferLayerwiseGPUConnector
from kvcache.gpu_connector.rotary import FusedRotary
from kvcache.memory.objects import MemoryObj
from tests.csrc.layouts import random_slots, scatter
from tests.csrc.test_rotary import moved, table
from tests.gpu_connector.rigs import LAYERS, Rig, rig, slices

TABLE = table(16)


@pytest.fixture
def one() -> Iterator[Rig]:
    rotary = FusedRotary(TABLE.float())
    made = rig("LBHNC", partial(VLLMBufferLayerwiseGPUConnector, fused_rotary_emb=rotary), torch.float32)
    yield made
    assert made.connector.gpu_buffer_allocator.in_use_bytes == 0, "a buffer was not given back"
    made.close()


def normal(made: Rig, *tokens: int) -> list[MemoryObj]:
    objs = made.objects(*tokens)
    for obj in objs:
        obj.tensor.normal_()
    return objs


def run(
    made: Rig,
    objs: list[MemoryObj],
    starts: list[int],
    ends: list[int],
    slots: torch.Tensor,
    **options: object,
) -> int:
    """Drives a load to its end; the number of yields."""
    loads = made.connector.batched_to_gpu(starts, ends, slot_mapping=slots, **options)
    seen = [next(loads), *(loads.send(slices(objs, layer)) for layer in range(LAYERS)), next(loads)]
    assert seen[-1].done()
    assert [completion.error for completion in seen] == [None] * len(seen)
    assert next(loads, "end") == "end"
    return len(seen)


def test_chunks_at_new_positions_with_a_gap(one: Rig) -> None:
    """Chunks stored at 0 and 16 come to 5 and 40 of another prompt; what is between them becomes zero."""
    slots_then = random_slots(one.kv.slots, 32, 8)
    for tensor in one.kv.tensors:
        tensor.normal_()
    objs = one.objects(16, 16)
    list(
        one.connector.batched_from_gpu(layer_slices(objs, LAYERS), [0, 16], [16, 32], slot_mapping=slots_then)
    )
    noted = objs[1].cached_positions
    assert noted is not None
    assert noted.tolist() == list(range(16, 32))
    stored = [obj.tensor.clone() for obj in objs]

    slots = random_slots(one.kv.slots, 60, 8)
    before = one.kv.snapshot()
    assert run(one, objs, [40, 5], [56, 21], slots) == LAYERS + 2
    assert all(map(torch.equal, [obj.tensor for obj in objs], stored)), "a load changed its source"

    for layer in range(LAYERS):
        rows = one.kv.rows(layer)
        got = rows.view(torch.float32)
        for data, (start, end), was in zip(stored, ((40, 56), (5, 21)), (0, 16), strict=True):
            keys = data[layer, :, 0].view(16, 2, 16)
            now = torch.arange(start, end)
            expected = moved(keys, torch.arange(was, was + 16), now, TABLE.float().double(), True)
            assert torch.allclose(got[slots[start:end], 0].double(), expected.view(16, -1), atol=1e-5)
            assert torch.equal(got[slots[start:end], 1], data[layer, :, 1])
        assert not bool(rows[slots[21:40]].any()), "the gap is not zero"
        outside = torch.ones(one.kv.slots, dtype=torch.bool)
        outside[slots[5:56]] = False
        assert torch.equal(rows[outside], before[layer][outside])


def test_keys_that_stay_are_not_touched(one: Rig) -> None:
    """Equal positions, no noted positions, or cache_positions off: the pages get the chunks bit for bit."""
    slots = random_slots(one.kv.slots, 32, 8)
    objs = normal(one, 16, 16)
    for options in ({}, {"cache_positions": False}):
        expected = one.kv.snapshot()
        for layer in range(LAYERS):
            for obj, start in zip(objs, (0, 16), strict=True):
                expected[layer] = scatter(expected[layer], slots[start : start + 16], one.rows(obj, layer))
        run(one, objs, [0, 16], [16, 32], slots, **options)
        assert all(map(torch.equal, one.kv.snapshot(), expected))
        objs[0].remember_positions(torch.arange(100, 116))


def test_positions_may_be_given(one: Rig) -> None:
    slots = random_slots(one.kv.slots, 16, 8)
    (obj,) = normal(one, 16)
    was, now = torch.randint(0, 500, (2, 16))
    obj.remember_positions(was)
    keys = obj.tensor[1, :, 0].view(16, 2, 16).clone()
    run(one, [obj], [0], [16], slots, positions=now)
    got = one.kv.rows(1).view(torch.float32)[slots, 0].view(16, 2, 16)
    assert torch.allclose(got.double(), moved(keys, was, now, TABLE.float().double(), True), atol=1e-5)


def test_mla_moves_the_last_dimensions_only() -> None:
    made = rig(
        "MLA BNC",
        partial(VLLMBufferLayerwiseGPUConnector, fused_rotary_emb=FusedRotary(TABLE.float(), is_neox=False)),
        torch.float32,
        head_size=40,
    )
    slots = random_slots(made.kv.slots, 16, 8)
    (obj,) = normal(made, 16)
    obj.remember_positions(torch.arange(16))
    latents = obj.tensor[2].clone()
    run(made, [obj], [0], [16], slots, positions=torch.arange(30, 46))
    got = made.kv.rows(2).view(torch.float32)[slots, 0]
    assert torch.equal(got[:, :24], latents[:, :24])
    expected = moved(
        latents[:, None, 24:], torch.arange(16), torch.arange(30, 46), TABLE.float().double(), False
    )
    assert torch.allclose(got[:, 24:].double(), expected[:, 0], atol=1e-5)
    made.close()


def test_with_nothing_to_do_the_steps_are_as_many(one: Rig) -> None:
    before = one.kv.snapshot()
    steps = list(one.connector.batched_to_gpu([], [], slot_mapping=torch.empty(0, dtype=torch.int64)))
    assert [completion.error for completion in steps] == [None] * (LAYERS + 2)
    assert all(map(torch.equal, one.kv.snapshot(), before))


def test_buffers_come_back_after_an_error(one: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("CUDA: it is gone")

    (obj,) = normal(one, 16)
    monkeypatch.setattr(_native, "copy_spans", broken)
    loads = one.connector.batched_to_gpu([0], [16], slot_mapping=torch.arange(16))
    seen = [next(loads), *(loads.send(slices([obj], layer)) for layer in range(LAYERS)), next(loads)]
    assert [completion.error is None for completion in seen] == [True] + [False] * (LAYERS + 1)
    assert next(loads, "end") == "end"


def test_buffers_come_back_when_closed_early(one: Rig) -> None:
    (obj,) = normal(one, 16)
    loads = one.connector.batched_to_gpu([0], [16], slot_mapping=torch.arange(16))
    next(loads)
    loads.send(slices([obj], 0))
    assert one.connector.gpu_buffer_allocator.in_use_bytes == 2 * 16 * 2 * 32 * 4
    loads.close()


def test_too_little_memory_for_buffers_is_an_error_of_that_load() -> None:
    made = rig(
        "LBHNC",
        partial(VLLMBufferLayerwiseGPUConnector, buffer_limit_bytes=16 * 2 * 32 * 4 + 1),
        torch.float32,
    )
    before = made.kv.snapshot()
    (obj,) = normal(made, 16)
    loads = made.connector.batched_to_gpu([0], [16], slot_mapping=torch.arange(16))
    seen = [next(loads), *(loads.send(slices([obj], layer)) for layer in range(LAYERS)), next(loads)]
    assert all("exceeds the limit of 4097 bytes" in str(completion.error) for completion in seen)
    assert next(loads, "end") == "end"
    assert made.connector.gpu_buffer_allocator.in_use_bytes == 0
    assert all(map(torch.equal, made.kv.snapshot(), before))
    made.close()


def test_chunks_that_overlap_are_refused(one: Rig) -> None:
    with pytest.raises(ValueError, match="a chunk from token 10 overlaps one that ends at 16"):
        one.connector.batched_to_gpu([0, 10], [16, 26], slot_mapping=torch.arange(32))
