# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.simulator --ops N --seed S`: simulates engines one after another until N operations are
done.

It ends with the first thing that must not be, naming the seed that shows it again (`--ops` of one engine).
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")

from image.models.folder import made_once
from tests.conftest import MODELS
from tests.models import tiny_llama
from tests.simulator.cases import random_case
from tests.simulator.checks import Broken
from tests.simulator.world import World

OPERATIONS_OF_ONE = 500
_REPORT_EVERY_S = 10.0


def simulate(seed: int, operations: int, model: Path) -> Counter[str]:
    """One engine from its start to its end; what happened in it. Raises Broken."""
    dice = random.Random(seed)
    world = World(*random_case(dice), dice, model)
    try:
        world.run(operations)
    finally:
        world.close()
    return world.seen


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--ops", type=int, default=1_000_000, help="operations in all (default %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first engine; each next one's is one more"
    )
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    model = MODELS / "tiny-llama"
    made_once(model, tiny_llama.made_from(), tiny_llama.make)
    seen: Counter[str] = Counter()
    done, started = 0, time.monotonic()
    report_at = started + _REPORT_EVERY_S
    for seed in itertools.count(arguments.seed):
        if done >= arguments.ops:
            break
        operations = min(OPERATIONS_OF_ONE, arguments.ops - done)
        try:
            seen += simulate(seed, operations, model)
        except (Broken, Exception) as error:
            traceback.print_exc()
            print(f"seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
            print(f"again: python -m tests.simulator --ops {operations} --seed {seed}", file=sys.stderr)
            return 1
        done += operations
        if time.monotonic() > report_at:
            report_at += _REPORT_EVERY_S
            print(f"{done} operations, {done / (time.monotonic() - started):.0f} a second", flush=True)
    print(f"{done} operations in {time.monotonic() - started:.0f} s, nothing wrong")
    print(", ".join(f"{name}: {count}" for name, count in sorted(seen.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
