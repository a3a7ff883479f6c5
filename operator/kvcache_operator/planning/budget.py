# SPDX-License-Identifier: Apache-2.0
"""Memory and disk of a pod. Sizes of tiers are those of a replica; its ranks share them evenly."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcache_operator.errors import MEMORY_BUDGET_EXCEEDED, Problem
from kvcache_operator.models import Device, KVCacheSpec
from kvcache_operator.planning.places import GIB, MIB

_ENGINE_BASE_MEMORY = 2 * GIB
"""API server and EngineCore: 0.6 GiB each measured, and as much again for tokenisers and long prompts."""
_RANK_MEMORY = {Device.CUDA: 6 * GIB, Device.CPU: 2 * GIB}
"""A worker without its caches. CUDA: context, pinned staging, weights on their way to the GPU. CPU: 1.4 GiB
measured for a small model; the weights of a large one come on top, of a size that only loading tells."""
_MESSAGE_RING = 160 * MIB
"""vLLM's shared ring buffer of ten chunks of 16 MiB, one for the executor and one for each rank."""
_SHM_SPARE = 512 * MIB
"""NCCL and torch between ranks; 64 MiB, the default of container runtimes, is known to kill workers."""
_ADMIN_REQUEST = 128 * MIB
_ADMIN_LIMIT = 256 * MIB

_DISK_MARGIN_PERCENT = 5
"""The tier counts what its files occupy; directories and a file that is being written come on top."""
_DISK_MARGIN = 256 * MIB
_SCRATCH = 2 * GIB
"""Logs, /tmp and the caches of compilers."""
_DOWNLOADS = 512 * GIB
"""The largest model that is likely to be downloaded into a pod whose disk has a limit."""


@dataclass(frozen=True)
class Budget:
    """Memory and disk of one pod, in bytes, and its GPUs."""

    gpus: int
    ranks: int
    tier_per_rank: int
    shm: int
    computed: int
    """Host memory that the engine's container needs, whatever the user wrote."""
    engine_request: int
    engine_limit: int | None
    """None on the CPU: the weights lie in the same memory, and a limit without them would end every start."""
    disk_size_limit: int | None
    """Of the disk tier's emptyDir; None where there is none."""
    disk_request: int | None
    disk_limit: int | None
    admin_request: int = _ADMIN_REQUEST
    admin_limit: int = _ADMIN_LIMIT


def make_budget(spec: KVCacheSpec) -> Budget:
    """The tier's capacity is that of one replica; each rank gets an equal part, in whole MiB."""
    engine, ranks = spec.engine, spec.engine.ranks
    requests, limits = spec.resources.requests, spec.resources.limits
    tier_per_rank = spec.cache.tiers.cpu.capacity // ranks // MIB * MIB
    shm = engine.shm_size if engine.shm_size is not None else (1 + ranks) * _MESSAGE_RING + _SHM_SPARE
    host_kv = ranks * engine.cpu_kv_space if engine.device is Device.CPU else 0
    per_rank = _RANK_MEMORY[engine.device] + tier_per_rank + _remote_memory(spec)
    computed = _ENGINE_BASE_MEMORY + ranks * per_rank + host_kv + shm
    request = requests.memory if requests.memory is not None else limits.memory or computed
    limit = max(computed, request) if engine.device is Device.CUDA else None
    size_limit = _disk_size_limit(spec)
    # A model in the pod counts for the node's disk too; how large it is only downloading tells.
    scratch = size_limit + _SCRATCH if size_limit is not None else None
    return Budget(
        gpus=ranks if engine.device is Device.CUDA else 0,
        ranks=ranks,
        tier_per_rank=tier_per_rank,
        shm=int(shm),
        computed=int(computed),
        engine_request=int(request),
        engine_limit=int(limits.memory) if limits.memory is not None else limit,
        disk_size_limit=size_limit,
        disk_request=requests.ephemeral_storage or scratch,
        disk_limit=limits.ephemeral_storage or (scratch + _downloads(spec) if scratch is not None else None),
    )


def budget_problems(spec: KVCacheSpec, budget: Budget) -> list[Problem]:
    """Amounts of the user that the tiers do not fit into."""
    limits, requests, problems = spec.resources.limits, spec.resources.requests, []
    if limits.memory is not None and limits.memory < budget.computed:
        text = (
            f"{limits.memory.text} are less than the {in_mebibytes(budget.computed)} that "
            f"{budget.ranks} ranks with their tiers and shared memory need; write that much, or less at "
            "spec.cache.tiers.cpu.capacity"
        )
        problems.append(Problem("spec.resources.limits.memory", text, reason=MEMORY_BUDGET_EXCEEDED))
    for name, request, limit in (
        ("cpu", requests.cpu, limits.cpu),
        ("memory", requests.memory, limits.memory),
        ("ephemeral-storage", requests.ephemeral_storage, limits.ephemeral_storage),
    ):
        if request is not None and limit is not None and request > limit:
            text = f"{request.text} are more than the limit of {limit.text}; write less, or a larger limit"
            problems.append(Problem(f"spec.resources.requests.{name}", text))
    disk = limits.ephemeral_storage
    if disk is not None and budget.disk_size_limit is not None and disk < budget.disk_size_limit:
        text = (
            f"{disk.text} are less than the {in_mebibytes(budget.disk_size_limit)} of the disk tier's "
            "emptyDir; write more, or less at spec.cache.tiers.disk.capacity"
        )
        problems.append(Problem("spec.resources.limits.ephemeral-storage", text))
    return problems


def with_margin(capacity: int) -> int:
    """The room that a disk tier of that capacity needs, in bytes."""
    return capacity + capacity * _DISK_MARGIN_PERCENT // 100 + _DISK_MARGIN


def _disk_size_limit(spec: KVCacheSpec) -> int | None:
    disk = spec.cache.tiers.disk
    if disk is None or disk.volume.empty_dir is None:
        return None
    return with_margin(disk.capacity)


def _downloads(spec: KVCacheSpec) -> int:
    model = spec.model
    if model.is_path or model.claim is not None:
        return 0
    given = model.volume.size_limit if model.volume is not None else None
    return int(given) if given is not None else _DOWNLOADS


def _remote_memory(spec: KVCacheSpec) -> int:
    """What a rank holds for the remote tier beyond its tier in host memory.

    A write queue is none of it: what waits to be written waits where it lies in that tier.
    """
    remote = spec.cache.tiers.remote
    mooncake = remote.mooncake if remote is not None else None
    return mooncake.buffer + (mooncake.segment or 0) if mooncake is not None else 0


def in_mebibytes(size: int) -> str:
    """`size` bytes as a quantity in Mi, rounded up."""
    return f"{math.ceil(size / MIB)}Mi"
