# SPDX-License-Identifier: Apache-2.0
"""The mounted configuration: checked, handed to the processes that lack it, and refused when it cannot be
used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcache.config.live import file_digest
from kvcache.control.wire import Configured
from tests.admin.conftest import AUTH, Admin, Serve
from tests.control.processes import Process, rank_stats, scheduler_stats

pytestmark = pytest.mark.anyio

FIRST = "chunk_size: 512\nhash_seed: pepper-and-salt\ntiers: {cpu: {capacity: 1Gi}}\n"
SECOND = "chunk_size: 512\nhash_seed: pepper-and-salt\ntiers: {cpu: {capacity: 2Gi}}\n"
FIRST_DATA = {"chunk_size": 512, "hash_seed": "pepper-and-salt", "tiers": {"cpu": {"capacity": "1Gi"}}}
SECOND_DATA = {"chunk_size": 512, "hash_seed": "pepper-and-salt", "tiers": {"cpu": {"capacity": "2Gi"}}}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(FIRST)
    return path


def replace(file: Path, text: str) -> None:
    """As Kubernetes does: another file behind the same name."""
    fresh = file.with_name("fresh")
    fresh.write_text(text)
    fresh.replace(file)


def remove(file: Path) -> None:
    file.unlink()


def taken_in(process: Process) -> Process:
    """As a process that has read the file at its start."""
    process.configure(FIRST_DATA)
    process.files.clear()
    return process


async def config(client: httpx.AsyncClient, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What /v1/config says once that holds."""
    for _ in range(1000):
        body: dict[str, Any] = (await client.get("/v1/config", headers=AUTH)).json()
        if holds(body):
            return body
        await asyncio.sleep(0.01)
    raise AssertionError(body)


