# SPDX-License-Identifier: Apache-2.0
"""The two containers of a pod: vLLM with the cache inside it, and the admin sidecar."""

from __future__ import annotations

import json
import math

from kvcache_operator.models import MODELS_MOUNT, Device, EnvVar, EventsMode, Role
from kvcache_operator.plan import (
    CONFIG_KEY,
    CONFIG_MOUNT,
    DISK_VOLUME,
    GIB,
    HOME,
    PRE_STOP_S,
    RUNTIME_MOUNT,
    TOKEN_KEY,
    TOKEN_MOUNT,
    Plan,
    in_mebibytes,
)
from kvcache_operator.render.common import Manifest

ENGINE = "vllm"
ADMIN = "admin"
BIND_HOST = "BIND_HOST"
"""Variable with the address that both servers bind to; a local run sets it to this machine's own."""

CONNECTOR = "LMCacheConnectorV1Dynamic"
_CONFIG_FILE = f"{CONFIG_MOUNT}/{CONFIG_KEY}"
_TOKEN_FILE = f"{TOKEN_MOUNT}/{TOKEN_KEY}"
_KV_ROLES = {Role.BOTH: "kv_both", Role.PRODUCER: "kv_producer", Role.CONSUMER: "kv_consumer"}
_STARTUP_PERIOD_S = 5


_FILE_VARIABLES = {"hub-token": "HF_TOKEN_PATH", "s3-credentials": "AWS_SHARED_CREDENTIALS_FILE"}
"""Secret files that a library finds by a variable; the engine's configuration names the others."""


def engine_container(plan: Plan) -> Manifest:
    """vLLM's API server; it starts the scheduler's process and one worker a rank."""
    engine = plan.spec.engine
    ports = [{"name": "http", "containerPort": engine.port, "protocol": "TCP"}]
    if plan.spec.cache.events.mode is not EventsMode.DISABLED:
        ports.append({"name": "events", "containerPort": plan.spec.cache.events.port, "protocol": "TCP"})
    return {
        "name": ENGINE,
        "image": plan.image,
        "imagePullPolicy": engine.image_pull_policy,
        "command": ["python3", "-m", "kvcache.integration.vllm.serve"],
        "args": [*_engine_flags(plan), *engine.args],
        "workingDir": HOME,
        "env": _merged_env([*_entries(_engine_env(plan)), *_seed(plan)], engine.env),
        "ports": ports,
        "startupProbe": _probe(
            "/health", "http", _STARTUP_PERIOD_S, _startup_failures(engine.startup_timeout)
        ),
        "readinessProbe": _probe("/health", "http", 5, 3),
        # A long prefill keeps the cores busy on a CPU; a minute without an answer is a server that hangs.
        "livenessProbe": _probe("/health", "http", 10, 6, timeout_s=10),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_S)]}}},
        # The last lines of the log stand in the pod's status then, and from there in the resource's.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": _resources(plan),
        "securityContext": _security(),
        "volumeMounts": [
            *_shared_mounts(),
            {"name": "config", "mountPath": CONFIG_MOUNT, "readOnly": True},
            {"name": "dshm", "mountPath": "/dev/shm"},  # noqa: S108
            *_model_mounts(plan),
            *_disk_mounts(plan),
            *({"name": entry.use, "mountPath": entry.mount, "readOnly": True} for entry in plan.secret_files),
        ],
    }


