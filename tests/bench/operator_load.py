# SPDX-License-Identifier: Apache-2.0
"""The operator's process against real API servers: `python -m tests.bench.operator_load [--json FILE]`.

| what | measured |
|---|---|
| apply to children | from the request that makes a resource to the Deployment, the last of its children, seen by a watch; one resource at a time. By kubectl from the start of its process, and how long kubectl itself took |
| many resources | from the first request to the last `observedGeneration`, seen by a watch; made by eight clients at a time; peak memory of the operator |
| nothing to do | writes of the operator while a resource that is settled is annotated, each time with a reconcile |

Nothing is a pod: what a kubelet does is not part of it. Etcd, servers, operator and this program share the machine,
so its load stands in the table.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from kvcache_operator.crd import crd
from tests.cluster.api import ADMIN_TOKEN, Api, running_api
from tests.cluster.binaries import missing
from tests.cluster.conftest import grant
from tests.cluster.kubectl import Kubectl
from tests.cluster.operators import Operator, Operators
from tests.operator.resources import SMALLEST, with_value

GROUP = "/apis/kvcache.dev/v1alpha1"
WITHIN_S = 300.0
APPLIES, BY_KUBECTL, MANY, RECONCILES = 20, 5, 200, 50
_CLIENTS = 8
_RECONCILES = "kvcache_operator_reconciles_total"


@dataclass(frozen=True)
class Results:
    """Seconds, unless a name says something else."""

    load_before: float
    """Of the machine, one minute's average."""
    apply_median: float
    apply_most: float
    kubectl_to_children_median: float
    kubectl_itself_median: float
    resources: int
    made_in: float
    settled_in: float
    operator_mib: int
    """Peak of its resident memory."""
    operator_cpu: float
    """User and system time until the many were settled."""
    reconciles: int
    writes: int
    """In the time of those reconciles."""


class Watch:
    """When objects of a kind in a namespace came to hold something, by name. A thread of its own."""

    def __init__(self, api: Api, path: str, holds: Callable[[dict[str, Any]], bool] = lambda _: True) -> None:
        self._seen: dict[str, float] = {}
        self._changed = threading.Condition()
        self._holds = holds
        self._client = client(api, timeout=None)
        self._response = self._client.stream("GET", f"{path}?watch=true")
        lines = self._response.__enter__().iter_lines()
        threading.Thread(target=self._run, args=(lines,), daemon=True).start()

    def at(self, names: list[str]) -> list[float]:
        """The times (of `time.perf_counter`) at which they did, all of them."""
        deadline = time.monotonic() + WITHIN_S
        with self._changed:
            while any(name not in self._seen for name in names):
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    absent = [name for name in names if name not in self._seen]
                    raise RuntimeError(f"{len(absent)} of {len(names)} were not seen in {WITHIN_S:g} s")
            return [self._seen[name] for name in names]

    def _run(self, lines: Iterator[str]) -> None:
        with contextlib.suppress(httpx.HTTPError):
            for line in lines:
                now, entry = time.perf_counter(), json.loads(line)["object"]
                if self._holds(entry):
                    with self._changed:
                        self._seen.setdefault(entry["metadata"]["name"], now)
                        self._changed.notify_all()


def client(api: Api, timeout: float | None = 30.0) -> httpx.Client:
    """An administrator's, with its connections kept."""
    return httpx.Client(
        base_url=api.url,
        verify=False,  # noqa: S501
        trust_env=False,
        timeout=timeout,
        headers={"Authorization": f"Bearer {ADMIN_TOKEN}"},
    )


