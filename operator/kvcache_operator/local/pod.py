# SPDX-License-Identifier: Apache-2.0
"""From a rendered pod to what is run here: command lines, environments and probes. Pure."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from kvcache_operator.local.errors import LocalError
from kvcache_operator.local.paths import PathRewriter
from kvcache_operator.local.volumes import lookup
from kvcache_operator.render import Manifest
from kvcache_operator.render.containers import BIND_HOST

LOCAL_HOST = "127.0.0.1"

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")

_FROM_THE_IMAGE = (
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_HOME", "CUDA_VISIBLE_DEVICES"),
    *("LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)
"""Variables of this process that a container gets, as from an image or a node; it gets no others."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HttpProbe(_Frozen):
    """An HTTP probe with the kubelet's meaning of its numbers."""

    url: str
    period_s: float
    timeout_s: float
    failure_threshold: int
    success_threshold: int

    @property
    def budget_s(self) -> float:
        """Seconds of failure until the probe has failed for good."""
        return self.period_s * self.failure_threshold


class LocalContainer(_Frozen):
    """One container as a process of this machine."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str]
    folder: str
    """Working folder."""
    startup: HttpProbe | None
    readiness: HttpProbe | None
    liveness: HttpProbe | None


class LocalPod(_Frozen):
    """A pod as processes of this machine."""

    containers: tuple[LocalContainer, ...]
    grace_s: float
    """Time from SIGTERM to SIGKILL."""
    ready_within_s: float
    """The longest that the pod may take until all of it is ready."""


def local_pod(
    deployment: Manifest,
    objects: Mapping[tuple[str, str], Manifest],
    rewrite: PathRewriter,
    environ: Mapping[str, str],
) -> LocalPod:
    """The pod of a Deployment.

    Args:
        deployment: As rendered.
        objects: ConfigMaps and Secrets by kind and name.
        rewrite: Mount paths to folders.
        environ: This process's environment.

    Raises:
        LocalError: the pod asks for what a local run has not.
    """
    spec = deployment["spec"]["template"]["spec"]
    image = {name: environ[name] for name in _FROM_THE_IMAGE if name in environ}
    image["PATH"] = f"{Path(sys.executable).parent}:{image.get('PATH', '/usr/local/bin:/usr/bin:/bin')}"
    return LocalPod(
        containers=tuple(_container(container, objects, rewrite, image) for container in spec["containers"]),
        grace_s=spec["terminationGracePeriodSeconds"],
        ready_within_s=deployment["spec"]["progressDeadlineSeconds"],
    )


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` replaced as the kubelet does it: unknown names stay as they are, `$$` is a dollar sign."""
    return _REFERENCE.sub(lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0]), text)


def _container(
    container: Manifest,
    objects: Mapping[tuple[str, str], Manifest],
    rewrite: PathRewriter,
    image: Mapping[str, str],
) -> LocalContainer:
    env = _environment(container, objects)
    command = [expand(part, env) for part in (*container.get("command", ()), *container.get("args", ()))]
    if not command:
        raise LocalError(
            f"container {container['name']} has no command; a local run has no image to take one from"
        )
    if command[0] in ("python", "python3"):
        command[0] = sys.executable
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    probes = {
        kind: _probe(container.get(f"{kind}Probe"), ports) for kind in ("startup", "readiness", "liveness")
    }
    return LocalContainer(
        name=container["name"],
        argv=(command[0], *(rewrite(part) for part in command[1:])),
        env={**image, **{name: rewrite(value) for name, value in env.items()}},
        folder=rewrite(container.get("workingDir", "/")),
        **probes,
    )


def _environment(container: Manifest, objects: Mapping[tuple[str, str], Manifest]) -> dict[str, str]:
    env: dict[str, str] = {}
    for variable in container.get("env", ()):
        source = variable.get("valueFrom")
        if source is None:
            env[variable["name"]] = expand(variable.get("value", ""), env)
            continue
        reference = source["secretKeyRef"]
        data: dict[str, Any] = lookup(objects, "Secret", reference["name"]).get("data", {})
        env[variable["name"]] = base64.b64decode(data[reference["key"]]).decode()
    if BIND_HOST in env:
        env[BIND_HOST] = LOCAL_HOST
    return env


def _probe(probe: Manifest | None, ports: Mapping[str, int]) -> HttpProbe | None:
    if probe is None:
        return None
    get = probe["httpGet"]
    port = ports.get(get["port"], get["port"])
    return HttpProbe(
        url=f"{get.get('scheme', 'HTTP').lower()}://{LOCAL_HOST}:{port}{get.get('path', '/')}",
        period_s=probe.get("periodSeconds", 10),
        timeout_s=probe.get("timeoutSeconds", 1),
        failure_threshold=probe.get("failureThreshold", 3),
        success_threshold=probe.get("successThreshold", 1),
    )