def in_effect(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda body: all(body["processes"].get(name, {}).get("in_effect") for name in names)


def named_as_problem(text: str, body: dict[str, Any]) -> bool:
    return text in body["problem"]


async def metrics(client: httpx.AsyncClient) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


async def test_who_has_read_the_file_itself_is_left_alone(
    admin: Admin, serve: Serve, config_file: Path
) -> None:
    rank, scheduler = taken_in(Process(rank_stats(0))), taken_in(Process(scheduler_stats()))
    serve("rank0", rank)
    serve("scheduler", scheduler)
    async with admin(config_file=str(config_file), sample_s=0.02) as client:
        body = await config(client, in_effect("rank0", "scheduler"))
        assert (body["config"]["chunk_size"], body["problem"]) == (512, "")
        assert body["digest"] == rank.reported.config_digest
        assert "pepper" not in str(body)
    assert (rank.files, scheduler.files) == ([], [])


async def test_a_change_reaches_every_process(admin: Admin, serve: Serve, config_file: Path) -> None:
    processes = {
        "scheduler": taken_in(Process(scheduler_stats())),
        "rank0": taken_in(Process(rank_stats(0))),
        "rank1": taken_in(Process(rank_stats(1))),
    }
    processes["rank1"].configured = Configured(applied=["log_level"], restart=["tiers.cpu.pinning"])
    for name, process in processes.items():
        serve(name, process)
    async with admin(config_file=str(config_file), sample_s=0.02) as client:
        await config(client, in_effect("rank0", "rank1"))
        replace(config_file, SECOND)
        body = await config(client, lambda body: body["processes"]["rank1"]["restart"] != [])
        await config(client, in_effect("rank0", "scheduler"))
        assert body["processes"]["rank1"]["in_effect"] is False
        assert body["processes"]["rank1"]["restart"] == ["tiers.cpu.pinning"]
        counted = await metrics(client)
    assert all(process.files == [SECOND_DATA] for process in processes.values())
    assert body["digest"] == file_digest(SECOND_DATA)
    assert counted["kvcache_config_in_effect", frozenset({("process", "rank1")})] == 0
    assert counted["kvcache_config_in_effect", frozenset({("process", "rank0")})] == 1
    assert counted["kvcache_config_changes_total", frozenset({("result", "accepted")})] == 2


async def test_a_bad_file_is_refused_and_the_last_good_one_stays(
    admin: Admin, serve: Serve, config_file: Path
) -> None:
    rank = taken_in(Process(rank_stats(0)))
    serve("rank0", rank)
    async with admin(config_file=str(config_file), sample_s=0.02) as client:
        first = await config(client, in_effect("rank0"))
        for bad, named in (("chunk_sise: 512\n", "chunk_size"), ("tiers: [\n", "YAML"), ("- 1\n", "list")):
            replace(config_file, bad)
            body = await config(client, partial(named_as_problem, named))
            assert (body["config"], body["digest"]) == (first["config"], first["digest"])
            assert body["processes"]["rank0"]["in_effect"]
        counted = await metrics(client)
        assert counted["kvcache_config_valid", frozenset()] == 0
        assert counted["kvcache_config_changes_total", frozenset({("result", "refused")})] == 3
        remove(config_file)
        await config(client, lambda body: "cannot be read" in body["problem"])
        replace(config_file, FIRST)
        assert (await config(client, lambda body: not body["problem"]))["digest"] == first["digest"]
        assert (await metrics(client))["kvcache_config_valid", frozenset()] == 1
    assert rank.files == []


async def test_a_late_sidecar_hands_over_what_a_process_lacks(
    admin: Admin, serve: Serve, config_file: Path
) -> None:
    rank = taken_in(Process(rank_stats(0)))
    serve("rank0", rank)
    replace(config_file, SECOND)
    async with admin(config_file=str(config_file), sample_s=0.02) as client:
        await config(client, in_effect("rank0"))
        assert rank.files == [SECOND_DATA]
        # A rank that starts again with the old file, from a kubelet that was slow.
        taken_in(rank)
        await config(client, lambda _: rank.files == [SECOND_DATA])


async def test_a_process_that_refuses_is_asked_once_for_each_content(
    admin: Admin, serve: Serve, config_file: Path
) -> None:
    refusing = taken_in(Process(rank_stats(0)))
    refusing.configured = Configured(refused="tiers.cpu.capacity: 1 TiB is more than there is")
    other = taken_in(Process(rank_stats(1)))
    serve("rank0", refusing)
    serve("rank1", other)
    async with admin(config_file=str(config_file), sample_s=0.02) as client:
        await config(client, in_effect("rank0", "rank1"))
        replace(config_file, SECOND)
        await config(client, lambda body: "more than there is" in body["processes"]["rank0"]["problem"])
        await config(client, in_effect("rank1"))
        for _ in range(5):
            await client.get("/v1/stats", headers=AUTH)
            await asyncio.sleep(0.03)
        assert len(refusing.files) == 1
        replace(config_file, SECOND.replace("2Gi", "3Gi"))
        await config(client, lambda _: len(refusing.files) == 2)


async def test_a_process_that_hangs_is_named(admin: Admin, serve: Serve, config_file: Path) -> None:
    rank = Process(rank_stats(0))
    serve("rank0", rank)
    async with admin(
        config_file=str(config_file), sample_s=0.02, timeout_s=0.3, flush_timeout_s=0.3
    ) as client:
        await config(client, lambda _: rank.files != [])
        await config(client, in_effect("rank0"))
        rank.go.clear()
        for _ in range(100):
            missing = (await client.get("/v1/stats", headers=AUTH)).json()["missing"]
            if "rank0" in missing:
                break
        assert "did not answer" in missing["rank0"]
        rank.go.set()


async def test_without_a_mounted_file_there_is_nothing_to_hand_over(admin: Admin, serve: Serve) -> None:
    rank = Process(rank_stats(0))
    serve("rank0", rank)
    async with admin(sample_s=0.02) as client:
        await client.get("/v1/stats", headers=AUTH)
        body = (await client.get("/v1/config", headers=AUTH)).json()
        assert (body["digest"], body["problem"], body["processes"]) == ("", "", {})
        assert body["config"]["chunk_size"] == 256
        assert ("kvcache_config_valid", frozenset()) not in await metrics(client)
    assert rank.files == []


async def test_nobody_counts_as_having_what_was_not_handed_over_yet(
    admin: Admin, serve: Serve, config_file: Path
) -> None:
    rank = taken_in(Process(rank_stats(0)))
    serve("rank0", rank)
    async with admin(config_file=str(config_file), sample_s=0.2) as client:
        await config(client, in_effect("rank0"))
        replace(config_file, SECOND)
        body = (await client.get("/v1/config", headers=AUTH)).json()
        assert body["digest"] == file_digest(SECOND_DATA)
        assert body["processes"]["rank0"]["in_effect"] == (rank.files == [SECOND_DATA])
        await config(client, in_effect("rank0"))
        assert rank.files == [SECOND_DATA]
