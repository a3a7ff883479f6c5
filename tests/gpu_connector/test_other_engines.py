# SPDX-License-Identifier: Apache-2.0
"""The XPU connector (torch operations, here on the CPU) and the connectors for SGLang's pools."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kvcache import lmc_ops
from kvcache.gpu_connector.base import layer_slices
from kvcache.gpu_connector.layout import UnknownLayout
from kvcache.gpu_connector.paged import VLLMPagedMemGPUConnectorV2
from kvcache.gpu_connector.sglang import PoolSpec, SGLangGPUConnector, SGLangLayerwiseGPUConnector
from kvcache.gpu_connector.xpu import VLLMGPUConnectorXPU
from kvcache.memory.allocator import ChunkAllocator, KVShape
from kvcache.memory.objects import MemoryObj
from kvcache.memory.region import HostRegion
from tests.csrc.layouts import DTYPES, LAYOUTS, random_slots
from tests.gpu_connector.rigs import LAYERS, rig, slices


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_xpu_moves_what_the_native_connector_moves(layout: str, dtype: torch.dtype) -> None:
    made = rig(layout, VLLMGPUConnectorXPU, dtype)
    native = VLLMPagedMemGPUConnectorV2(made.kv.spec)
    native.initialize_kvcaches_ptr(kvcaches=made.kv.tensors)
    slots = random_slots(made.kv.slots, 25, 8, skip=0.15)
    objs, twins = made.objects(16, 9), made.objects(16, 9)
    for obj, twin in zip(objs, twins, strict=True):
        twin.tensor.view(torch.uint8).copy_(obj.tensor.view(torch.uint8))
    spans = ([0, 16], [16, 25])
    assert made.connector.batched_from_gpu(objs, *spans, slot_mapping=slots).done()
    native.batched_from_gpu(twins, *spans, slot_mapping=slots)
    assert [bytes(obj.buffer) for obj in objs] == [bytes(twin.buffer) for twin in twins]

    before = made.kv.snapshot()
    for obj in objs:
        obj.tensor.view(torch.uint8).random_(0, 256)
    native.batched_to_gpu(objs, *spans, slot_mapping=slots)
    expected = made.kv.snapshot()
    native_pages = [view.clone() for view in made.kv.views]
    for view, rows in zip(made.kv.views, before, strict=True):
        view.copy_(rows.view(*view.shape[:4], -1))
    made.connector.batched_to_gpu(objs, *spans, slot_mapping=slots.numpy())
    assert all(map(torch.equal, made.kv.snapshot(), expected))
    assert all(map(torch.equal, made.kv.views, native_pages))
    assert list(made.connector.get_shape(5)) == list(native.get_shape(5))
    made.close()


def test_xpu_refuses_what_the_native_connector_refuses() -> None:
    made = rig("2BNHD", VLLMGPUConnectorXPU)
    (obj,) = made.objects(16)
    before = made.kv.snapshot()
    with pytest.raises(ValueError, match=r"slot_mapping\[3\] is 80; slots from 0 to 79"):
        made.connector.to_gpu(obj, 0, 16, slot_mapping=torch.arange(16) + 77)
    with pytest.raises(ValueError, match="for the tokens 0 to 15"):
        made.connector.from_gpu(obj, 0, 15, slot_mapping=torch.arange(16))
    assert all(map(torch.equal, made.kv.snapshot(), before))
    connector = VLLMGPUConnectorXPU(made.kv.spec)
    assert connector.path == "none"
    with pytest.raises(RuntimeError, match="not registered"):
        connector.to_gpu(obj, 0, 16, slot_mapping=torch.arange(16))
    with pytest.raises(UnknownLayout):
        connector.initialize_kvcaches_ptr(kvcaches=[torch.zeros(3)])
    with pytest.raises(UnknownLayout, match="no KV tensors were given"):
        connector.initialize_kvcaches_ptr(kvcaches=[])
    with pytest.raises(ValueError, match="1 memory objects, 2 starts and 1 ends"):
        made.connector.batched_to_gpu([obj], [0, 1], [16], slot_mapping=torch.arange(16))
    with pytest.raises(ValueError, match="chunk 0 spans tokens 0 to 16; the slot mapping has 15"):
        made.connector.batched_to_gpu([obj], [0], [16], slot_mapping=torch.arange(15))
    made.close()


SLOTS = 90


def pools(dtype: torch.dtype, *, padded: bool = False) -> list[torch.Tensor]:
    """The key pools of all layers, then the value pools: random bytes, [slots, 3 heads, 20]."""
    width = (20 + 4 * padded) * dtype.itemsize
    made = [torch.randint(0, 256, (SLOTS, 3, width), dtype=torch.uint8) for _ in range(2 * LAYERS)]
    return [pool[..., : 20 * dtype.itemsize].view(dtype) for pool in made]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def chunk_objects(allocator: ChunkAllocator, *tokens: int) -> list[MemoryObj]:
    objs = [allocator.allocate(count) for count in tokens]
    for obj in objs:
        assert obj is not None
        obj.tensor.view(torch.uint8).random_(0, 256)
    return [obj for obj in objs if obj is not None]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["bulk", "layerwise", "layerwise direct"])
def test_sglang_pools(kind: str, dtype: torch.dtype, padded: bool) -> None:
    caches = pools(dtype, padded=padded)
    spec = PoolSpec(num_kv_heads=3, head_size=20, dtype=dtype)
    bulk = SGLangGPUConnector(spec)
    layerwise = SGLangLayerwiseGPUConnector(spec, use_gpu=kind == "layerwise")
    for connector in (bulk, layerwise):
        connector.initialize_kvcaches_ptr(kvcaches=caches)
    allocator = ChunkAllocator(HostRegion(1 << 20, pin="Disabled"), KVShape.of(bulk, 16))
    objs = chunk_objects(allocator, 16, 7)
    slots, starts, ends = torch.randperm(SLOTS)[:23], [0, 16], [16, 23]
    slots[[3, 15, 22]] = -1
    kept = slots >= 0
    poison = [as_bytes(obj.tensor).clone() for obj in objs]
    if kind == "bulk":
        bulk.batched_from_gpu(objs, starts, ends, slot_mapping=slots)
    else:
        steps = list(layerwise.batched_from_gpu(layer_slices(objs, LAYERS), starts, ends, slot_mapping=slots))
        assert len(steps) == LAYERS + 1
    for obj, old, start, end in zip(objs, poison, starts, ends, strict=True):
        mine, some = slots[start:end], kept[start:end]
        for layer in range(LAYERS):
            for plane in range(2):
                expected = old[layer, :, plane].clone()
                expected[some] = as_bytes(caches[plane * LAYERS + layer][mine[some]]).view(
                    int(some.sum()), -1
                )
                assert torch.equal(as_bytes(obj.layer(layer)[:, plane]), expected)

    for obj in objs:
        obj.tensor.view(torch.uint8).random_(0, 256)
    before = [as_bytes(pool).clone() for pool in caches]
    if kind == "bulk":
        bulk.batched_to_gpu(objs, starts, ends, slot_mapping=slots)
    else:
        loads = layerwise.batched_to_gpu(starts, ends, slot_mapping=slots)
        next(loads)
        for layer in range(LAYERS):
            loads.send(slices(objs, layer))
        next(loads)
    for layer in range(LAYERS):
        for plane in range(2):
            expected = before[plane * LAYERS + layer].view(SLOTS, -1)
            for obj, start, end in zip(objs, starts, ends, strict=True):
                mine, some = slots[start:end], kept[start:end]
                expected[mine[some]] = as_bytes(obj.layer(layer)[:, plane])[some]
            assert torch.equal(as_bytes(caches[plane * LAYERS + layer]).view(SLOTS, -1), expected)
    allocator.close()


def test_sglang_mla_pool() -> None:
    caches = [torch.randn(SLOTS, 1, 576) for _ in range(LAYERS)]
    connector = SGLangGPUConnector(PoolSpec(num_kv_heads=1, head_size=576, dtype=torch.float32, use_mla=True))
    connector.initialize_kvcaches_ptr(kvcaches=caches)
    assert list(connector.get_shape(4)) == [LAYERS, 4, 576]
    allocator = ChunkAllocator(HostRegion(1 << 20, pin="Disabled"), KVShape.of(connector, 16))
    (obj,) = chunk_objects(allocator, 5)
    slots = torch.tensor([3, 88, 0, -1, 41])
    kept = obj.layer(2)[3].clone().view(torch.uint8)
    connector.from_gpu(obj, 0, 5, slot_mapping=slots)
    assert torch.equal(obj.layer(1)[[0, 1, 2, 4]], caches[1][slots[[0, 1, 2, 4]], 0])
    assert torch.equal(obj.layer(2)[3].view(torch.uint8), kept)
    allocator.close()


@pytest.mark.parametrize(
    ("caches", "text"),
    [
        ([], "0 pools"),
        ([torch.zeros(9, 3, 20)] * 3, "3 pools"),
        ([torch.zeros(9, 3, 21)] * 2, r"pool 0 is \[9, 3, 21\]"),
        ([torch.zeros(9, 3, 20).half()] * 2, "float16"),
        ([torch.zeros(9, 3, 40)[..., ::2]] * 2, "pool 0"),
        ([torch.zeros(9, 3, 20), torch.zeros(8, 3, 20)], "pool 1 is not like pool 0"),
        ([torch.zeros(9, 3, 20)] * 2, "two pools share their memory"),
        (
            [torch.zeros(9, 3, 20, dtype=torch.int32)] * 2,
            r"of torch\.int32; float64, float32, bfloat16, .* accepted",
        ),
    ],
)
def test_pools_that_are_not_as_declared(caches: list[torch.Tensor], text: str) -> None:
    connector = SGLangGPUConnector(PoolSpec(num_kv_heads=3, head_size=20, dtype=torch.float32))
    with pytest.raises(UnknownLayout, match=text):
        connector.initialize_kvcaches_ptr(kvcaches=caches)


@pytest.mark.parametrize("token_major", [True, False])
def test_sglang_kernels_of_the_notes(token_major: bool) -> None:
    keys, values = torch.randn(SLOTS, 3, 20), torch.randn(SLOTS, 3, 20)
    slots = torch.randperm(SLOTS)[:11]
    packed = torch.zeros(11, 2, 60) if token_major else torch.zeros(2, 11, 60)
    lmc_ops.single_layer_kv_transfer_sgl(packed, keys, values, slots, True, token_major)
    for plane, pool in enumerate((keys, values)):
        assert torch.equal(packed[:, plane] if token_major else packed[plane], pool[slots].view(11, 60))
    packed.normal_()
    lmc_ops.single_layer_kv_transfer_sgl(packed, keys, values, slots, False, token_major)
    assert torch.equal(values[slots].view(11, 60), packed[:, 1] if token_major else packed[1])
    with pytest.raises(ValueError, match="they must be alike"):
        lmc_ops.single_layer_kv_transfer_sgl(packed, keys, values[:, :2], slots, False, token_major)
    with pytest.raises(ValueError, match=r"\[slots, H, D\]"):
        lmc_ops.single_layer_kv_transfer_sgl(packed, keys[0], values[0], slots, False, token_major)


@pytest.mark.parametrize("token_major", [True, False])
def test_unilateral_kernel_of_the_notes(token_major: bool) -> None:
    keys, values = ([torch.randn(SLOTS, 24) for _ in range(2)] for _ in range(2))
    key_ptrs, value_ptrs = (torch.tensor([pool.data_ptr() for pool in side]) for side in (keys, values))
    slots = torch.randperm(SLOTS)[:11]
    packed = torch.zeros(2, 11, 2, 24) if token_major else torch.zeros(2, 2, 11, 24)
    move = partial(
        lmc_ops.multi_layer_kv_transfer_unilateral,
        packed,
        key_ptrs,
        value_ptrs,
        slots,
        torch.device("cpu"),
        SLOTS,
        token_major=token_major,
    )
    move(True)
    for layer in range(2):
        for plane, side in enumerate((keys, values)):
            got = packed[layer, :, plane] if token_major else packed[plane, layer]
            assert torch.equal(got, side[layer][slots])
    packed.normal_()
    move(False)
    assert torch.equal(keys[1][slots], packed[1, :, 0] if token_major else packed[0, 1])
