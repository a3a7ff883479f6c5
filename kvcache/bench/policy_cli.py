# SPDX-License-Identifier: Apache-2.0
"""Options and tables of the policy bench."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvcache.bench.policy import ALWAYS, Replayed, Trace, replay
from kvcache.bench.policy_bounds import clairvoyant, unbounded
from kvcache.bench.policy_traces import GENERATORS, read_trace, synthetic_trace
from kvcache.config.tiers import CpuTierConfig
from kvcache.storage.policies import ADMISSIONS, POLICIES

_SHARES = "1%,2%,5%,10%,20%,40%"
_LRU = f"LRU+{ALWAYS}"
_DEFAULT = f"{CpuTierConfig().eviction}+{CpuTierConfig().admission}"
_PAIRS = [
    *(f"{eviction}+{ALWAYS}" for eviction in POLICIES),
    *(f"{eviction}+SecondUse" for eviction in ("LRU", "S3FIFO", "ARC")),
    *(f"{eviction}+TinyLFU" for eviction in ("LRU", "S3FIFO", "ARC")),
    *(f"{eviction}+Adaptive" for eviction in ("LRU", "Adaptive")),
]
_ALL = "all"


def add_parser(
    parsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Adds the policy bench to the command line."""
    parser = parsers.add_parser("policy", help="hit rates of eviction and admission policies on a trace")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", type=Path, metavar="FILE", help="JSON lines with hash_ids, or gzip of them"
    )
    source.add_argument("--synthetic", choices=sorted(GENERATORS), help="make the trace")
    parser.add_argument("--seed", type=int, default=0, help="of the trace that is made; default: %(default)s")
    parser.add_argument(
        "--capacity",
        default=_SHARES,
        help="blocks, or shares of the trace's different ones, separated by commas; default: "
        + _SHARES.replace("%", "%%"),
    )
    parser.add_argument(
        "--policies",
        default=",".join(_PAIRS),
        help=f"EVICTION+ADMISSION, separated by commas, or {_ALL}; default: %(default)s",
    )
    return parser


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Replays the trace that the options name. Prints the rates of each pair of policies as they come, and
    returns all figures.

    Raises:
        ValueError: an option or the trace is no good.
    """
    pairs = _pairs(options.policies)
    if options.trace is not None:
        requests = read_trace(options.trace)
    else:
        requests = synthetic_trace(options.synthetic, options.seed)
    trace = Trace(requests)
    labels = options.capacity.split(",")
    capacities = [_blocks(label, trace.blocks) for label in labels]
    print(f"{len(trace.requests)} requests, {trace.reads} blocks read, {trace.blocks} different")  # noqa: T201
    _print("hit % / writes per read", labels)
    results: dict[str, list[Replayed]] = {}
    for name, (eviction, admission) in pairs.items():
        results[name] = [replay(trace, capacity, eviction, admission) for capacity in capacities]
        _print(name, map(_cell, results[name]))
    bounds = {
        "clairvoyant": [clairvoyant(trace, capacity) for capacity in capacities],
        "unbounded": [unbounded(trace) for _ in capacities],
    }
    for name, row in bounds.items():
        _print(name, map(_cell, row))
    report: dict[str, Any] = {
        "requests": len(trace.requests),
        "reads": trace.reads,
        "blocks": trace.blocks,
        "default": _DEFAULT,
        "policy": [
            {
                "policy": name,
                "capacity": capacity,
                "hit_rate": result.hit_rate,
                "writes_per_read": result.writes_per_read,
            }
            for name, row in (results | bounds).items()
            for capacity, result in zip(capacities, row, strict=True)
        ],
    }
    if _DEFAULT in results:
        best = [max(column, key=lambda result: result.hits) for column in zip(*results.values(), strict=True)]
        report["default_of_best"] = _shares(results[_DEFAULT], best)
        _print(f"{_DEFAULT} of best", (f"{share:.3f}" for share in report["default_of_best"]))
        if _LRU in results:
            report["default_of_lru"] = _shares(results[_DEFAULT], results[_LRU])
            _print(f"{_DEFAULT} of LRU", (f"{share:.3f}" for share in report["default_of_lru"]))
    return report


def _shares(row: Sequence[Replayed], others: Sequence[Replayed]) -> list[float]:
    """Hits as shares of the others' hits."""
    return [one.hits / max(1, other.hits) for one, other in zip(row, others, strict=True)]


def _cell(result: Replayed) -> str:
    return f"{100 * result.hit_rate:.2f}/{result.writes_per_read:.2f}"


def _print(name: str, cells: Iterable[str]) -> None:
    print("\t".join([name, *cells]), flush=True)  # noqa: T201


def _pairs(text: str) -> dict[str, tuple[str, str]]:
    """By their names, in order."""
    known = [f"{eviction}+{admission}" for eviction in POLICIES for admission in (ALWAYS, *ADMISSIONS)]
    names = known if text == _ALL else text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(
                f"--policies: {name!r} is no pair such as {_DEFAULT}; of evictions there are "
                f"{', '.join(POLICIES)}, of admissions {ALWAYS}, {', '.join(ADMISSIONS)}"
            )
    return {name: (name.split("+")[0], name.split("+")[1]) for name in names}


def _blocks(text: str, different: int) -> int:
    try:
        blocks = int(float(text[:-1]) / 100 * different) if text.endswith("%") else int(text)
    except (ValueError, OverflowError):
        raise ValueError(f"--capacity: {text!r} is no number of blocks, and no share such as 5%") from None
    if not 1 <= blocks <= different:
        raise ValueError(f"--capacity: {text} is {blocks} of {different} blocks; give 1 to {different}")
    return blocks
