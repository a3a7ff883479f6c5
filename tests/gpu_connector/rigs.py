# SPDX-License-Identifier: Apache-2.0
"""Pages, a connector and memory for its objects, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvcache.gpu_connector.layout import LayerSpec
from kvcache.memory.allocator import ChunkAllocator, KVShape
from kvcache.memory.objects import LayerSlice, MemoryObj
from kvcache.memory.region import HostRegion
from tests.csrc.layouts import PagedKV, make_kv

LAYERS, CHUNK = 3, 16


@dataclass
class Rig:
    kv: PagedKV
    connector: Any
    allocator: ChunkAllocator

    def objects(self, *tokens: int) -> list[MemoryObj]:
        """Memory objects full of random bytes."""
        objs = [self.allocator.allocate(count) for count in tokens]
        for obj in objs:
            assert obj is not None
            obj.tensor.view(torch.uint8).random_(0, 256)
        return [obj for obj in objs if obj is not None]

    def rows(self, obj: MemoryObj, layer: int) -> torch.Tensor:
        """uint8 [T, planes, row] of one layer; no copy."""
        return obj.layer(layer).view(torch.uint8).view(obj.num_tokens, self.connector.kv_planes, -1)

    def close(self) -> None:
        self.allocator.close()


def rig(
    layout: str, make: Callable[[LayerSpec], Any], dtype: torch.dtype = torch.bfloat16, *, head_size: int = 16
) -> Rig:
    kv = make_kv(layout, layers=LAYERS, blocks=10, block_size=8, heads=2, head_size=head_size, dtype=dtype)
    connector = make(kv.spec)
    connector.initialize_kvcaches_ptr(kvcaches=kv.tensors)
    region = HostRegion(1 << 20, pin="Disabled")
    return Rig(kv, connector, ChunkAllocator(region, KVShape.of(connector, CHUNK)))


def slices(objs: list[MemoryObj], layer: int) -> list[LayerSlice]:
    return [obj.slice(layer) for obj in objs]
