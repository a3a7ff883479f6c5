# SPDX-License-Identifier: Apache-2.0
"""Operators as processes, as they run outside of a cluster."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import httpx

from tests.cluster.api import Api, die_with_parent
from tests.cluster.proxy import Proxy

ROOT = Path(__file__).resolve().parents[2]
_READY = re.compile(r"health and metrics at (http://\S+?)[\s\"]")
_WITHIN_S = 60.0


class Operator:
    """One process; its log is `log`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def url(self) -> str:
        """Of health and metrics; waits for it."""
        deadline = time.monotonic() + _WITHIN_S
        while True:
            found = _READY.search(self.log)
            if found is not None:
                return found[1]
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of its metrics; 0 where there is none."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        for line in text.splitlines():
            if line.startswith((f"{name} ", f"{name}{{")) and all(
                f'{key}="{value}"' in line for key, value in labels.items()
            ):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def kill(self) -> None:
        """Ends it without a chance to clean up."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Ends it as the kubelet does; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=_WITHIN_S)

    def resident_bytes(self) -> int:
        """Its peak memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) << 10


class Operators:
    """Starts operators and proxies, and ends all of them."""

    def __init__(self, api: Api, folder: Path) -> None:
        self._api = api
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._started: list[Operator] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        for operator in self._started:
            if operator.process.poll() is None:
                operator.kill()
            sys.stdout.write(operator.log[-4000:])
        self._stack.close()

    def proxy(self) -> Proxy:
        """A proxy in front of the API server."""
        proxy = Proxy(self._api.url)
        proxy.start()
        self._stack.callback(proxy.stop)
        return proxy

    def start(self, proxy: Proxy | None = None, **settings: str) -> Operator:
        """Starts one; it may not be ready yet.

        Args:
            proxy: To go through.
            settings: Its settings by name.
        """
        number = len(self._started)
        kubeconfig = self._api.operator_kubeconfig
        if proxy is not None:
            kubeconfig = proxy.kubeconfig(kubeconfig, self._folder / f"{number}.kubeconfig")
        values = {
            "health_host": "127.0.0.1",
            "health_port": "0",
            "retry_s": "0.2",
            "retry_max_s": "2",
            "namespace": "kvcache-system",
            **settings,
        }
        env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        env |= {f"KVCACHE_OPERATOR_{name.upper()}": value for name, value in values.items()}
        env["KUBECONFIG"] = str(kubeconfig)
        path = self._folder / f"operator-{number}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvcache_operator", "run"],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        operator = Operator(process, path)
        self._started.append(operator)
        return operator
