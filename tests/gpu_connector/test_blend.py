# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from kvcache import _native
from kvcache.gpu_connector.base import layer_slices
from kvcache.gpu_connector.blend import VLLMBufferLayerwiseGPUConnector
from kvcache.gpu_connector.layout import LayerSpec
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


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize(
    ("call", "steps_later"),
    [("copy_spans", 0), ("zero_spans", 1), ("rotate_keys", 1), ("batched_kv_transfer", 2)],
)
def test_after_an_error_in_any_stage_the_steps_are_as_many(
    one: Rig, monkeypatch: pytest.MonkeyPatch, call: str, steps_later: int, layer: int
) -> None:
    """A layer is loaded in its own step, computed in the next and written in the one after. What was written
    before is whole, what comes after is not written, and the buffers come back (the fixture looks).
    """
    (obj,) = normal(one, 16)
    obj.remember_positions(torch.arange(16) + 100)
    real, calls = getattr(_native, call), []

    def breaks(*arguments: object, **options: object) -> None:
        calls.append(call)
        if len(calls) > layer:
            raise RuntimeError("CUDA: it is gone")
        real(*arguments, **options)

    monkeypatch.setattr(_native, call, breaks)
    before = one.kv.snapshot()
    loads = one.connector.batched_to_gpu([0], [16], slot_mapping=torch.arange(16))
    seen = [next(loads), *(loads.send(slices([obj], at)) for at in range(LAYERS)), next(loads)]
    assert next(loads, "end") == "end"
    # Yield i tells of step i - 1; the last of the two that are left by then.
    good = min(layer + steps_later, LAYERS) + 1
    assert [completion.error is None for completion in seen] == [True] * good + [False] * (LAYERS + 2 - good)
    assert str(seen[-1].error) == "CUDA: it is gone"
    assert len(calls) == layer + 1, "something was tried after the error"
    written = [not torch.equal(*rows) for rows in zip(one.kv.snapshot(), before, strict=True)]
    whole = layer if call == "batched_kv_transfer" else max(layer + steps_later - 1, 0)
    assert written == [at < whole for at in range(LAYERS)]


@pytest.mark.parametrize("steps", range(LAYERS + 2))
def test_buffers_come_back_when_closed_early(one: Rig, steps: int) -> None:
    (obj,) = normal(one, 16)
    loads = one.connector.batched_to_gpu([0], [16], slot_mapping=torch.arange(16))
    assert one.connector.gpu_buffer_allocator.in_use_bytes == 0
    for step in range(steps):
        next(loads) if step in (0, LAYERS + 1) else loads.send(slices([obj], step - 1))
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


def test_joined_rows_are_refused() -> None:
    spec = LayerSpec(4, 2, 8, torch.float32, 6, joined=True)
    with pytest.raises(ValueError, match="blending needs keys in rows of their own"):
        VLLMBufferLayerwiseGPUConnector(spec)


def test_positions_are_one_a_token(one: Rig) -> None:
    """A single one would otherwise stand for all of a chunk's."""
    (obj,) = normal(one, 16)
    slots = torch.arange(16)
    for wrong in (torch.arange(1), torch.arange(17), torch.arange(16.0), torch.arange(16)[:, None]):
        with pytest.raises(
            ValueError, match=r"of torch\.\w+; \[16\] of int64, one a token of the slot mapping"
        ):
            one.connector.batched_to_gpu([0], [16], slot_mapping=slots, positions=wrong)
        with pytest.raises(ValueError, match=r"\[16\] of int64, one a token of the slot mapping"):
            one.connector.batched_from_gpu(
                layer_slices([obj], LAYERS), [0], [16], slot_mapping=slots, positions=wrong
            )
        with pytest.raises(
            ValueError, match=r"for a memory object of 16 tokens; \[16\] of int64 is accepted"
        ):
            obj.remember_positions(wrong)
    assert obj.cached_positions is None


@pytest.mark.parametrize(
    ("starts", "ends", "text"),
    [
        ([0], [17], "chunk 0 spans tokens 0 to 17; the slot mapping has 16"),
        ([0, -3], [3, 0], "chunk 1 spans tokens -3 to 0"),
        ([5], [4], "chunk 0 spans tokens 5 to 4"),
        ([0, 5], [5], "2 memory objects, 2 starts and 1 ends"),
    ],
)
def test_chunks_that_are_not_in_the_mapping_are_refused(
    one: Rig, starts: list[int], ends: list[int], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        one.connector.batched_to_gpu(starts, ends, slot_mapping=torch.arange(16))


def test_chunks_that_overlap_are_refused(one: Rig) -> None:
    with pytest.raises(ValueError, match="a chunk from token 10 overlaps one that ends at 16"):
        one.connector.batched_to_gpu([0, 10], [16, 26], slot_mapping=torch.arange(32))
