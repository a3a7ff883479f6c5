# SPDX-License-Identifier: Apache-2.0
"""The two containers of a pod: vLLM with the cache inside it, and the admin sidecar."""

from __future__ import annotations

import json
import math

from kvcache_operator.models import MODELS_MOUNT, Device, EnvVar, Role
from kvcache_operator.plan import (
    CONFIG_KEY,
    CONFIG_MOUNT,
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

_TOKEN_FILE = f"{TOKEN_MOUNT}/{TOKEN_KEY}"
_KV_ROLES = {Role.BOTH: "kv_both", Role.PRODUCER: "kv_producer", Role.CONSUMER: "kv_consumer"}
_STARTUP_PERIOD_S = 5


def engine_container(plan: Plan) -> Manifest:
    """vLLM's API server; it starts the scheduler's process and one worker a rank."""
    engine, budget = plan.spec.engine, plan.budget
    requests = {"cpu": str(1 + budget.gpus), "memory": in_mebibytes(budget.engine_request)}
    limits = {"memory": in_mebibytes(budget.engine_limit)} if budget.engine_limit is not None else {}
    if budget.gpus:
        requests["nvidia.com/gpu"] = limits["nvidia.com/gpu"] = str(budget.gpus)
    return {
        "name": ENGINE,
        "image": plan.image,
        "imagePullPolicy": engine.image_pull_policy,
        "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
        "args": [*_engine_flags(plan), *engine.args],
        "workingDir": HOME,
        "env": _merged_env(_engine_env(plan), engine.env),
        "ports": [{"name": "http", "containerPort": engine.port, "protocol": "TCP"}],
        "startupProbe": _probe(
            "/health", "http", _STARTUP_PERIOD_S, _startup_failures(engine.startup_timeout)
        ),
        "readinessProbe": _probe("/health", "http", 5, 3),
        # A long prefill keeps the cores busy on a CPU; a minute without an answer is a server that hangs.
        "livenessProbe": _probe("/health", "http", 10, 6, timeout_s=10),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_S)]}}},
        "resources": {"requests": requests, **({"limits": limits} if limits else {})},
        "securityContext": _security(),
        "volumeMounts": [
            *_shared_mounts(),
            {"name": "config", "mountPath": CONFIG_MOUNT, "readOnly": True},
            {"name": "dshm", "mountPath": "/dev/shm"},  # noqa: S108
            *_model_mounts(plan),
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
        "env": _entries(_common_env()),
        "ports": [{"name": "admin", "containerPort": port, "protocol": "TCP"}],
        "startupProbe": _probe("/healthz", "admin", _STARTUP_PERIOD_S, 24),
        "readinessProbe": _probe("/readyz", "admin", 5, 3),
        "livenessProbe": _probe("/healthz", "admin", 10, 6, timeout_s=10),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_S)]}}},
        "resources": {
            "requests": {"cpu": "50m", "memory": in_mebibytes(budget.admin_request)},
            "limits": {"memory": in_mebibytes(budget.admin_limit)},
        },
        "securityContext": _security(),
        "volumeMounts": _shared_mounts(),
    }


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
        *("--kv-transfer-config", _kv_transfer_config(plan)),
        *("--shutdown-timeout", str(int(engine.drain_timeout))),
    ]
    if model.revision is not None:
        flags += ["--revision", model.revision]
    if engine.max_model_length is not None:
        flags += ["--max-model-len", str(engine.max_model_length)]
    if engine.device is Device.CPU:
        # torch.compile costs a CPU 40 s of every start and wants a compiler in the image.
        flags.append("--enforce-eager")
    return flags


def _kv_transfer_config(plan: Plan) -> str:
    config = {
        "kv_connector": "LMCacheConnectorV1Dynamic",
        "kv_connector_module_path": "kvcache.integration.vllm.connector",
        "kv_role": _KV_ROLES[plan.spec.cache.role],
        # vLLM's own default fails the request; a cache that lost a chunk costs time and no answer.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config_file": f"{CONFIG_MOUNT}/{CONFIG_KEY}"},
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
    if engine.device is Device.CPU:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(engine.cpu_kv_space // GIB)
    return env


def _downloads_folder(plan: Plan) -> str:
    on_claim = plan.spec.model.volume is not None and not plan.spec.model.is_path
    return f"{MODELS_MOUNT}/huggingface" if on_claim else f"{HOME}/.cache/huggingface"


def _entries(env: dict[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in env.items()]


def _merged_env(defaults: dict[str, str], chosen: tuple[EnvVar, ...]) -> list[Manifest]:
    """The defaults in their order, each replaced by the user's variable of its name, then the other ones."""
    entries = {entry["name"]: entry for entry in _entries(defaults)}
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
