# SPDX-License-Identifier: Apache-2.0
"""`python -m kvcache.bench transfer [--device cpu|cuda] [--json FILE]`, `... hash`, `... alloc`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from kvcache.bench import policy_cli
from kvcache.bench.alloc import alloc_results, metadata_results
from kvcache.bench.decoding import decoding_results
from kvcache.bench.disk import SIZES, disk_results
from kvcache.bench.disk_index import index_results
from kvcache.bench.down import down_results
from kvcache.bench.hashing import hash_results
from kvcache.bench.lmcache_kernel import lmcache_results
from kvcache.bench.machine import machine
from kvcache.bench.remote import SIZES as REMOTE_SIZES
from kvcache.bench.remote import remote_results
from kvcache.bench.scheduler import scheduler_results
from kvcache.bench.serving_cli import SERVING, add_parsers, run
from kvcache.bench.shapes import SHAPES
from kvcache.bench.transfer import overlap_results, transfer_results
from kvcache.gpu_connector.transfer import RING_SLOT_BYTES


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvcache.bench", description="Measures the data plane.")
    what = parser.add_subparsers(dest="what", required=True)
    transfer = what.add_parser("transfer", help="KV between pages and chunks, by layout and way")
    transfer.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    transfer.add_argument(
        "--shape", action="append", help="only shapes of this name, such as 8B; may be repeated"
    )
    transfer.add_argument("--bytes", type=int, default=0, help="bytes that one measurement moves")
    transfer.add_argument(
        "--ring-slot-mib", type=int, default=RING_SLOT_BYTES >> 20, help="size of a staging ring's slots"
    )
    transfer.add_argument(
        "--no-overlap", action="store_true", help="leave out what copies and products do to each other"
    )
    for part in (
        transfer,
        what.add_parser("hash", help="chained hashes"),
        what.add_parser("alloc", help="chunks"),
        what.add_parser("scheduler", help="the connector in vLLM's scheduler: lookups and steps"),
    ):
        part.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    disk = what.add_parser("disk", help="the disk tier beside plain direct I/O (fio, if it is installed)")
    disk.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where to work")
    disk.add_argument("--mib", type=int, default=1024, help="what one measurement moves")
    disk.add_argument("--rounds", type=int, default=5)
    disk.add_argument(
        "--object-mib", type=int, action="append", help="only objects of this size; may be repeated"
    )
    disk.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    index = what.add_parser("index", help="how soon the disk tier knows what lies in its directory")
    index.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where to work")
    index.add_argument("--objects", type=int, default=50_000)
    index.add_argument("--rounds", type=int, default=5)
    index.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    remote = what.add_parser("remote", help="a remote tier beside its own client, used plainly")
    remote.add_argument("--url", help="of the store; default: a server of Valkey or Redis is started here")
    remote.add_argument("--mib", type=int, default=128, help="what one measurement moves")
    remote.add_argument("--rounds", type=int, default=5)
    remote.add_argument(
        "--object-mib", type=int, action="append", help="only objects of this size; may be repeated"
    )
    remote.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    down = what.add_parser("down", help="what a remote tier costs vLLM while its server is down, on the CPU")
    down.add_argument("--model", required=True, help="folder of the model")
    down.add_argument("--tokens", type=int, default=512, help="of a prompt")
    down.add_argument("--rounds", type=int, default=40)
    down.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    for part in (*add_parsers(what), policy_cli.add_parser(what)):
        part.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: {options.json.parent} is no folder; name a file in one that exists")
    report: dict[str, Any] = {"machine": machine(), "what": options.what}
    print(json.dumps(report["machine"]))
    try:
        report |= _MEASURES[options.what](options)
    except (RuntimeError, ValueError) as error:
        print(f"bench {options.what}: {error}", file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _transfer(options: argparse.Namespace) -> dict[str, Any]:
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name, 0) if name == "cuda" else torch.device("cpu")
    shapes = None
    if options.shape:
        shapes = [shape for shape in SHAPES if shape.name in options.shape]
        if not shapes:
            raise ValueError(
                f"no shape is named {', '.join(options.shape)}; there are {sorted({s.name for s in SHAPES})}"
            )
    report: dict[str, Any] = {}
    report["transfer"] = _rows(
        (
            dataclasses.asdict(result) | {"ratio": result.ratio}
            for result in transfer_results(
                device,
                shapes=shapes,
                total_bytes=options.bytes,
                ring_slot_bytes=options.ring_slot_mib << 20,
            )
        ),
        "shape coded axes dtype block_size chunk_tokens direction way blocks rate plain_rate ratio submit_ms",
    )
    if name == "cuda":
        report["lmcache"] = _rows(lmcache_results(device), "direction rate plain_rate ratio submit_ms")
        if not options.no_overlap:
            report["overlap"] = _rows(
                map(dataclasses.asdict, overlap_results(device)),
                "way blocks both_rate plain_both_rate matmul_ms matmul_busy_ms matmul_loss both_rate_beside",
            )
            report["decoding"] = _rows(
                map(dataclasses.asdict, decoding_results(device)),
                "coded way blocks load_rate step_ms busy_ms loss",
            )
    return report


def _hash(options: argparse.Namespace) -> dict[str, Any]:
    rows = (dataclasses.asdict(result) | {"ratio": result.ratio} for result in hash_results())
    return {"hash": _rows(rows, "tokens chunk_tokens chained_us plain_us plain_whole_us ratio")}


def _alloc(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "alloc": _rows(
            map(dataclasses.asdict, alloc_results()), "chunks pair_ns random_pair_ns random_touch_ns"
        ),
        "metadata": _rows(
            map(dataclasses.asdict, metadata_results()), "eviction admission chunks object_bytes index_bytes"
        ),
    }


def _scheduler(options: argparse.Namespace) -> dict[str, Any]:
    rows = map(dataclasses.asdict, scheduler_results())
    return {"scheduler": _rows(rows, "what size median_us p99_us low_us")}


def _disk(options: argparse.Namespace) -> dict[str, Any]:
    sizes = [mib << 20 for mib in options.object_mib] if options.object_mib else SIZES
    if not options.directory.is_dir():
        raise ValueError(f"--directory: {options.directory} is no folder; name one that exists")
    if min(options.mib, options.rounds, *sizes) < 1:
        raise ValueError("--mib, --rounds and --object-mib must be above 0")
    results = disk_results(
        options.directory, total_bytes=options.mib << 20, rounds=options.rounds, sizes=sizes
    )
    columns = "what object_bytes objects depth engine direct reference reference_rate rate ratio low high"
    return {"disk": _rows(map(dataclasses.asdict, results), columns)}


def _index(options: argparse.Namespace) -> dict[str, Any]:
    if not options.directory.is_dir():
        raise ValueError(f"--directory: {options.directory} is no folder; name one that exists")
    if min(options.objects, options.rounds) < 1:
        raise ValueError("--objects and --rounds must be above 0")
    results = index_results(options.directory, objects=options.objects, rounds=options.rounds)
    return {"index": _rows(map(dataclasses.asdict, results), "objects open_s usable_s all_s")}


def _remote(options: argparse.Namespace) -> dict[str, Any]:
    sizes = [mib << 20 for mib in options.object_mib] if options.object_mib else REMOTE_SIZES
    if min(options.mib, options.rounds, *sizes) < 1:
        raise ValueError("--mib, --rounds and --object-mib must be above 0")
    results = remote_results(options.url, total_bytes=options.mib << 20, rounds=options.rounds, sizes=sizes)
    columns = "store what object_bytes objects connections reference reference_rate rate ratio low high"
    return {"remote": _rows(map(dataclasses.asdict, results), columns)}


def _down(options: argparse.Namespace) -> dict[str, Any]:
    if min(options.tokens, options.rounds - 1) < 1:
        raise ValueError("--tokens must be above 0 and --rounds above 1")
    results = down_results(options.model, tokens=options.tokens, rounds=options.rounds)
    columns = "fault state deadline_s first_extra_s requests with_s without_s ratio low high quick_ratio"
    return {"down": _rows(map(dataclasses.asdict, results), columns)}


def _serving(options: argparse.Namespace) -> dict[str, Any]:
    return {options.what: run(options)[0]}


_MEASURES = {
    **dict.fromkeys(SERVING, _serving),
    "transfer": _transfer,
    "hash": _hash,
    "alloc": _alloc,
    "scheduler": _scheduler,
    "disk": _disk,
    "index": _index,
    "down": _down,
    "policy": policy_cli.run,
    "remote": _remote,
}


def _rows(rows: Iterable[dict[str, Any]], columns: str) -> list[dict[str, Any]]:
    """Prints the rows as they come, and returns them."""
    seen: list[dict[str, Any]] = []
    for row in rows:
        if not seen:
            print(columns.replace(" ", "\t"))
        values = (row[column] for column in columns.split())
        texts = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in values)
        print("\t".join(texts), flush=True)
        seen.append(row)
    return seen


if __name__ == "__main__":
    raise SystemExit(main())
