# SPDX-License-Identifier: Apache-2.0
"""Options and tables of the policy bench."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcache.bench.policy import ALWAYS, Replayed, Trace, replay
from kvcache.bench.policy_bounds import clairvoyant, unbounded
from kvcache.bench.policy_traces import GENERATORS, read_trace, synthetic_trace
from kvcache.config.tiers import CpuTierConfig
from kvcache.storage.policies import ADMISSIONS, POLICIES

_SHARES = "1%,2%,5%,10%,20%,40%"
_CLAIRVOYANT = "clairvoyant"
_UNBOUNDED = "unbounded"


def add_parser(parsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds the policy bench to the command line."""
    parser = parsers.add_parser("policy", help="hit rates of eviction and admission policies on a trace")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", type=Path, metavar="FILE", help="JSON lines with `hash_ids`, or gzip of them"
    )
    source.add_argument("--synthetic", choices=sorted(GENERATORS), help="make the trace")
    parser.add_argument("--seed", type=int, default=0, help="of the trace that is made; default: %(default)s")
    parser.add_argument(
        "--capacity",
        default=_SHARES,
        help="blocks, or shares of the trace's different ones, separated by commas; default: %(default)s",
    )
    parser.add_argument("--eviction", default=",".join(POLICIES), help="default: %(default)s")
    parser.add_argument("--admission", default=",".join([ALWAYS, *ADMISSIONS]), help="default: %(default)s")
    return parser


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Replays the trace that the options name; prints the rates of each pair of policies as they come, and
    returns all figures.

    Raises:
        ValueError: an option or the trace is no good.
    """
    evictions = _names("--eviction", options.eviction, list(POLICIES))
    admissions = _names("--admission", options.admission, [ALWAYS, *ADMISSIONS])
    if options.trace is not None:
        requests = read_trace(options.trace)
    else:
        requests = synthetic_trace(options.synthetic, options.seed)
    trace = Trace(requests)
    capacities = [_blocks(text, trace.blocks) for text in options.capacity.split(",")]
    summary = {
        "requests": len(trace.requests),
        "reads": trace.reads,
        "blocks": trace.blocks,
        "default": f"{CpuTierConfig().eviction}+{CpuTierConfig().admission}",
    }
    print(" ".join(f"{name}={value}" for name, value in summary.items()))  # noqa: T201
    print("\t".join(["hit % / writes a read", *options.capacity.split(",")]), flush=True)  # noqa: T201
    rows = []
    for name, results in _results(trace, capacities, evictions, admissions):
        cells = [f"{100 * result.hit_rate:.2f}/{result.writes_per_read:.2f}" for result in results]
        print("\t".join([name, *cells]), flush=True)  # noqa: T201
        rows += [
            {
                "policy": name,
                "capacity": capacity,
                "hit_rate": result.hit_rate,
                "writes_per_read": result.writes_per_read,
            }
            for capacity, result in zip(capacities, results, strict=True)
        ]
    return summary | {"policy": rows}


def _results(
    trace: Trace, capacities: list[int], evictions: list[str], admissions: list[str]
) -> Iterator[tuple[str, list[Replayed]]]:
    for eviction in evictions:
        for admission in admissions:
            results = [replay(trace, capacity, eviction, admission) for capacity in capacities]
            yield f"{eviction}+{admission}", results
    yield _CLAIRVOYANT, [clairvoyant(trace, capacity) for capacity in capacities]
    yield _UNBOUNDED, [unbounded(trace) for _ in capacities]


def _names(option: str, text: str, known: list[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: no policy is named {name!r}; there are {', '.join(known)}")
    return names


def _blocks(text: str, all_blocks: int) -> int:
    try:
        blocks = int(float(text[:-1]) / 100 * all_blocks) if text.endswith("%") else int(text)
    except (ValueError, OverflowError):
        raise ValueError(
            f"--capacity: {text!r} is neither a number of blocks nor a share such as 5%"
        ) from None
    if blocks < 1 or blocks > all_blocks:
        raise ValueError(f"--capacity: {text} of {all_blocks} blocks is {blocks}; give 1 to {all_blocks}")
    return blocks