def admin_container(plan: Plan) -> Manifest:
    """The sidecar. It is ready when every rank's connector is, so a pod is ready only with its cache."""
    budget, port = plan.budget, plan.spec.admin.port
    return {
        "name": ADMIN,
        "image": plan.image,
        "imagePullPolicy": plan.spec.engine.image_pull_policy,
        "command": ["python3", "-m", "kvcache.admin"],
        "args": [
            *("--runtime-dir", RUNTIME_MOUNT),
            *("--host", f"$({BIND_HOST})"),
            *("--port", str(port)),
            *("--token-file", _TOKEN_FILE),
            *("--vllm-url", f"http://127.0.0.1:{plan.spec.engine.port}"),
            *("--expected-ranks", str(plan.spec.engine.ranks)),
        ],
        "workingDir": HOME,
        "env": _entries(_common_env() | {"LMCACHE_CONFIG_FILE": _CONFIG_FILE}),
        "ports": [{"name": "admin", "containerPort": port, "protocol": "TCP"}],
        "startupProbe": _probe("/healthz", "admin", _STARTUP_PERIOD_S, 24),
        "readinessProbe": _probe("/readyz", "admin", 5, 3),
        "livenessProbe": _probe("/healthz", "admin", 10, 6, timeout_s=10),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_S)]}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {
            "requests": {"cpu": "50m", "memory": in_mebibytes(budget.admin_request)},
            "limits": {"memory": in_mebibytes(budget.admin_limit)},
        },
        "securityContext": _security(),
        "volumeMounts": [
            *_shared_mounts(),
            {"name": "config", "mountPath": CONFIG_MOUNT, "readOnly": True},
        ],
    }


def _resources(plan: Plan) -> Manifest:
    budget, given = plan.budget, plan.spec.resources
    requests = {
        "cpu": given.requests.cpu.text if given.requests.cpu is not None else _default_cpus(plan),
        "memory": in_mebibytes(budget.engine_request),
    }
    limits = {}
    if given.limits.cpu is not None:
        limits["cpu"] = given.limits.cpu.text
    if budget.engine_limit is not None:
        limits["memory"] = in_mebibytes(budget.engine_limit)
    if budget.disk_request is not None:
        requests["ephemeral-storage"] = in_mebibytes(budget.disk_request)
    if budget.disk_limit is not None:
        limits["ephemeral-storage"] = in_mebibytes(budget.disk_limit)
    if budget.gpus:
        requests[given.gpu_resource_name] = limits[given.gpu_resource_name] = str(budget.gpus)
    return {"requests": requests, **({"limits": limits} if limits else {})}


def _default_cpus(plan: Plan) -> str:
    wanted, limit = 1 + plan.budget.gpus, plan.spec.resources.limits.cpu
    return limit.text if limit is not None and limit < wanted * 1000 else str(wanted)


def _engine_flags(plan: Plan) -> list[str]:
    model, engine = plan.spec.model, plan.spec.engine
    flags = [
        *("--model", model.name),
        *("--served-model-name", plan.served_name),
        *("--host", f"$({BIND_HOST})"),
        *("--port", str(engine.port)),
        *("--dtype", engine.dtype),
        *("--tensor-parallel-size", str(engine.tensor_parallel_size)),
        *("--pipeline-parallel-size", str(engine.pipeline_parallel_size)),
        *("--kv-cache-dtype", engine.kv_cache_dtype),
        *("--kv-transfer-config", kv_transfer_config(plan)),
        *("--shutdown-timeout", str(int(engine.drain_timeout))),
    ]
    if plan.spec.cache.events.mode is not EventsMode.DISABLED:
        flags += ["--kv-events-config", _kv_events_config(plan)]
    if engine.device is Device.CUDA:
        flags += ["--gpu-memory-utilization", f"{engine.gpu_memory_utilization_percent / 100:.2f}"]
    if model.revision is not None:
        flags += ["--revision", model.revision]
    if engine.max_model_length is not None:
        flags += ["--max-model-len", str(engine.max_model_length)]
    if engine.device is Device.CPU:
        # torch.compile costs a CPU 40 s of every start and wants a compiler in the image.
        flags.append("--enforce-eager")
    return flags


def _kv_events_config(plan: Plan) -> str:
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://$({BIND_HOST}):{plan.spec.cache.events.port}",
    }
    return json.dumps(config, separators=(",", ":"))


def kv_transfer_config(plan: Plan) -> str:
    """The value of vLLM's flag `--kv-transfer-config`."""
    config = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "kvcache.integration.vllm.connector",
        "kv_role": _KV_ROLES[plan.spec.cache.role],
        # vLLM's own default fails the request; a cache that lost a chunk costs time and no answer.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config_file": _CONFIG_FILE},
    }
    return json.dumps(config, separators=(",", ":"))


