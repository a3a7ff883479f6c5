# SPDX-License-Identifier: Apache-2.0
"""Engines, configurations and faults to simulate, drawn at random."""

from __future__ import annotations

import random
from dataclasses import replace

from kvcache.config.tiers import WriteMode
from tests.simulator.engine import Shape
from tests.simulator.world import Faults


def random_shape(dice: random.Random) -> Shape:
    """Small pools and tiers, so that preemption and eviction are frequent."""
    chunk_size = dice.choice((16, 16, 32))
    block_size = dice.choice((4, 8, 16))
    depth = dice.choice((1, 1, 2))
    layers = dice.choice(((1,), (2,), (2,), (1, 3), (2, 1, 2)))
    ranks = dice.choice((1, 1, 2, 3) if len(layers) == 1 else (1, 1, 2))
    behind = dice.random() < 0.6
    tokens_in_pool = dice.choice((160, 320, 640))
    loading = dice.choice(("Auto", "Always", "Never"))
    extra = {
        "save_decode_cache": dice.random() < 0.4,
        "save_unfull_chunk": dice.random() < 0.3,
        "skip_last_n_tokens": dice.choice((0, 0, 0, 1, 9)),
        "min_retrieve_tokens": dice.choice((0, 0, 0, 1, 20)),
        "async_loading": loading,
    }
    mla = dice.random() < 0.3
    return Shape(
        block_size=block_size,
        chunk_size=chunk_size,
        num_blocks=tokens_in_pool // block_size + 1,
        tier_chunks=dice.choice((3, 8, 20, 100)),
        budget=dice.choice((5, 17, 48, 200)),
        max_seqs=dice.choice((1, 3, 6)),
        depth=depth,
        ranks=ranks,
        layers=layers,
        mla=mla,
        heads=1 if mla else dice.choice((1, 2)),
        behind=behind,
        whole_pages=not behind and dice.random() < 0.5,
        prefix_caching=dice.random() < 0.8,
        role=dice.choice(("kv_both", "kv_both", "kv_both", "kv_producer", "kv_consumer")),
        broken_rank=dice.randrange(ranks * len(layers)) if dice.random() < 0.05 else None,
        # The connector is off for drafts beside a pipeline.
        drafts=dice.choice((0, 0, 3)) if depth == 1 and len(layers) == 1 else 0,
        below=random_below(dice),
        mixed_loads=loading == "Auto",
        extra=tuple(extra.items()),
    )


def random_below(dice: random.Random) -> tuple[tuple[WriteMode, bool], ...]:
    """None, a disk, a remote, or both."""
    disk: tuple[WriteMode, bool] = (dice.choice(("Through", "Back")), True)
    remote: tuple[WriteMode, bool] = (dice.choice(("Through", "Through", "Back")), False)
    return dice.choice(((), (disk,), (remote,), (disk, remote)))


def random_case(dice: random.Random) -> tuple[Shape, Faults]:
    """An engine and its faults."""
    shape, faults = random_shape(dice), random_faults(dice)
    if shape.depth > 1 and (faults.copy or faults.plan or faults.vanish or faults.hooks):
        # vLLM 0.32 that schedules asynchronously goes on with the token of a step whose load failed, unless
        # the request waited for the load outside of the batch: test_simulator shows it.
        shape = replace(shape, mixed_loads=False, extra=(*shape.extra, ("async_loading", "Always")))
    return shape, faults


def random_faults(dice: random.Random) -> Faults:
    """None at all, or one or several kinds."""

    def rate() -> float:
        return dice.choice((0.0, 0.0, 0.02, 0.2))

    if dice.random() < 0.3:
        return Faults()
    return Faults(
        copy=rate(),
        lookup=rate(),
        plan=rate() / 5,
        vanish=rate(),
        slow=rate(),
        hang=rate(),
        hooks=rate(),
        report=rate(),
    )
