# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.memory.allocator import ChunkAllocator, KVShape
from kvcache.memory.formats import MemoryFormat
from kvcache.memory.objects import MemoryObj
from kvcache.memory.region import HostRegion

SHAPE = KVShape(num_layers=4, kv_planes=2, hidden=512, dtype=torch.float32, chunk_tokens=64)
"""16 KiB a token, 1 MiB a chunk in 16 units of 64 KiB."""


@pytest.fixture
def allocator() -> Iterator[ChunkAllocator]:
    one = ChunkAllocator(HostRegion(4 * SHAPE.chunk_bytes, pin="Disabled"), SHAPE)
    yield one
    one.close()


def taken(allocator: ChunkAllocator, tokens: int) -> MemoryObj:
    obj = allocator.allocate(tokens)
    assert obj is not None
    return obj


def test_shapes() -> None:
    assert (SHAPE.token_bytes, SHAPE.chunk_bytes) == (16384, 1 << 20)
    assert SHAPE.fmt is MemoryFormat.KV_LT2D
    assert list(SHAPE.shape(7)) == [4, 7, 2, 512]
    mla = KVShape(num_layers=61, kv_planes=1, hidden=576, dtype=torch.bfloat16, chunk_tokens=256)
    assert (mla.token_bytes, mla.fmt, list(mla.shape(3))) == (61 * 1152, MemoryFormat.KV_LTD, [61, 3, 576])