def measure(api: Api, folder: Path) -> Results:
    """All of it, on servers that nobody else uses."""
    load = os.getloadavg()[0]
    kubectl = Kubectl(api.kubeconfig)
    for namespace in ("one", "many"):
        kubectl("create", "namespace", namespace)
    with Operators(api, folder) as operators, client(api) as http:
        operator = operators.start()
        assert operator.url
        time.sleep(2)  # its watches are open

        deployments = Watch(api, "/apis/apps/v1/namespaces/one/deployments")

        def create(name: str, namespace: str) -> float:
            document = with_value(SMALLEST, "metadata.name", name)
            begun = time.perf_counter()
            http.post(f"{GROUP}/namespaces/{namespace}/kvcaches", json=document).raise_for_status()
            return begun

        create("warm", "one")
        deployments.at(["warm"])
        applies = []
        for name in (f"a{number}" for number in range(APPLIES)):
            begun = create(name, "one")
            applies.append(deployments.at([name])[0] - begun)
        by_kubectl, itself = [], []
        for name in (f"k{number}" for number in range(BY_KUBECTL)):
            begun = time.perf_counter()
            kubectl.apply(with_value(SMALLEST, "metadata.name", name), "-n", "one")
            itself.append(time.perf_counter() - begun)
            by_kubectl.append(deployments.at([name])[0] - begun)

        settled = Watch(
            api,
            f"{GROUP}/namespaces/many/kvcaches",
            lambda entry: bool(entry.get("status", {}).get("observedGeneration")),
        )
        names, spent = [f"r{number}" for number in range(MANY)], _cpu_seconds(operator.process)
        with ThreadPoolExecutor(_CLIENTS) as clients:
            begun = min(clients.map(lambda name: create(name, "many"), names))
        made = time.perf_counter()
        settled_at = max(settled.at(names))
        spent = _cpu_seconds(operator.process) - spent
        found = http.get("/apis/apps/v1/namespaces/many/deployments").raise_for_status().json()["items"]
        assert len(found) == MANY
        memory = operator.resident_bytes()
        operator.stop()

        proxy = operators.proxy()
        writer = operators.start(proxy, namespaces='["one"]')
        assert writer.url
        # It applies everything once, as each new process does: that settles first.
        _wait(partial(_has_done, writer, APPLIES + BY_KUBECTL + 1))
        time.sleep(2)
        before, writes = writer.metric(_RECONCILES, result="ok"), len(proxy.writes)
        for number in range(RECONCILES):
            path = f"{GROUP}/namespaces/one/kvcaches/warm"
            change = {"metadata": {"annotations": {"example.org/number": str(number)}}}
            content = {"Content-Type": "application/merge-patch+json"}
            http.patch(path, content=json.dumps(change), headers=content).raise_for_status()
            _wait(partial(_has_done, writer, before + number + 1))
        return Results(
            load_before=load,
            apply_median=statistics.median(applies),
            apply_most=max(applies),
            kubectl_to_children_median=statistics.median(by_kubectl),
            kubectl_itself_median=statistics.median(itself),
            resources=MANY,
            made_in=made - begun,
            settled_in=settled_at - begun,
            operator_mib=memory >> 20,
            operator_cpu=spent,
            reconciles=int(writer.metric(_RECONCILES, result="ok") - before),
            writes=len(proxy.writes) - writes,
        )


def _cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _has_done(operator: Operator, reconciles: float) -> bool:
    return operator.metric(_RECONCILES, result="ok") >= reconciles


def _wait(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the operator did not do it in {WITHIN_S:g} s")
        time.sleep(0.02)


def table(found: Results) -> str:
    rows = [
        ("load of the machine before", f"{found.load_before:.1f}", ""),
        (
            "apply to children, median and most",
            f"{found.apply_median:.3f} s, {found.apply_most:.3f} s",
            "< 1 s",
        ),
        ("the same by kubectl, from its start", f"{found.kubectl_to_children_median:.3f} s", ""),
        ("kubectl itself", f"{found.kubectl_itself_median:.3f} s", ""),
        (f"{found.resources} resources made in", f"{found.made_in:.1f} s", ""),
        (f"{found.resources} resources settled in", f"{found.settled_in:.1f} s", "< 60 s"),
        ("the operator's CPU for them", f"{found.operator_cpu:.1f} s", ""),
        ("the operator's memory, peak", f"{found.operator_mib} MiB", "< 300 MiB"),
        (f"writes in {found.reconciles} reconciles without a change", str(found.writes), "0"),
    ]
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(f"{name:{width}}  {value:>18}  {aim}" for name, value, aim in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.operator_load")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args()
    if (reason := missing()) != "":
        print(f"no API server: {reason}", file=sys.stderr)  # noqa: T201
        return 1
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for part in ("api", "operators"):
            (place / part).mkdir()
        with running_api(place / "api", crd()) as api, contextlib.redirect_stdout(sys.stderr):
            grant(Kubectl(api.kubeconfig))
            found = measure(api, place / "operators")
    print(table(found))  # noqa: T201
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(found), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
