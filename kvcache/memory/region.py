# SPDX-License-Identifier: Apache-2.0
"""The host memory that chunks are carved from: mapped at once, populated and page-locked in the
background.
"""

from __future__ import annotations

from typing import Literal

import torch

from kvcache import _native

Pinning = Literal["Required", "Preferred", "Disabled"]


class HostRegion:
    """One pre-allocated range of host memory.

    Mapping takes address space only. `prepare` starts a background thread that touches the pages (huge ones
    where the kernel has them) and, on a machine with a GPU, page-locks them piece by piece from the start;
    what is locked may be used while the rest follows.

    Args:
        capacity: bytes.
        pin: `Preferred` goes on with pageable memory where locking fails, with `Required` only locked memory
            is ever ready, `Disabled` locks nothing.
        populate: touch the pages in the background; else each is had when it is first used.
        numa_node: where the pages should lie; -1 leaves it to the kernel.
        hold: lock nothing before `start_pinning`: no thread may be capturing a CUDA graph meanwhile.
        device: CUDA's number of the GPU whose copies the memory is for.

    Raises:
        ValueError: a capacity of 0.
        RuntimeError: the kernel's reason why the range cannot be mapped.
    """

    def __init__(
        self,
        capacity: int,
        pin: Pinning = "Preferred",
        *,
        populate: bool = True,
        numa_node: int = -1,
        hold: bool = False,
        device: int = 0,
    ) -> None:
        self.native = _native.HostRegion(capacity)
        self.capacity_bytes = capacity
        self._pin = pin
        self._populate = populate
        self._numa_node = numa_node
        self._hold = hold
        self._device = device

    def prepare(self, granule: int) -> None:
        """Starts the background work; `granule`: bytes of which no multiple may straddle two locked
        pieces.
        """
        self.native.prepare(
            self._pin != "Disabled",
            granule,
            self._pin == "Required",
            self._numa_node,
            self._populate,
            self._hold,
            self._device,
        )

    def start_pinning(self) -> None:
        """Lets a held region be page-locked. Idempotent."""
        self.native.start_pinning()

    @property
    def address(self) -> int:
        return self.native.address

    @property
    def state(self) -> str:
        """`Pageable`, `Pinning`, `Pinned` or `PinningFailed`."""
        return self.native.state

    @property
    def reason(self) -> str:
        """Why the memory is not page-locked; empty when it is or when nobody asked for it."""
        return self.native.reason

    @property
    def ready_bytes(self) -> int:
        """Bytes from the start that may be used now."""
        return self.native.ready_bytes

    def as_tensor(self) -> torch.Tensor:
        """The whole region as uint8; no copy. Must not be used after `close`."""
        return torch.frombuffer(self.native, dtype=torch.uint8)

    def close(self) -> None:
        """Unlocks and unmaps. No copy may run and no tensor of it may be used any more. Idempotent."""
        self.native.close()
