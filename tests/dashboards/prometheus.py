# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus that scrapes what tests start, with this project's relabelling and rules."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from dashboards.generate import FOLDER
from tests.dashboards.queries import substituted
from tests.ports import free_port

READY_TRIES = 200


class Prometheus:
    """One server; `close` ends it.

    Args:
        folder: for its configuration and data.
        targets: `host:port` of each target to the labels that the discovery of pods gives it.
        scrape_s: between two scrapes.
    """

    def __init__(self, folder: Path, targets: dict[str, dict[str, str]], scrape_s: int = 1) -> None:
        config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
        config["global"]["scrape_interval"] = config["global"]["evaluation_interval"] = f"{scrape_s}s"
        config["rule_files"] = [str(path) for path in sorted((FOLDER / "rules").glob("*.yaml"))]
        for job in config["scrape_configs"]:
            # Debian's server is built without the discovery of pods: the targets stand in its place.
            del job["kubernetes_sd_configs"]
            job["static_configs"] = [{"targets": [at], "labels": labels} for at, labels in targets.items()]
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        self.port = free_port()
        self.log = folder / "prometheus.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={file}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=30)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        for _ in range(READY_TRIES):
            assert self._process.poll() is None, self.log.read_text()[-2000:]
            try:
                if self._http.get("/-/ready").is_success:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"Prometheus is not ready: {self.log.read_text()[-2000:]}")

    def wait_for(self, metric: str) -> None:
        """Returns once the metric was scraped."""
        for _ in range(READY_TRIES):
            if self._get("query", query=metric)["result"]:
                return
            time.sleep(0.1)
        raise AssertionError(f"Prometheus has not scraped {metric}: {self.log.read_text()[-2000:]}")

    def _get(self, path: str, **parameters: object) -> Any:
        answer = self._http.get(f"/api/v1/{path}", params={k: str(v) for k, v in parameters.items()}).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    def instant(self, expr: str, ranges: dict[str, str]) -> list[dict[str, Any]]:
        """The series of an expression of a dashboard, each with its `metric` and `value`."""
        result: list[dict[str, Any]] = self._get("query", query=substituted(expr, ranges))["result"]
        return result

    def over_time(
        self, expr: str, ranges: dict[str, str], start: float, end: float, step_s: float = 1
    ) -> list[dict[str, Any]]:
        """As `instant`, each series with its `values`, pairs of time and number."""
        data = self._get("query_range", query=substituted(expr, ranges), start=start, end=end, step=step_s)
        result: list[dict[str, Any]] = data["result"]
        return result

    def label_values(self, label: str) -> set[str]:
        return set(self._get(f"label/{label}/values"))

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(30)


def missing_program() -> str | None:
    """What to install, if Prometheus is not there."""
    return None if shutil.which("prometheus") else "prometheus is not installed: apt-get install prometheus"
