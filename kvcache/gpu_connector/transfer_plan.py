# SPDX-License-Identifier: Apache-2.0
"""What is copied, and how: plain data that transfers, ways and feeds share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

SlotMapping = torch.Tensor | npt.NDArray[np.int64]
"""int64 [tokens]. An array goes the faster way: torch takes its time for each look at a tensor."""


class Way(Enum):
    """How bytes cross the link."""

    HOST = "host"
    """Both sides are host memory."""
    STAGED = "staged"
    """Gathered on a few multiprocessors into a ring in device memory, then one DMA; the other way round to
    load.
    """
    DIRECT = "direct"
    """A kernel reads or writes page-locked host memory itself."""
    STRIDED_DMA = "strided_dma"
    """The copy engine walks pages and chunks by itself, without a multiprocessor. Of coded rows a kernel on
    all of them follows, once."""


@dataclass(frozen=True)
class TransferWay:
    """The way of one direction, and what it reached when it was measured.

    Attributes:
        blocks: thread blocks of a launch: the multiprocessors in use; 0 where none is while bytes move.
        bytes_per_s: measured at start-up; 0.0 where nothing was measured.
        link_bytes_per_s: a plain page-locked copy in the same run.
    """

    way: Way
    blocks: int = 0
    bytes_per_s: float = 0.0
    link_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Chunks:
    """Chunks of memory and their tokens.

    Attributes:
        addresses: uint64, of each chunk.
        starts: int64, each chunk's first index into `slots`.
        ends: int64, one past its last.
        slots: int64, -1 for a token that is left out.
    """

    addresses: npt.NDArray[np.uint64]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]

    def from_layer(self, layer: int, token_bytes: int) -> Chunks:
        """The same chunks without their first layers.

        Args:
            token_bytes: of one token's KV in one layer.
        """
        skipped = (self.ends - self.starts).astype(np.uint64) * np.uint64(layer * token_bytes)
        return Chunks(self.addresses + skipped, self.starts, self.ends, self.slots)

    def part(self, first: int, last: int) -> Chunks:
        """The chunks `[first, last)`, with no more slots than they span: each call copies those."""
        starts, ends = self.starts[first:last], self.ends[first:last]
        low, high = int(starts.min()), int(ends.max())
        return Chunks(self.addresses[first:last], starts - low, ends - low, self.slots[low:high])

    @staticmethod
    def joined(parts: Sequence[Chunks]) -> Chunks:
        """All chunks of several parts, in their order."""
        offsets = np.cumsum([0, *(len(part.slots) for part in parts)])[:-1]
        return Chunks(
            np.concatenate([part.addresses for part in parts]),
            np.concatenate([part.starts + at for part, at in zip(parts, offsets, strict=True)]),
            np.concatenate([part.ends + at for part, at in zip(parts, offsets, strict=True)]),
            np.concatenate([part.slots for part in parts]),
        )

    def arguments(self) -> tuple[Any, Any, Any, Any]:
        return self.addresses, self.starts, self.ends, self.slots
