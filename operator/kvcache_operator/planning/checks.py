# SPDX-License-Identifier: Apache-2.0
"""Fields that fit by themselves but not together, and what is allowed but unwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvcache_operator.errors import Problem, ResourceError
from kvcache_operator.models import (
    MODELS_MOUNT,
    NEEDS_SHARED,
    Device,
    EngineSpec,
    EventsMode,
    KVCacheSpec,
    Role,
    owned_variable,
)
from kvcache_operator.planning.budget import in_mebibytes, with_margin
from kvcache_operator.planning.places import (
    CONFIG_MOUNT,
    GIB,
    HOME,
    RUNTIME_MOUNT,
    SECRETS,
    termination_grace_s,
)

DEFAULT_BLOCK_TOKENS = {Device.CUDA: 16, Device.CPU: 128}
"""vLLM's block size where no `--block-size` is given."""
OWNED_CONTAINERS = ("vllm", "admin")
_OWNED_KEYS = ("command", "args", "image", "ports", "startupProbe", "readinessProbe", "livenessProbe")
_TEMPLATE_BYTES = 64 << 10
_TAKEN_PATHS = (CONFIG_MOUNT, SECRETS, RUNTIME_MOUNT, HOME, MODELS_MOUNT, "/tmp", "/dev", "/proc", "/sys")  # noqa: S108


def block_tokens(engine: EngineSpec) -> int:
    """vLLM's block size: the last `--block-size` of the arguments, as its parser has it, or the default."""
    tokens = DEFAULT_BLOCK_TOKENS[engine.device]
    for index, arg in enumerate(engine.args):
        flag, equals, value = arg.partition("=")
        if flag.replace("_", "-") != "--block-size":
            continue
        if not equals:
            value = engine.args[index + 1] if index + 1 < len(engine.args) else ""
        if not value.isdecimal() or int(value) == 0:
            raise ResourceError.at(
                f"spec.engine.args[{index}]",
                f"--block-size has the value {value!r}; write a number of tokens such as 128",
            )
        tokens = int(value)
    return tokens


def problems(spec: KVCacheSpec, tokens_of_a_block: int) -> list[Problem]:
    """All that does not fit together."""
    found = [
        *_model_problems(spec),
        *_port_problems(spec),
        *_space_problems(spec.engine),
        *_disk_problems(spec),
        *_template_problems(spec),
    ]
    if spec.cache.chunk_tokens % tokens_of_a_block:
        text = (
            f"{spec.cache.chunk_tokens} tokens are no multiple of the engine's block size of "
            f"{tokens_of_a_block} tokens; write a multiple of it, or --block-size in spec.engine.args"
        )
        found.append(Problem("spec.cache.chunkTokens", text))
    disk = spec.cache.tiers.disk
    shares = spec.cache.tiers.remote is not None or (disk is not None and disk.volume.claim_name is not None)
    if spec.cache.role is not Role.BOTH and not shares:
        found.append(Problem("spec.cache.role", f"{spec.cache.role} was read; {NEEDS_SHARED}"))
    return found


def warnings(spec: KVCacheSpec, image: str) -> tuple[str, ...]:
    """What works but should not be so."""
    found = []
    if image.endswith(":latest"):
        found.append(f"the tag of {image} moves, so pods may run different versions; write another tag")
    pod = spec.pod_template.spec
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key):
            found.append(f"podTemplate sets {key}, which Pod Security's profile restricted forbids")
    for container in (*pod.get("containers", ()), *pod.get("initContainers", ())):
        security = container.get("securityContext") or {}
        is_own = container["name"] in OWNED_CONTAINERS
        loose = (
            security.get("privileged")
            or security.get("allowPrivilegeEscalation")
            or security.get("runAsUser") == 0
        )
        if loose or (not is_own and security.get("allowPrivilegeEscalation") is not False):
            found.append(f"container {container['name']} of podTemplate does not meet the profile restricted")
    return tuple(found)


def _model_problems(spec: KVCacheSpec) -> list[Problem]:
    model, found = spec.model, []
    if model.is_path and model.claim is not None and not model.name.startswith(f"{MODELS_MOUNT}/"):
        text = f"{model.name} is not in the volume, which lies at {MODELS_MOUNT}; write {MODELS_MOUNT}/NAME"
        found.append(Problem("spec.model.name", text))
    if model.is_path and model.revision is not None:
        text = "a folder has no revisions; remove it, or name a model on the Hub"
        found.append(Problem("spec.model.revision", text))
    if model.is_path and model.volume is not None and model.claim is None:
        text = "nothing is downloaded for a folder; remove it, or name the claim that holds the folder"
        found.append(Problem("spec.model.volume.sizeLimit", text))
    return found