def _common_env() -> dict[str, str]:
    return {
        BIND_HOST: "0.0.0.0",  # noqa: S104
        "HOME": HOME,
        # No user of the image need have the pod's number, and getpass asks the environment first.
        "USER": "kvcache",
        "TMPDIR": "/tmp",  # noqa: S108
        "PYTHONUNBUFFERED": "1",
    }


def _engine_env(plan: Plan) -> dict[str, str]:
    model, engine = plan.spec.model, plan.spec.engine
    cache_home = f"{HOME}/.cache"
    env = _common_env() | {
        "VLLM_PLUGINS": "kvcache,kvcache_admin",
        "VLLM_NO_USAGE_STATS": "1",
        "KVCACHE_ADMIN_TOKEN_FILE": _TOKEN_FILE,
        # vLLM's block hashes must be equal in all pods that share a tier.
        "PYTHONHASHSEED": "0",
        # The root file system is read-only: each cache that a library keeps needs a place.
        "XDG_CACHE_HOME": cache_home,
        "XDG_CONFIG_HOME": f"{HOME}/.config",
        "HF_HOME": _downloads_folder(plan),
        "VLLM_CACHE_ROOT": f"{cache_home}/vllm",
        "VLLM_CONFIG_ROOT": f"{HOME}/.config/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache_home}/torchinductor",
        "TRITON_CACHE_DIR": f"{cache_home}/triton",
        "NUMBA_CACHE_DIR": f"{cache_home}/numba",
    }
    if model.is_path:
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    for entry in plan.secret_files:
        if entry.use in _FILE_VARIABLES:
            env[_FILE_VARIABLES[entry.use]] = entry.path(entry.keys[0])
    if engine.device is Device.CPU:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(engine.cpu_kv_space // GIB)
    return env


def _downloads_folder(plan: Plan) -> str:
    on_claim = plan.spec.model.volume is not None and not plan.spec.model.is_path
    return f"{MODELS_MOUNT}/huggingface" if on_claim else f"{HOME}/.cache/huggingface"


def _entries(env: dict[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in env.items()]


def _seed(plan: Plan) -> list[Manifest]:
    """The seed of keys where it is secret; the cache's namespace is mixed in, as it is without a secret."""
    reference = plan.spec.cache.seed_secret_ref
    if reference is None:
        return []
    source = {"secretKeyRef": {"name": reference.name, "key": reference.key}}
    namespace = plan.spec.cache.namespace
    seed = "$(KVCACHE_SEED)" + (f"/{namespace}" if namespace else "")
    return [
        {"name": "KVCACHE_SEED", "valueFrom": source},
        {"name": "LMCACHE_HASH_SEED", "value": seed},
    ]


def _merged_env(defaults: list[Manifest], chosen: tuple[EnvVar, ...]) -> list[Manifest]:
    """The defaults in their order, each replaced by the user's variable of its name, then the other ones."""
    entries = {entry["name"]: entry for entry in defaults}
    for variable in chosen:
        entries[variable.name] = variable.model_dump(by_alias=True, exclude_none=True)
    return list(entries.values())


def _startup_failures(timeout_s: int) -> int:
    return math.ceil(timeout_s / _STARTUP_PERIOD_S)


def _probe(path: str, port: str, period_s: int, failures: int, timeout_s: int = 5) -> Manifest:
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
        "successThreshold": 1,
    }


def _security() -> Manifest:
    """What Pod Security's profile `restricted` asks of a container, and a read-only root besides."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def _shared_mounts() -> list[Manifest]:
    return [
        {"name": "runtime", "mountPath": RUNTIME_MOUNT},
        {"name": "admin-token", "mountPath": TOKEN_MOUNT, "readOnly": True},
        {"name": "home", "mountPath": HOME},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
    ]


def _model_mounts(plan: Plan) -> list[Manifest]:
    if plan.spec.model.volume is None:
        return []
    return [{"name": "models", "mountPath": MODELS_MOUNT, "readOnly": plan.spec.model.is_path}]


def _disk_mounts(plan: Plan) -> list[Manifest]:
    disk = plan.spec.cache.tiers.disk
    return [{"name": DISK_VOLUME, "mountPath": disk.path}] if disk is not None else []
