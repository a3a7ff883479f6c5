# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from kvcache import _native
from kvcache.gpu_connector.base import layer_slices
from kvcache.gpu_connector.layerwise import VLLMPagedMemLayerwiseGPUConnector
from tests.csrc.layouts import LAYOUTS, gather, random_slots, scatter
from tests.gpu_connector.rigs import LAYERS, Rig, rig, slices


@pytest.fixture(params=[True, False], ids=["use_gpu", "direct"])
def use_gpu(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def one(use_gpu: bool) -> Iterator[Rig]:
    made = rig("LBHNC", partial(VLLMPagedMemLayerwiseGPUConnector, use_gpu=use_gpu))
    yield made
    made.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_a_step(layout: str, use_gpu: bool) -> None:
    made = rig(layout, partial(VLLMPagedMemLayerwiseGPUConnector, use_gpu=use_gpu))
    slots = random_slots(made.kv.slots, 50, 8, skip=0.1)
    # A hole between the second and the third chunk: packed staging must not shift what follows it.
    starts, ends = [0, 16, 40], [16, 32, 49]
    objs, pages = made.objects(16, 16, 9), made.kv.snapshot()
    poison = [[made.rows(obj, layer).clone() for layer in range(LAYERS)] for obj in objs]
    steps = made.connector.batched_from_gpu(
        layer_slices(objs, LAYERS), starts, ends, slot_mapping=slots, sync=True, kvcaches=made.kv.tensors
    )
    for layer in range(LAYERS):
        assert next(steps).done()
        for obj, start, end, old in zip(objs, starts, ends, poison, strict=True):
            assert torch.equal(made.rows(obj, layer), gather(pages[layer], slots[start:end], old[layer]))
            if layer + 1 < LAYERS:
                assert torch.equal(made.rows(obj, layer + 1), old[layer + 1]), "a layer came early"
    assert next(steps).error is None
    assert next(steps, "end") == "end"

    fresh = made.objects(16, 16, 9)
    loads = made.connector.batched_to_gpu(starts, ends, slot_mapping=slots)
    next(loads)
    for layer in range(LAYERS):
        assert loads.send(slices(fresh, layer)).done()
        expected = pages[layer]
        for obj, start, end in zip(fresh, starts, ends, strict=True):
            expected = scatter(expected, slots[start:end], made.rows(obj, layer))
        assert torch.equal(made.kv.rows(layer), expected)
        if layer + 1 < LAYERS:
            assert torch.equal(made.kv.rows(layer + 1), pages[layer + 1])
    assert next(loads).error is None
    assert next(loads, "end") == "end"
    made.close()


def test_shapes(one: Rig) -> None:
    assert list(one.connector.get_shape(7)) == [7, 2, 32]
    mla = rig("MLA BNC", VLLMPagedMemLayerwiseGPUConnector)
    assert list(mla.connector.get_shape(7)) == [7, 16]
    mla.close()


def test_one_layer_of_one_object(one: Rig) -> None:
    slots = random_slots(one.kv.slots, 20, 8)
    (obj,) = one.objects(9)
    before = obj.tensor.clone()
    one.connector.from_gpu(obj.slice(1), 5, 14, layer=1, slot_mapping=slots)
    assert torch.equal(one.rows(obj, 1), one.kv.rows(1)[slots[5:14]])
    assert torch.equal(obj.layer(0).view(torch.uint8), before[0].view(torch.uint8))
    obj.tensor.view(torch.uint8).random_(0, 256)
    one.connector.to_gpu(obj.slice(2), 5, 14, layer=2, slot_mapping=slots)
    assert torch.equal(one.kv.rows(2)[slots[5:14]], one.rows(obj, 2))


def test_with_nothing_to_do_the_steps_are_as_many(one: Rig) -> None:
    before = one.kv.snapshot()
    none = torch.empty(0, dtype=torch.int64)
    stores = list(one.connector.batched_from_gpu([[]] * LAYERS, [], [], slot_mapping=none))
    assert [completion.done() for completion in stores] == [True] * (LAYERS + 1)
    loads = list(one.connector.batched_to_gpu([], [], slot_mapping=none))
    assert [completion.error for completion in loads] == [None] * (LAYERS + 2)
    assert all(map(torch.equal, one.kv.snapshot(), before))


class _Broken:
    """Stands for the native transfers; fails from the n-th call on."""

    def __init__(self, good: int) -> None:
        self.good = good

    def __call__(self, *arguments: object, **options: object) -> None:
        self.good -= 1
        if self.good < 0:
            raise RuntimeError("CUDA: an illegal access was made")


@pytest.mark.parametrize("good", range(LAYERS))
def test_after_an_error_the_steps_are_as_many(monkeypatch: pytest.MonkeyPatch, good: int) -> None:
    made = rig("LBHNC", partial(VLLMPagedMemLayerwiseGPUConnector, use_gpu=False))
    objs, slots = made.objects(16), torch.arange(16)
    monkeypatch.setattr(_native, "batched_kv_transfer", _Broken(good))
    stores = list(made.connector.batched_from_gpu(layer_slices(objs, LAYERS), [0], [16], slot_mapping=slots))
    assert [completion.error is None for completion in stores] == [True] * good + [False] * (
        LAYERS + 1 - good
    )
    assert "illegal access" in str(stores[-1].error)
    monkeypatch.setattr(_native, "batched_kv_transfer", _Broken(good))
    loads = made.connector.batched_to_gpu([0], [16], slot_mapping=slots)
    seen = [next(loads), *(loads.send(slices(objs, layer)) for layer in range(LAYERS)), next(loads)]
    assert [completion.error is None for completion in seen] == [True] * (1 + good) + [False] * (
        LAYERS + 1 - good
    )
    assert next(loads, "end") == "end"
    made.close()


def test_objects_that_do_not_come_are_an_error_of_that_load(one: Rig) -> None:
    (obj,) = one.objects(16)
    before = one.kv.snapshot()
    loads = one.connector.batched_to_gpu([0], [16], slot_mapping=torch.arange(16))
    next(loads)
    assert loads.send([obj.slice(0)]).error is None
    assert "no memory objects were sent for layer 1" in str(next(loads).error)
    assert loads.send([obj.slice(2)]).error is not None
    assert next(loads).error is not None
    assert not torch.equal(one.kv.rows(0), before[0])
    assert torch.equal(one.kv.rows(1), before[1])
    assert torch.equal(one.kv.rows(2), before[2])


@pytest.mark.parametrize("steps", range(LAYERS + 2))
def test_closing_early_stops_after_the_layer_at_hand(one: Rig, steps: int) -> None:
    """The next call finds the staging ring as it was."""
    (obj,) = one.objects(16)
    obj.tensor.zero_()
    slots, layers = torch.arange(16), layer_slices([obj], LAYERS)
    stores = one.connector.batched_from_gpu(layers, [0], [16], slot_mapping=slots)
    for _ in range(min(steps, LAYERS + 1)):
        next(stores)
    stores.close()
    stored = [bool(obj.layer(layer).view(torch.uint8).any()) for layer in range(LAYERS)]
    assert stored == [layer < steps for layer in range(LAYERS)]

    obj.tensor.view(torch.uint8).random_(0, 256)
    before = one.kv.snapshot()
    loads = one.connector.batched_to_gpu([0], [16], slot_mapping=slots)
    for step in range(steps):
        next(loads) if step in (0, LAYERS + 1) else loads.send(slices([obj], step - 1))
    loads.close()
    loaded = [not torch.equal(*rows) for rows in zip(one.kv.snapshot(), before, strict=True)]
    assert loaded == [layer < steps - 1 for layer in range(LAYERS)]

    list(one.connector.batched_from_gpu(layers, [0], [16], slot_mapping=slots))
    assert all(torch.equal(one.rows(obj, layer), one.kv.rows(layer)[:16]) for layer in range(LAYERS))


def test_bad_calls_raise_at_once(one: Rig) -> None:
    (obj,) = one.objects(16)
    layers, slots = layer_slices([obj], LAYERS), torch.arange(16)
    with pytest.raises(ValueError, match="memory objects of 2 layers; 3 are accepted"):
        one.connector.batched_from_gpu(layers[:2], [0], [16], slot_mapping=slots)
    with pytest.raises(ValueError, match=r"KV_T2D.* for the tokens 0 to 15"):
        one.connector.batched_from_gpu(layers, [0], [15], slot_mapping=slots)
    with pytest.raises(ValueError, match=r"KV_LT2D \[3, 16, 2, 32\]"):
        one.connector.batched_from_gpu([[obj]] * LAYERS, [0], [16], slot_mapping=slots)
    with pytest.raises(ValueError, match=r"a slot mapping of torch\.int32"):
        one.connector.batched_to_gpu([0], [16], slot_mapping=slots.int())
    with pytest.raises(ValueError, match="a slot mapping is a list; a tensor or an array of int64"):
        one.connector.batched_to_gpu([0], [16], slot_mapping=slots.tolist())
    for start, end in ((0, 17), (-1, 15), (9, 8)):
        text = f"chunk 0 spans tokens {start} to {end}; the slot mapping has 16"
        with pytest.raises(ValueError, match=text):
            one.connector.batched_to_gpu([start], [end], slot_mapping=slots)
    with pytest.raises(ValueError, match="chunk 0 spans tokens 0 to 16; the slot mapping has 15"):
        one.connector.batched_from_gpu(layers, [0], [16], slot_mapping=slots[:15])
    with pytest.raises(TypeError, match="unknown arguments offset"):
        one.connector.batched_to_gpu([0], [16], slot_mapping=slots, offset=3)


def test_a_slot_out_of_range_is_an_error_of_that_store(one: Rig) -> None:
    (obj,) = one.objects(16)
    stores = list(
        one.connector.batched_from_gpu(
            layer_slices([obj], LAYERS), [0], [16], slot_mapping=torch.arange(16) + 70
        )
    )
    assert len(stores) == LAYERS + 1
    assert "slot_mapping[10] is 80" in str(stores[0].error)


def test_slices_die_with_their_object(one: Rig) -> None:
    (obj,) = one.objects(16)
    part = obj.slice(2)
    assert part.data_ptr == obj.data_ptr + 2 * part.nbytes
    assert part.tensor.data_ptr() == part.data_ptr
    assert part.num_tokens == 16
    with pytest.raises(ValueError, match="no layer 3"):
        obj.slice(3)
    one.allocator.free(obj)
    with pytest.raises(RuntimeError, match="freed"):
        _ = part.data_ptr
