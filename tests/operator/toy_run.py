# SPDX-License-Identifier: Apache-2.0
"""Local runs of a rendered pod whose programs are toy_server.py, all else being as rendered.

As a program, `python -m tests.operator.toy_run STATE_FOLDER PORT PORT [ENGINE_FLAG ...]`: `local up` of such
a pod.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvcache_operator.local.errors import LocalError
from kvcache_operator.local.state import RunState, StateFolder
from kvcache_operator.local.up import start
from kvcache_operator.plan import CONFIG_MOUNT, RUNTIME_MOUNT, TOKEN_MOUNT, Plan
from kvcache_operator.render import Manifest, Rendered, render
from tests.operator.resources import SMALLEST, plan_of, with_value

TOY = Path(__file__).with_name("toy_server.py").read_text(encoding="utf-8")
"""Handed over as text: a path below one of the pod's mount paths, such as /tmp, means a file of the pod."""
WAIT_S = 30.0


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for entry in sockets:
        entry.bind(("127.0.0.1", 0))
    ports = [int(entry.getsockname()[1]) for entry in sockets]
    for entry in sockets:
        entry.close()
    return ports


def toy_plan(ports: Sequence[int], replicas: int = 1) -> Plan:
    document = with_value(SMALLEST, "spec.replicas", replicas)
    document = with_value(document, "spec.cache.tiers.cpu.capacity", "256Mi")
    document = with_value(with_value(document, "spec.engine.port", ports[0]), "spec.admin.port", ports[1])
    return plan_of(document)


def toy_pod(
    plan: Plan,
    engine_flags: Sequence[str] = (),
    admin_flags: Sequence[str] = (),
    startup_failures: int = 100,
    ready_within_s: float = 60,
    readiness_failures: int = 30,
    grace_s: float = 20,
) -> Rendered:
    """The plan's pod with toys for programs, and probes ten times a second."""
    rendered = render(plan)
    deployment = copy.deepcopy(rendered.workload)
    deployment["spec"]["progressDeadlineSeconds"] = ready_within_s
    pod: Manifest = deployment["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = grace_s
    files = (f"{CONFIG_MOUNT}/config.yaml", f"{TOKEN_MOUNT}/token")
    flags = {
        "vllm": [*(flag for file in files for flag in ("--read", file)), *engine_flags],
        "admin": ["--socket", f"{RUNTIME_MOUNT}/admin.sock", *admin_flags],
    }
    for container in pod["containers"]:
        port = container["ports"][0]["containerPort"]
        container["command"] = ["python3", "-c", TOY, "--host", "$(BIND_HOST)", "--port", str(port)]
        container["args"] = flags[container["name"]]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            container[kind] |= {"periodSeconds": 0.1, "timeoutSeconds": 2}
        container["startupProbe"]["failureThreshold"] = startup_failures
        container["readinessProbe"]["failureThreshold"] = readiness_failures
    return dataclasses.replace(rendered, workload=deployment)


def toy_up(
    folder: StateFolder, say: Callable[[str], None] = lambda _: None, replicas: int = 1, **options: Any
) -> RunState:
    plan = toy_plan(free_ports(2), replicas)
    return start(plan, toy_pod(plan, **options), {}, folder, say)


def given(folder: StateFolder, container: str) -> dict[str, Any]:
    """What a toy says of itself, the last one if it was started again."""
    lines = [line for line in folder.log(container).read_text().splitlines() if line.startswith("{")]
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def eventually(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.05)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    folder, engine_port, admin_port, *engine_flags = sys.argv[1:]
    plan = toy_plan([int(engine_port), int(admin_port)])
    try:
        start(plan, toy_pod(plan, engine_flags), {}, StateFolder(Path(folder)), say)
    except LocalError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
