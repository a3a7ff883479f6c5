# SPDX-License-Identifier: Apache-2.0
"""A slab allocator for chunks: equal slots in one region, and runs of a slot's units for partial chunks.

Every operation takes bounded time, whatever the number of chunks. Full chunks cannot fragment the region;
partial chunks share slots and waste less than a unit each (at most a sixteenth of a slot).
"""

from __future__ import annotations

import threading

import torch

from kvcache.memory.formats import KVShape
from kvcache.memory.objects import MemoryObj
from kvcache.memory.region import HostRegion

__all__ = ["ChunkAllocator", "KVShape"]

_PAGE = 4096
"""Units are whole pages, so that a chunk can be read from and written to disk without a copy."""
_MOST_UNITS = 16
_LEAST_UNIT_BYTES = 16 * _PAGE
"""Below it, rounding units up to pages would waste more than sharing a slot saves."""


class ChunkAllocator:
    """Thread-safe. Owns the region from here on and closes it.

    Args:
        region: where chunks lie; its background work is started here.
        shape: of a chunk.

    Raises:
        ValueError: the region is smaller than one chunk.
    """

    def __init__(self, region: HostRegion, shape: KVShape) -> None:
        self.shape = shape
        self._token_bytes = shape.token_bytes
        self._units = min(_MOST_UNITS, max(1, shape.chunk_bytes // _LEAST_UNIT_BYTES))
        self._unit_bytes = -(-shape.chunk_bytes // (self._units * _PAGE)) * _PAGE
        self._slot_bytes = self._units * self._unit_bytes
        self._num_slots = region.capacity_bytes // self._slot_bytes
        if self._num_slots == 0:
            raise ValueError(
                f"a capacity of {region.capacity_bytes} bytes holds no chunk: one of {shape.chunk_tokens} "
                "tokens takes "
                f"{self._slot_bytes} bytes; raise the capacity or lower chunk_size"
            )
        self._region = region
        self._base = region.as_tensor()
        self._view = memoryview(region.native)
        self.address = region.address
        self._lock = threading.Lock()
        self._fresh = 0  # slots from here on were never used
        self._free: list[int] = []  # whole slots given back, the last one first
        self._shared: dict[int, int] = {}  # slot of partial chunks -> bit mask of its free units
        self._by_run: list[dict[int, None]] = [{} for _ in range(self._units)]  # longest free run -> slots
        self._used_units = 0
        self._objects = 0
        self._closed = False
        region.prepare(self._slot_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots."""
        return self._num_slots * self._slot_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the units that objects hold."""
        return self._used_units * self._unit_bytes

    @property
    def num_objects(self) -> int:
        """Objects that are not freed."""
        return self._objects

    def allocate(self, num_tokens: int) -> MemoryObj | None:
        """Memory for a chunk of `num_tokens` tokens, its content undefined; None when there is no room (now).

        Raises:
            ValueError: fewer than 1 or more than a chunk's tokens.
            RuntimeError: the allocator is closed.
        """
        if not 1 <= num_tokens <= self.shape.chunk_tokens:
            raise ValueError(f"a chunk of {num_tokens} tokens; 1 to {self.shape.chunk_tokens} are accepted")
        units = -(-num_tokens * self._token_bytes // self._unit_bytes)
        with self._lock:
            if self._closed:
                raise RuntimeError("the allocator is closed")
            unit = self._take(units)
            if unit is None:
                return None
            self._used_units += units
            self._objects += 1
        return MemoryObj(self, unit * self._unit_bytes, units, num_tokens)

    def free(self, obj: MemoryObj) -> None:
        """Takes an object's memory back; the object is invalid from here on.

        Raises:
            ValueError: it was freed before, or is another allocator's.
        """
        with self._lock:
            if obj._allocator is not self:
                reason = "was freed before" if obj._allocator is None else "belongs to another allocator"
                raise ValueError(f"the memory object of {obj.num_tokens} tokens {reason}")
            obj._allocator = None
            self._used_units -= obj._units
            self._objects -= 1
            self._give_back(obj._offset // self._unit_bytes, obj._units)

    def close(self) -> None:
        """Unmaps the region: no object may be used any more and no copy may run. Idempotent."""
        with self._lock:
            self._closed = True
            self._base = torch.empty(0, dtype=torch.uint8)
            self._view = memoryview(b"")
        self._region.close()

    # For MemoryObj

    def bytes_at(self, offset: int, size: int) -> torch.Tensor:
        """`size` bytes of the region as uint8; no copy."""
        self._check_open()
        return self._base[offset : offset + size]

    def buffer(self, offset: int, size: int) -> memoryview:
        """`size` bytes of the region; no copy."""
        self._check_open()
        return self._view[offset : offset + size]

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the allocator is closed and its memory unmapped")

    def _take(self, units: int) -> int | None:
        """The first of `units` free units of one slot, now taken."""
        if units == self._units:
            slot = self._take_slot()
            return None if slot is None else slot * self._units
        # The tightest fit keeps long runs for those who need them.
        found = next((slots for slots in self._by_run[units:] if slots), None)
        if found is not None:
            slot = next(iter(found))
            mask = self._shared[slot]
        else:
            fresh = self._take_slot()
            if fresh is None:
                return None
            slot, mask = fresh, (1 << self._units) - 1
        start = _first_run(mask, units)
        self._set_mask(slot, mask, mask & ~(((1 << units) - 1) << start))
        return slot * self._units + start

    def _give_back(self, unit: int, units: int) -> None:
        slot, start = divmod(unit, self._units)
        if units == self._units:
            self._free.append(slot)
            return
        mask = self._shared.get(slot, 0)
        self._set_mask(slot, mask, mask | ((1 << units) - 1) << start)

    def _set_mask(self, slot: int, old: int, new: int) -> None:
        """Files a slot of partial chunks under its longest free run; an empty one is a whole slot again."""
        if slot in self._shared:
            del self._shared[slot]
            self._by_run[_longest_run(old)].pop(slot, None)
        if new == (1 << self._units) - 1:
            self._free.append(slot)
        else:
            self._shared[slot] = new
            self._by_run[_longest_run(new)][slot] = None

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._fresh < self._num_slots and (self._fresh + 1) * self._slot_bytes <= self._region.ready_bytes:
            self._fresh += 1
            return self._fresh - 1
        return None


def _longest_run(mask: int) -> int:
    """The length of the longest run of ones."""
    length = 0
    while mask:
        mask &= mask >> 1
        length += 1
    return length


def _first_run(mask: int, length: int) -> int:
    """The lowest bit at which `length` ones start; the mask must have such a run."""
    starts = mask
    for shift in range(1, length):
        starts &= mask >> shift
    return (starts & -starts).bit_length() - 1
