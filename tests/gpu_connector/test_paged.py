# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvcache.gpu_connector.layout import UnknownLayout
from kvcache.gpu_connector.paged import VLLMPagedMemGPUConnectorV2
from tests.csrc.layouts import LAYOUTS, gather, random_slots, scatter
from tests.gpu_connector.rigs import Rig, rig


@pytest.fixture(params=LAYOUTS)
def each(request: pytest.FixtureRequest) -> Iterator[Rig]:
    one = rig(request.param, VLLMPagedMemGPUConnectorV2)
    yield one
    one.close()


@pytest.fixture
def one() -> Iterator[Rig]:
    made = rig("LBHNC", VLLMPagedMemGPUConnectorV2)
    yield made
    made.close()


def test_chunks_out_of_and_into_the_pages(each: Rig) -> None:
    slots = random_slots(each.kv.slots, 45, 8, skip=0.1)
    starts, ends = [0, 16, 32], [16, 32, 45]
    objs, pages = each.objects(16, 16, 13), each.kv.snapshot()
    poison = [[each.rows(obj, layer).clone() for layer in range(3)] for obj in objs]
    completion = each.connector.batched_from_gpu(objs, starts, ends, slot_mapping=slots)
    assert completion.done()
    assert completion.wait(0)
    for obj, start, end, old in zip(objs, starts, ends, poison, strict=True):
        for layer in range(3):
            assert torch.equal(each.rows(obj, layer), gather(pages[layer], slots[start:end], old[layer]))

    fresh = each.objects(16, 13)
    expected = pages
    for obj, start, end in zip(fresh, [16, 32], [32, 45], strict=True):
        expected = [scatter(expected[i], slots[start:end], each.rows(obj, i)) for i in range(3)]
    each.connector.batched_to_gpu(fresh, [16, 32], [32, 45], slot_mapping=slots)
    assert all(map(torch.equal, each.kv.snapshot(), expected))


def test_a_slot_mapping_may_be_an_array(one: Rig) -> None:
    slots = random_slots(one.kv.slots, 37, 8, skip=0.1)
    objs, expected = one.objects(16, 13), one.kv.snapshot()
    for obj, start, end in zip(objs, [5, 21], [21, 34], strict=True):
        expected = [scatter(expected[i], slots[start:end], one.rows(obj, i)) for i in range(3)]
    array = slots.repeat_interleave(2).numpy()[::2]  # not contiguous
    assert one.connector.layers_to_gpu(objs, [5, 21], [21, 34], slot_mapping=array).wait(0)
    assert all(map(torch.equal, one.kv.snapshot(), expected))
    for wrong in (array.astype("int32"), array[None]):
        with pytest.raises(ValueError, match=r"a slot mapping of int(32 with 1|64 with 2) dimensions"):
            one.connector.layers_to_gpu(objs, [5, 21], [21, 34], slot_mapping=wrong)


def test_an_object_that_fits_once_does_not_vouch_for_others(one: Rig) -> None:
    slots, (obj,) = torch.arange(40), one.objects(16)
    one.connector.to_gpu(obj, 0, 16, slot_mapping=slots)
    with pytest.raises(ValueError, match="for the tokens 0 to 17"):
        one.connector.to_gpu(obj, 0, 17, slot_mapping=slots)
    other = rig("LBHNC", VLLMPagedMemGPUConnectorV2, torch.float32)
    with pytest.raises(ValueError, match=r"of torch\.float32 for the tokens"):
        one.connector.batched_to_gpu([obj, *other.objects(16)], [0, 16], [16, 32], slot_mapping=slots)
    one.connector.initialize_kvcaches_ptr(kvcaches=one.kv.tensors[:2])
    with pytest.raises(ValueError, match="for the tokens 0 to 16"):
        one.connector.to_gpu(obj, 0, 16, slot_mapping=slots)
    other.close()


def test_one_object_at_a_time(one: Rig) -> None:
    slots = random_slots(one.kv.slots, 20, 8)
    (obj,) = one.objects(9)
    one.connector.from_gpu(obj, 5, 14, slot_mapping=slots)
    assert torch.equal(one.rows(obj, 1), one.kv.rows(1)[slots[5:14]])
    obj.tensor.view(torch.uint8).random_(0, 256)
    one.connector.to_gpu(obj, 5, 14, slot_mapping=slots)
    assert torch.equal(one.rows(obj, 2), one.kv.rows(2)[slots[5:14]])


def test_what_the_connector_says_of_itself(one: Rig) -> None:
    connector = one.connector
    assert (connector.num_layers, connector.kv_planes, connector.hidden) == (3, 2, 32)
    assert (connector.path, connector.dtype) == ("host", torch.bfloat16)
    assert list(connector.get_shape(7)) == [3, 7, 2, 32]
    mla = rig("MLA B1NC", VLLMPagedMemGPUConnectorV2)
    assert list(mla.connector.get_shape(7)) == [3, 7, 16]
    mla.close()


def test_before_registration_nothing_moves(one: Rig) -> None:
    connector = VLLMPagedMemGPUConnectorV2(one.kv.spec)
    assert connector.path == "none"
    with pytest.raises(RuntimeError, match="not registered"):
        connector.to_gpu(one.objects(1)[0], 0, 1, slot_mapping=torch.tensor([0]))


def test_an_unknown_layout_is_refused_at_registration(one: Rig) -> None:
    connector = VLLMPagedMemGPUConnectorV2(one.kv.spec)
    with pytest.raises(UnknownLayout):
        connector.initialize_kvcaches_ptr(kvcaches=[torch.empty(10, 2, 8, 33, dtype=torch.bfloat16)] * 3)
    assert connector.path == "none"


@pytest.mark.parametrize("store", [True, False])
def test_bad_calls_are_named_and_write_nothing(one: Rig, store: bool) -> None:
    move = one.connector.batched_from_gpu if store else one.connector.batched_to_gpu
    slots = torch.arange(40)
    full, part = one.objects(16, 5)
    other = rig("LBHNC", VLLMPagedMemGPUConnectorV2, torch.float32)
    cases = [
        (([full, part], [0, 16], [16, 22], slots), r"KV_LT2D \[3, 5, 2, 32\].* for the tokens 16 to 22"),
        (([full], [0], [16, 22], slots), "1 memory objects, 1 starts and 2 ends"),
        (([full, part], [0, 16], [16, 21], slots.int()), "a slot mapping of torch.int32"),
        (
            ([full, part], [0, 16], [16, 21], slots[:20]),
            "chunk 1 spans tokens 16 to 21; the slot mapping has 20",
        ),
        (([full, part], [0, 16], [16, 21], slots + 60), r"slot_mapping\[20\] is 80"),
        ((other.objects(16), [0], [16], slots), "of torch.float32 for the tokens"),
    ]
    pages, payload = one.kv.snapshot(), [bytes(obj.buffer) for obj in (full, part)]
    for (objs, starts, ends, mapping), text in cases:
        with pytest.raises(ValueError, match=text):
            move(objs, starts, ends, slot_mapping=mapping)
    assert all(map(torch.equal, one.kv.snapshot(), pages))
    assert [bytes(obj.buffer) for obj in (full, part)] == payload
    other.close()
