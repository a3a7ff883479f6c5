# SPDX-License-Identifier: Apache-2.0
"""What must hold on this machine before anything is started; each error names the field that leads to it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from kvcache_operator.errors import Problem, ResourceError
from kvcache_operator.local.errors import LocalError
from kvcache_operator.local.paths import PathRewriter
from kvcache_operator.local.pod import LOCAL_HOST
from kvcache_operator.models import KVCacheSpec
from kvcache_operator.planning.places import secret_files, secret_uses

CLAIM_PATH = "spec.model.volume.claimName"


def check_machine(spec: KVCacheSpec, claims: Mapping[str, Path], rewrite: PathRewriter) -> None:
    """Checks all that can be checked beforehand.

    Args:
        spec: What is to run.
        claims: The folder of each claim.
        rewrite: Mount paths to folders.

    Raises:
        ResourceError: with all that does not hold.
    """
    problems = [
        *_replicas(spec),
        *_env(spec),
        *_secrets(spec),
        *_disk(spec),
        *_model(spec, rewrite),
        *_ports(spec),
        *_memory(spec),
    ]
    problems += [
        Problem("--claim", f"{claim}={folder}: that is no folder; name one that exists")
        for claim, folder in claims.items()
        if not folder.is_dir()
    ]
    if problems:
        raise ResourceError(problems)


def _replicas(spec: KVCacheSpec) -> list[Problem]:
    if spec.replicas > 0:
        return []
    return [Problem("spec.replicas", "0 leaves nothing to run here; write 1")]


def _env(spec: KVCacheSpec) -> list[Problem]:
    return [
        Problem(
            f"spec.engine.env[{index}].valueFrom",
            "names a Secret, and there is none without a cluster; write value",
        )
        for index, variable in enumerate(spec.engine.env)
        if variable.value_from is not None
    ]


def _secrets(spec: KVCacheSpec) -> list[Problem]:
    return [
        Problem(use.field, "names a Secret, and there is none without a cluster; remove it")
        for use in secret_uses(spec, secret_files(spec))
        if not use.field.startswith("spec.engine.env")
    ]


def _disk(spec: KVCacheSpec) -> list[Problem]:
    if not spec.uses_claim_template:
        return []
    text = (
        "asks for claims, and nobody makes them without a cluster; write emptyDir, or claimName and --claim"
    )
    return [Problem("spec.cache.tiers.disk.volume.claimTemplate", text)]


def _model(spec: KVCacheSpec, rewrite: PathRewriter) -> list[Problem]:
    if not spec.model.is_path:
        return []
    folder = Path(rewrite(spec.model.name))
    where = f"{spec.model.name} is {folder} here" if str(folder) != spec.model.name else f"{folder}"
    if not folder.is_dir():
        return [
            Problem(
                "spec.model.name",
                f"{where}, and there is no such folder; put the model there or name another",
            )
        ]
    if not (folder / "config.json").is_file():
        return [
            Problem(
                "spec.model.name", f"{where}, and there is no config.json in it; name the folder of a model"
            )
        ]
    return []


def _memory(spec: KVCacheSpec) -> list[Problem]:
    capacity = int(spec.cache.tiers.cpu.capacity)
    there = _memory_available()
    if capacity <= there:
        return []
    return [
        Problem(
            "spec.cache.tiers.cpu.capacity",
            f"{capacity >> 20} MiB are more than the {there >> 20} MiB that are free here; write less",
        )
    ]


def _memory_available() -> int:
    """Bytes that can be had without swapping, as the kernel estimates them."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise LocalError("/proc/meminfo does not say what memory is available; mount it")


def _ports(spec: KVCacheSpec) -> list[Problem]:
    ports = {"spec.engine.port": spec.engine.port, "spec.admin.port": spec.admin.port}
    return [
        Problem(path, f"port {port} is in use on this machine; end what uses it, or write another port")
        for path, port in ports.items()
        if not _is_free(port)
    ]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: connections of a server that has ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOCAL_HOST, port))
        except OSError:
            return False
    return True