def test_an_object_is_a_view_of_the_region(allocator: ChunkAllocator) -> None:
    obj, other = taken(allocator, 64), taken(allocator, 5)
    obj.tensor.copy_(torch.randn(4, 64, 2, 512))
    other.tensor.fill_(3.0)
    assert list(other.tensor.shape) == [4, 5, 2, 512]
    assert (obj.num_tokens, other.num_tokens, other.nbytes) == (64, 5, 5 * 16384)
    assert torch.equal(obj.layer(2), obj.tensor[2])
    assert list(obj.layer(2).shape) == [64, 2, 512]
    assert obj.tensor.data_ptr() == obj.data_ptr == obj.metadata.address
    assert (obj.metadata.shape, obj.metadata.size) == (obj.tensor.shape, obj.tensor.nbytes)
    assert bytes(obj.buffer[:16]) == obj.tensor.view(torch.uint8).flatten()[:16].numpy().tobytes()
    other.buffer[0:4] = b"\0\0\0\0"
    assert other.tensor[0, 0, 0, 0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    shape = KVShape(num_layers=3, kv_planes=2, hidden=40, dtype=dtype, chunk_tokens=16)
    allocator = ChunkAllocator(HostRegion(1 << 20, pin="Disabled"), shape)
    obj = taken(allocator, 9)
    assert (obj.tensor.dtype, list(obj.tensor.shape)) == (dtype, [3, 9, 2, 40])
    allocator.close()


def test_full_chunks_fill_the_whole_region(allocator: ChunkAllocator) -> None:
    objs = [taken(allocator, 64) for _ in range(4)]
    assert allocator.allocate(1) is None
    assert allocator.used_bytes == allocator.capacity_bytes == 4 << 20
    assert len({obj.data_ptr for obj in objs}) == 4
    freed = objs[1].data_ptr
    allocator.free(objs[1])
    assert taken(allocator, 64).data_ptr == freed


class _Locking(HostRegion):
    """As on a machine with a GPU: what is not locked yet is not ready."""

    locked = 0

    @property
    def ready_bytes(self) -> int:
        return self.locked


def test_chunks_are_served_from_what_is_locked_while_the_rest_follows() -> None:
    region = _Locking(4 * SHAPE.chunk_bytes, pin="Disabled")
    allocator = ChunkAllocator(region, SHAPE)
    assert allocator.allocate(64) is None
    assert allocator.allocate(1) is None
    region.locked = 2 * SHAPE.chunk_bytes - 1
    first = taken(allocator, 64)
    assert first.data_ptr == allocator.address
    assert allocator.allocate(1) is None, "a slot that is not locked to its end"
    region.locked += 1
    part = taken(allocator, 1)
    assert part.data_ptr == allocator.address + SHAPE.chunk_bytes
    allocator.free(first)
    assert taken(allocator, 64).data_ptr == allocator.address
    assert allocator.allocate(64) is None
    assert allocator.capacity_bytes == 4 * SHAPE.chunk_bytes
    region.locked = 4 * SHAPE.chunk_bytes
    taken(allocator, 64)
    taken(allocator, 64)
    allocator.close()


def test_partial_chunks_share_a_slot(allocator: ChunkAllocator) -> None:
    """4 tokens are one unit; 13 of them and one of 9 tokens (3 units) take one slot of 16."""
    small = [taken(allocator, 4) for _ in range(13)]
    taken(allocator, 9)
    assert allocator.used_bytes == 1 << 20
    for _ in range(3):
        taken(allocator, 64)
    assert allocator.allocate(1) is None
    freed = small[0].data_ptr
    allocator.free(small[0])
    assert taken(allocator, 1).data_ptr == freed


def test_a_freed_object_is_dead(allocator: ChunkAllocator) -> None:
    obj = taken(allocator, 64)
    allocator.free(obj)
    assert not obj.is_valid
    with pytest.raises(ValueError, match="was freed before"):
        allocator.free(obj)
    for use in (lambda: obj.tensor, lambda: obj.buffer, lambda: obj.data_ptr):
        with pytest.raises(RuntimeError, match="was freed"):
            use()
    assert allocator.used_bytes == 0


def test_another_allocators_object_is_refused(allocator: ChunkAllocator) -> None:
    other = ChunkAllocator(HostRegion(1 << 20, pin="Disabled"), SHAPE)
    with pytest.raises(ValueError, match="belongs to another allocator"):
        allocator.free(taken(other, 3))
    other.close()


@pytest.mark.parametrize("tokens", [0, -1, 65])
def test_token_counts_out_of_range(allocator: ChunkAllocator, tokens: int) -> None:
    with pytest.raises(ValueError, match="1 to 64 are accepted"):
        allocator.allocate(tokens)


def test_a_region_below_one_chunk_is_refused() -> None:
    region = HostRegion(SHAPE.chunk_bytes - 1, pin="Disabled")
    with pytest.raises(ValueError, match="holds no chunk: one of 64 tokens takes 1048576 bytes"):
        ChunkAllocator(region, SHAPE)
    region.close()


def test_nothing_works_after_close(allocator: ChunkAllocator) -> None:
    obj = taken(allocator, 64)
    allocator.close()
    allocator.close()
    with pytest.raises(RuntimeError, match="closed"):
        allocator.allocate(1)
    with pytest.raises(RuntimeError, match="closed"):
        _ = obj.tensor


def room_for(tokens: int, base: int, slots: int, live: list[MemoryObj]) -> bool:
    """Whether a slot has that many neighbouring free units (16 a slot, 4 tokens each); found by painting."""
    units = ["."] * (16 * slots)
    for obj in live:
        first = (obj.data_ptr - base) // (SHAPE.chunk_bytes // 16)
        for unit in range(first, first + -(-obj.num_tokens // 4)):
            units[unit] = "x"
    painted = ("".join(units[at : at + 16]) for at in range(0, len(units), 16))
    return any("." * -(-tokens // 4) in slot for slot in painted)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 64), st.integers(0, 1 << 30)), max_size=120),
    st.sampled_from([1, 3, 8]),
)
def test_objects_never_overlap_and_all_memory_comes_back(
    steps: list[tuple[bool, int, int]], slots: int
) -> None:
    region = HostRegion(slots * SHAPE.chunk_bytes, pin="Disabled")
    base = region.address
    allocator = ChunkAllocator(region, SHAPE)
    live: list[tuple[MemoryObj, int]] = []
    for wants, tokens, pick in steps:
        if wants or not live:
            obj = allocator.allocate(tokens)
            if obj is None:
                assert not room_for(tokens, base, slots, [o for o, _ in live])
                continue
            obj.buffer[:8] = obj.buffer[-8:] = len(live).to_bytes(8, "little")
            live.append((obj, len(live)))
        else:
            obj, mark = live.pop(pick % len(live))
            assert bytes(obj.buffer[:8]) == bytes(obj.buffer[-8:]) == mark.to_bytes(8, "little")
            allocator.free(obj)
            live = [(o, i) for i, (o, _) in enumerate(live)]
            for o, i in live:
                o.buffer[:8] = o.buffer[-8:] = i.to_bytes(8, "little")
        spans = sorted((o.data_ptr, o.data_ptr + o.nbytes) for o, _ in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert allocator.num_objects == len(live)
        assert allocator.used_bytes >= sum(o.nbytes for o, _ in live)
        assert allocator.used_bytes <= sum(o.nbytes + (SHAPE.chunk_bytes // 16) for o, _ in live)
    for obj, _ in live:
        allocator.free(obj)
    assert allocator.used_bytes == 0
    whole = [allocator.allocate(64) for _ in range(slots)]
    assert None not in whole, "the units of partial chunks did not become slots again"
    allocator.close()


def test_a_partial_chunk_finds_room_wherever_enough_units_are_together() -> None:
    """Frees every second pair of units of a slot; a run of two is taken before a new slot is opened."""
    allocator = ChunkAllocator(HostRegion(2 * SHAPE.chunk_bytes, pin="Disabled"), SHAPE)
    pairs = [taken(allocator, 8) for _ in range(8)]
    freed = {obj.data_ptr for obj in pairs[::2]}
    for obj in pairs[::2]:
        allocator.free(obj)
    assert {taken(allocator, 7).data_ptr for _ in range(4)} == freed
    allocator.close()


def test_threads() -> None:
    allocator = ChunkAllocator(HostRegion(64 * SHAPE.chunk_bytes, pin="Disabled"), SHAPE)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        held: list[MemoryObj] = []
        for _ in range(400):
            tokens = int(torch.randint(1, 65, (1,), generator=generator))
            obj = allocator.allocate(tokens)
            if obj is not None:
                obj.buffer[:8] = id(obj).to_bytes(8, "little")
                held.append(obj)
            if len(held) > 5:
                last = held.pop(0)
                assert bytes(last.buffer[:8]) == id(last).to_bytes(8, "little")
                allocator.free(last)
        for obj in held:
            allocator.free(obj)

    failed: list[BaseException] = []

    def guarded(seed: int) -> None:
        try:
            work(seed)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert allocator.used_bytes == 0
    allocator.close()
