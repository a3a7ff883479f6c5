# SPDX-License-Identifier: Apache-2.0
"""vLLM with the connector and the admin sidecar, as in a pod, under a load of prompts that come again."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.ports import free_port

TOKEN = "the token of this test"
_READY_TRIES = 2400
_VOCABULARY = 512
"""Of the tiny model."""


class Appliance:
    """Two containers' worth of processes on this machine; `close` ends them.

    Args:
        model: folder of the tiny model.
        folder: for the configuration, the token and the logs.
        runtime_dir: of the sockets.
        config: of the cache.
    """

    def __init__(self, model: Path, folder: Path, runtime_dir: Path, config: dict[str, Any]) -> None:
        self.folder = folder
        self.config_file = folder / "config.yaml"
        self.config_file.write_text(yaml.safe_dump({"runtime_dir": str(runtime_dir), **config}))
        token_file = folder / "token"
        token_file.write_text(TOKEN)
        self.vllm_url = f"http://127.0.0.1:{free_port()}"
        environ = os.environ | {
            "KVCACHE_ADMIN_TOKEN_FILE": str(token_file),
            "LMCACHE_CONFIG_FILE": str(self.config_file),
            "VLLM_PLUGINS": "kvcache,kvcache_admin",
        }
        self._processes = [
            self._start("vllm", _vllm_command(model, self.vllm_url, self.config_file), environ)
        ]
        admin = [sys.executable, "-m", "kvcache.admin", "--port=0", f"--runtime-dir={runtime_dir}"]
        admin += [f"--vllm-url={self.vllm_url}", "--expected-ranks=1"]
        self._processes.append(self._start("admin", admin, environ))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        self.admin = httpx.Client()
        self.vllm = httpx.Client(base_url=self.vllm_url, trust_env=False, timeout=120)
        try:
            self._eventually(lambda: self.vllm.get("/health").is_success)
            self.admin_address = self._address_of_admin()
            self.admin = httpx.Client(
                base_url=f"http://{self.admin_address}", headers=headers, trust_env=False, timeout=60
            )
            self._eventually(lambda: self.admin.get("/readyz").is_success)
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, command: Sequence[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True
            )

    def _address_of_admin(self) -> str:
        log = self.folder / "admin.log"
        self._eventually(lambda: "listens on" in log.read_text())
        found = re.search(r"listens on http://(\S+)", log.read_text())
        assert found
        return found[1]

    def _eventually(self, holds: Any) -> None:
        for _ in range(_READY_TRIES):
            for process in self._processes:
                assert process.poll() is None, self.logs()
            try:
                if holds():
                    return
            except (httpx.HTTPError, OSError):
                pass
            time.sleep(0.1)
        raise AssertionError(self.logs())

    def logs(self) -> str:
        return "\n".join(path.read_text()[-9000:] for path in sorted(self.folder.glob("*.log")))

    @property
    def pids(self) -> list[int]:
        """Of vLLM and the sidecar."""
        return [process.pid for process in self._processes]

    def ask(self, prompt: Sequence[int], max_tokens: int = 4) -> None:
        body = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        self.vllm.post("/v1/completions", json=body).raise_for_status()

    def flush(self, *tiers: str) -> dict[str, Any]:
        answer = self.admin.post("/v1/flush", json={"tiers": list(tiers), "wait": True, "reason": "a test"})
        report: dict[str, Any] = answer.raise_for_status().json()
        return report

    def load(self, seconds: float, documents: int = 12, seed: int = 1) -> None:
        """Asks about a few documents again and again, with one request in four about a document never seen
        before; two requests at a time."""
        chosen, fresh = random.Random(seed), random.Random()

        def document(source: random.Random) -> list[int]:
            return [source.randrange(3, _VOCABULARY) for _ in range(source.randint(700, 1800))]

        texts = [document(chosen) for _ in range(documents)]
        deadline = time.monotonic() + seconds
        with ThreadPoolExecutor(2) as pool:
            while time.monotonic() < deadline:
                known = [chosen.choice(texts) + [chosen.randrange(3, _VOCABULARY)] * 9 for _ in range(3)]
                list(pool.map(self.ask, [document(fresh), *known]))
                self.admin.get("/v1/stats").raise_for_status()

    def close(self) -> None:
        self.vllm.close()
        self.admin.close()
        for process in self._processes:
            if process.poll() is not None:
                continue
            children = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            process.wait(60)
            for child in psutil.wait_procs(children, timeout=30)[1]:
                child.kill()


def _vllm_command(model: Path, url: str, config_file: Path) -> list[str]:
    transfer = {
        "kv_connector": "LMCacheConnectorV1Dynamic",
        "kv_connector_module_path": "kvcache.integration.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config_file": str(config_file)},
    }
    arguments = {
        "model": model,
        "served-model-name": "tiny",
        "host": "127.0.0.1",
        "port": url.rsplit(":", 1)[1],
        "max-model-len": 4096,
        "dtype": "float32",
        # Less than the documents need, so that vLLM's own cache forgets them.
        "num-gpu-blocks-override": 36,
        "kv-transfer-config": json.dumps(transfer),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    return command + [f"--{name}={value}" for name, value in arguments.items()]
