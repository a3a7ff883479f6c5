# SPDX-License-Identifier: Apache-2.0
"""From what was read of a machine to what is in order, what is not, and what to do: pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvcache.commands.facts import Facts, FolderFacts
from kvcache.commands.output import size

State = Literal["ok", "note", "warning", "wrong"]
"""`note`: so it is, and it costs something; `warning`: it will likely not do what was asked for; `wrong`: the
cache or a tier cannot work."""

_LEAST_SHM = 64 << 20
"""vLLM's processes hand steps to each other there."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what it is about.
        found: what was read.
        remedy: what to do; empty where there is nothing.
    """

    check: str
    state: State
    found: str
    remedy: str = ""


def checkup(facts: Facts) -> list[Finding]:
    """Everything that was looked at, in the order in which a start would meet it."""
    return [
        *_software(facts),
        *_device(facts),
        *_memory(facts),
        *_config(facts),
        *_disk(facts),
        *_remote(facts),
    ]


def _software(facts: Facts) -> Iterator[Finding]:
    yield Finding("platform", "ok", f"{facts.machine}, Python {facts.python}")
    if facts.native:
        yield Finding("native module", "wrong", facts.native, "run make build, or use the engine's image")
    else:
        built = "with CUDA" if facts.native_cuda else "for the CPU"
        yield Finding("native module", "ok", f"built {built}")
    if facts.vllm is None:
        yield Finding("vLLM", "wrong", "not installed", "install vLLM, or use the engine's image")
        return
    if facts.vllm_tested:
        yield Finding("vLLM", "ok", facts.vllm)
        return
    state: State = "warning" if facts.config.allow_untested_vllm else "wrong"
    remedy = f"install one of {facts.vllm_range}, or set allow_untested_vllm"
    yield Finding("vLLM", state, f"{facts.vllm}, which the connector is not tested with", remedy)


def _device(facts: Facts) -> Iterator[Finding]:
    if not facts.gpu:
        yield Finding("GPU", "note", "none; the cache runs on the CPU")
    elif facts.gpu_problem:
        remedy = "give the container a GPU and a driver, or install the CUDA build"
        yield Finding("GPU", "wrong", f"{facts.gpu}, not reached: {facts.gpu_problem}", remedy)
    else:
        yield Finding("GPU", "ok", facts.gpu)


def _memory(facts: Facts) -> Iterator[Finding]:
    cpu = facts.config.tiers.cpu
    wanted = cpu.capacity
    if facts.memory is not None:
        held = f"{size(facts.memory)} for {size(wanted)} of the cpu tier on each rank"
        if wanted > facts.memory:
            remedy = "lower tiers.cpu.capacity or raise the container's memory"
            yield Finding("memory", "wrong", held, remedy)
        elif wanted > facts.memory * 0.8:
            remedy = "leave a fifth of memory to vLLM itself: lower tiers.cpu.capacity"
            yield Finding("memory", "warning", held, remedy)
        else:
            yield Finding("memory", "ok", held)
    yield _pinning(facts, wanted, cpu.pinning)
    if facts.shm is None or facts.shm < _LEAST_SHM:
        found = "there is none" if facts.shm is None else size(facts.shm)
        remedy = "mount an emptyDir with medium Memory at /dev/shm, or run with --shm-size=1g"
        yield Finding("shared memory", "wrong", found, remedy)
    else:
        yield Finding("shared memory", "ok", size(facts.shm))


def _pinning(facts: Facts, wanted: int, pinning: str) -> Finding:
    if not facts.gpu or pinning == "Disabled":
        return Finding("pinning", "ok", "not needed without a GPU" if not facts.gpu else "disabled")
    if facts.memlock is None or facts.may_lock or facts.memlock >= wanted:
        limit = "no limit" if facts.memlock is None or facts.may_lock else size(facts.memlock)
        return Finding("pinning", "ok", f"{limit} of locked memory")
    # CUDA pins through its driver, which most kernels do not count against the limit.
    return Finding(
        "pinning",
        "warning" if pinning == "Required" else "note",
        f"a limit of {size(facts.memlock)} of locked memory for {size(wanted)}",
        "if the cpu tier says PinningFailed: raise the limit (ulimit -l; LimitMEMLOCK of the runtime)",
    )


def _config(facts: Facts) -> Iterator[Finding]:
    if facts.config_problem:
        yield Finding(
            "configuration", "wrong", facts.config_problem, "correct that field; see docs/resource.md"
        )
        return
    where = facts.config_file or "the environment and defaults"
    tiers = facts.config.tiers
    names = ["cpu", *(name for name in ("disk", "remote") if getattr(tiers, name) is not None)]
    yield Finding(
        "configuration", "ok", f"{where}: tiers {', '.join([*names, *(p.name for p in tiers.plugins)])}"
    )
    if facts.config.runtime_dir is not None and len(facts.config.runtime_dir) > 80:
        yield Finding("runtime_dir", "wrong", facts.config.runtime_dir, "choose a shorter folder for sockets")


def _disk(facts: Facts) -> Iterator[Finding]:
    disk = facts.config.tiers.disk
    if disk is None:
        return
    for folder in facts.folders:
        yield _disk_folder(folder, disk.direct_io)
    free = sum(folder.free_bytes for folder in facts.folders)
    if free < disk.capacity and all(folder.writable for folder in facts.folders):
        yield Finding(
            "disk tier",
            "warning",
            f"{size(free)} free for a capacity of {size(disk.capacity)}",
            "lower tiers.disk.capacity or take a larger volume; what lies there already counts as used",
        )
    if facts.io_uring and disk.engine != "Threads":
        state: State = "wrong" if disk.engine == "Uring" else "note"
        remedy = (
            "allow it (sysctl kernel.io_uring_disabled=0, and the seccomp profile), or leave it to threads"
        )
        yield Finding("io_uring", state, facts.io_uring, remedy)


def _disk_folder(folder: FolderFacts, direct_io: str) -> Finding:
    name = f"disk tier {folder.path}"
    if not folder.writable:
        return Finding(name, "wrong", folder.problem, "create it and give it to the user of the process")
    if not folder.direct_io and direct_io != "Disabled":
        state: State = "wrong" if direct_io == "Enabled" else "note"
        remedy = "take a file system on a disk (ext4, xfs), or set direct_io to Disabled"
        return Finding(name, state, "writable, without direct I/O", remedy)
    return Finding(name, "ok", f"writable, {size(folder.free_bytes)} free")


def _remote(facts: Facts) -> Iterator[Finding]:
    remote = facts.config.tiers.remote
    if remote is None:
        return
    for address, problem in facts.endpoints:
        if problem:
            remedy = "check address, network policy and that it runs; until then each lookup there is a miss"
            yield Finding("remote tier", "wrong", f"{address}: {problem}", remedy)
        else:
            yield Finding("remote tier", "ok", f"{address} accepts connections")
