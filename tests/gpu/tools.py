# SPDX-License-Identifier: Apache-2.0
"""What the checks share."""

from __future__ import annotations

import numpy as np
import torch

from tests.csrc.layouts import PagedKV

GPU = "cuda:0"
LAYERS = 3


def pinned(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.uint8, pin_memory=True).random_(0, 256)


def addresses(chunks: list[torch.Tensor]) -> np.ndarray:
    return np.array([chunk.data_ptr() for chunk in chunks], dtype=np.uint64)


def same_pages(host: PagedKV, device: PagedKV) -> bool:
    torch.cuda.synchronize()
    return torch.equal(host.storage, device.storage.cpu())
