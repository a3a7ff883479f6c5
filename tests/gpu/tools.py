# SPDX-License-Identifier: Apache-2.0
"""What the checks share."""

from __future__ import annotations

from unittest import mock

import numpy as np
import torch

from kvcache.gpu_connector.interface import Completion
from kvcache.gpu_connector.transfer import Chunks, PageTransfer
from tests.csrc.layouts import PagedKV

GPU = "cuda:0"
LAYERS = 3


def pinned(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.uint8, pin_memory=True).random_(0, 256)


def addresses(chunks: list[torch.Tensor]) -> np.ndarray:
    return np.array([chunk.data_ptr() for chunk in chunks], dtype=np.uint64)


def in_groups_of_layers(transfer: PageTransfer, chunks: Chunks) -> Completion:
    """Loads by layer in as many groups as if much more were to be loaded."""
    with mock.patch("kvcache.gpu_connector.transfer._GROUP_BYTES", 1):
        load = transfer.load_by_layer(chunks)
    assert len(load.first_layers) > 1
    return load


def same_pages(host: PagedKV, device: PagedKV) -> bool:
    torch.cuda.synchronize()
    return torch.equal(host.storage, device.storage.cpu())
