# SPDX-License-Identifier: Apache-2.0
"""vLLM's server as it runs in a pod: hits over HTTP, statistics over the sockets and in vLLM's metrics."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kvcache.control.snapshot import Snapshot
from kvcache.observability.metrics import render
from tests.integration.vllm.conftest import MakePrompt
from tests.integration.vllm.engines import CHUNK, Reference
from tests.integration.vllm.servers import Server, eventually, snapshot_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]


def _check_vllms_metrics(server: Server, snapshot: Snapshot) -> None:
    """What vLLM shows of the cache is what the admin sidecar shows, by the names and labels of each."""
    shown = server.metrics("vllm:kvcache_")
    admin: dict[str, float] = {}
    for line in render(snapshot)[0].decode().splitlines():
        if not line.startswith("#"):
            sample, value = line.rsplit(" ", 1)
            admin[sample] = float(value)
    tokens = 'kvcache_prompt_tokens_total{outcome="%s",tier="%s"}'
    pairs = {
        f'vllm:kvcache_{name}_tokens_total{{process="rank0"}}': f'kvcache_{name}_tokens_total{{rank="0"}}'
        for name in ("stored", "loaded", "load_failed")
    }
    for outcome, tier in (("hit_gpu", "gpu"), ("hit_cache", "cpu"), ("computed", "")):
        mine = f'vllm:kvcache_prompt_tokens_total{{outcome="{outcome}"}}{{tier="{tier}"}}'
        pairs[mine] = tokens % (outcome, tier)
    pairs["vllm:kvcache_lookups_total"] = "kvcache_lookups_total"
    for process in ("scheduler", "rank0"):
        pairs[f'vllm:kvcache_ready{{process="{process}"}}'] = f'kvcache_process_ready{{process="{process}"}}'
    assert {name: shown[name] for name in pairs} == {name: admin[other] for name, other in pairs.items()}
    assert shown['vllm:kvcache_stored_tokens_total{process="rank0"}'] == 4 * CHUNK
    assert 0 < shown["vllm:kvcache_lookup_seconds_total"] < 10


def test_a_server_is_killed_and_another_takes_its_place(
    tiny_model: Path, reference: Reference, make_prompt: MakePrompt, socket_dir: Path, tmp_path: Path
) -> None:
    prompt = make_prompt(4 * CHUNK + 77)
    expected = reference(prompt)
    sockets = {"control.rank0.sock", "control.scheduler.sock", "lookup.rank0.sock"}
    first = Server(tiny_model, socket_dir, tmp_path / "log")
    second = None
    try:
        first.wait_until_ready()
        assert first.complete(prompt) == expected
        first.forget_gpu()
        assert first.complete(prompt) == expected
        assert first.external_hits() == 4 * CHUNK

        snapshot = snapshot_of(socket_dir)
        assert (snapshot.missing, snapshot.not_ready()) == ({}, {})
        scheduler = snapshot.scheduler
        assert scheduler is not None
        assert scheduler.hit_cache_tokens == {"cpu": 4 * CHUNK}
        assert scheduler.prompt_tokens == 2 * len(prompt) == 4 * CHUNK + scheduler.computed_tokens
        (tier,) = snapshot.ranks[0].tiers
        assert (tier.objects, tier.leases) == (4, 0)
        assert {snapshot.ranks[0].pid, scheduler.pid} <= first.pids
        _check_vllms_metrics(first, snapshot)

        first.kill()
        assert {path.name for path in socket_dir.iterdir() if path.suffix == ".sock"} == sockets
        second = Server(tiny_model, socket_dir, tmp_path / "log")
        second.wait_until_ready()
        assert second.complete(prompt) == expected
        second.forget_gpu()
        assert second.complete(prompt) == expected
        assert second.external_hits() == 4 * CHUNK
        assert snapshot_of(socket_dir).not_ready() == {}
    finally:
        for server in (first, second):
            if server is not None:
                server.stop()
    assert second is not None
    assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in first.pids | second.pids))