def _port_problems(spec: KVCacheSpec) -> list[Problem]:
    ports = {"spec.engine.port": spec.engine.port}
    wanted = {"spec.admin.port": spec.admin.port}
    if spec.cache.events.mode is not EventsMode.DISABLED:
        wanted["spec.cache.events.port"] = spec.cache.events.port
    found = []
    for path, port in wanted.items():
        taken = next((other for other, used in ports.items() if used == port), None)
        if taken is not None:
            found.append(Problem(path, f"{port} is {taken} too; write another port"))
        ports[path] = port
    return found


def _space_problems(engine: EngineSpec) -> list[Problem]:
    if engine.device is Device.CPU and (engine.cpu_kv_space < GIB or engine.cpu_kv_space % GIB):
        text = f"{engine.cpu_kv_space.text} is no whole number of gibibytes, as vLLM needs; write 1Gi or 2Gi"
        return [Problem("spec.engine.cpuKvSpace", text)]
    return []


def _disk_problems(spec: KVCacheSpec) -> list[Problem]:
    disk, found = spec.cache.tiers.disk, []
    if disk is None:
        return []
    at = "spec.cache.tiers.disk"
    template = disk.volume.claim_template
    if template is not None and template.size < with_margin(disk.capacity):
        text = (
            f"{template.size.text} are too small for the capacity of {disk.capacity.text}; "
            f"write {in_mebibytes(with_margin(disk.capacity))} or more"
        )
        found.append(Problem(f"{at}.volume.claimTemplate.size", text))
    taken = next(
        (path for path in _TAKEN_PATHS if _is_inside(disk.path, path) or _is_inside(path, disk.path)), None
    )
    if taken is not None:
        text = f"{disk.path} collides with {taken}, which the pod uses; write another such as /var/cache/kv"
        found.append(Problem(f"{at}.path", text))
    if disk.volume.claim_name is not None and spec.rollout.max_surge:
        text = f"{spec.rollout.max_surge} pods would wait for the claim of the disk tier; write 0"
        found.append(Problem("spec.rollout.maxSurge", text))
    return found


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _template_problems(spec: KVCacheSpec) -> list[Problem]:
    at, pod, found = "spec.podTemplate.spec", spec.pod_template.spec, []
    size = len(json.dumps(pod))
    if size > _TEMPLATE_BYTES:
        return [Problem(at, f"{size} bytes are too many; write at most {_TEMPLATE_BYTES}")]
    for kind in ("containers", "initContainers", "volumes"):
        entries = pod.get(kind, [])
        if not isinstance(entries, list) or not all(_has_name(entry) for entry in entries):
            found.append(Problem(f"{at}.{kind}", "is no list of mappings that each have a name; write one"))
            continue
        names = [entry["name"] for entry in entries]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            found.append(Problem(f"{at}.{kind}", f"{twice} is given twice; keep one"))
    if found:
        return found
    grace, least = pod.get("terminationGracePeriodSeconds"), termination_grace_s(spec)
    if isinstance(grace, int) and grace < least:
        text = (
            f"{grace} seconds end before the requests that spec.engine.drainTimeout waits for; "
            f"write {least} or more, or a shorter drainTimeout"
        )
        found.append(Problem(f"{at}.terminationGracePeriodSeconds", text))
    for kind in ("containers", "initContainers"):
        for container in pod.get(kind, ()):
            names = [entry["name"] for entry in container.get("env") or () if _has_name(entry)]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                where = f"{at}.{kind}[{container['name']}].env"
                found.append(Problem(where, f"{twice} is given twice; keep one"))
    for container in pod.get("containers", ()):
        name, where = container["name"], f"{at}.containers[{container['name']}]"
        if name not in OWNED_CONTAINERS:
            continue
        owned = next((key for key in _OWNED_KEYS if key in container), None)
        if owned is not None:
            text = f"{owned} of this container is the operator's; remove it and use the field of spec for it"
            found.append(Problem(where, text))
        for variable in container.get("env") or ():
            if _has_name(variable) and owned_variable(variable["name"]):
                text = (
                    f"{variable['name']} is set by the operator; remove it and use the field of spec for it"
                )
                found.append(Problem(f"{where}.env", text))
    return found


def _has_name(entry: Any) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("name"), str)
