# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from kvcache.gpu_connector.transfer import SHORT_LOAD_S, TransferWay, Way, group_layers, way_by_length

_MIB = 1 << 20


@pytest.mark.parametrize(
    ("chunks", "token_bytes", "expected"),
    [
        # An 8B model's 4 KiB a token and layer: a slot of 16 MiB holds 16 layers of a chunk.
        (32, 4096, 8),
        (128, 4096, 4),
        # Of its coded rows it holds 19: two pieces of 9, or of 4 four.
        (32, 3328, 9),
        (128, 3328, 4),
        # So short that all layers come at once, cut by the slots alone.
        (8, 3328, 40),
        (1, 4096, 256),
    ],
)
def test_layers_of_a_group_fill_a_slot(chunks: int, token_bytes: int, expected: int) -> None:
    for num_layers in (3, 32, 300):
        group = group_layers([256] * chunks, token_bytes, 16 * _MIB, num_layers)
        assert group == min(expected, num_layers)


def test_a_load_of_nothing_has_a_group_too() -> None:
    assert group_layers([], 4096, 16 * _MIB, 32) == 32


def test_loads_that_are_over_before_the_model_is_launched_go_the_way_of_few_calls() -> None:
    short, other = TransferWay(Way.DIRECT, 16, bytes_per_s=50e9), TransferWay(Way.STAGED, 8, bytes_per_s=54e9)
    longest = int(50e9 * SHORT_LOAD_S)
    assert way_by_length(longest, short, other) is short
    assert way_by_length(longest + 1, short, other) is other
    assert way_by_length(1, TransferWay(Way.STAGED, 4), other) is other, "nothing was measured"
