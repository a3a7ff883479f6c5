# SPDX-License-Identifier: Apache-2.0
"""Readiness, statistics, configuration and metrics of processes that answer, hang, or are gone."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcache.admin.models import RankReport, SchedulerReport, TierReport
from kvcache.stats import RankStats, SchedulerStats, TierStats
from tests.admin.conftest import AUTH, Admin, Serve
from tests.admin.test_access import CountingProcess, problem
from tests.control.processes import Process, rank_stats, scheduler_stats, tier_stats

pytestmark = pytest.mark.anyio


async def asked(client: httpx.AsyncClient, path: str) -> httpx.Response:
    """An open route, right after a round of questions to all processes: it asks none itself."""
    await client.get("/v1/stats", headers=AUTH)
    return await client.get(path)


@pytest.mark.parametrize(
    ("report", "struct"),
    [(TierReport, TierStats), (RankReport, RankStats), (SchedulerReport, SchedulerStats)],
)
def test_reports_show_every_field_of_what_is_reported(
    report: type[TierReport], struct: type[TierStats]
) -> None:
    assert set(report.model_fields) == set(struct.__struct_fields__)


async def test_ready_when_the_scheduler_and_every_expected_rank_are(admin: Admin, serve: Serve) -> None:
    async with admin(expected_ranks=2) as client:
        steps: list[tuple[str, RankStats | SchedulerStats]] = [
            ("scheduler", scheduler_stats(ready=False, reason="loading")),
            ("rank0", rank_stats(0)),
            ("rank1", rank_stats(1, ready=False, reason="Pinning")),
        ]
        processes = {}
        missing = {"scheduler", "rank0", "rank1"}
        for name, stats in steps:
            body = problem(await asked(client, "/readyz"), 503, "NotReady")
            assert set(body["not_ready"]) == missing  # type: ignore[call-overload]
            processes[name] = Process(stats)
            serve(name, processes[name])
            if stats.ready:
                missing.remove(name)
        body = problem(await asked(client, "/readyz"), 503, "NotReady")
        assert body["not_ready"] == {"scheduler": "loading", "rank1": "Pinning"}
        assert "rank1: Pinning" in str(body["detail"])
        processes["scheduler"].reported = scheduler_stats()
        processes["rank1"].reported = rank_stats(1)
        answer = await asked(client, "/readyz")
        assert (answer.status_code, answer.json()) == (200, {"status": "ready"})


async def test_without_an_expected_number_one_rank_is_enough(admin: Admin, serve: Serve) -> None:
    serve("scheduler", Process(scheduler_stats()))
    async with admin() as client:
        body = problem(await asked(client, "/readyz"), 503, "NotReady")
        assert set(body["not_ready"]) == {"ranks"}  # type: ignore[call-overload]
        serve("rank0", Process(rank_stats(0)))
        assert (await asked(client, "/readyz")).status_code == 200


async def test_totals_count_bytes_of_all_ranks_and_tokens_once(admin: Admin, serve: Serve) -> None:
    scheduler = scheduler_stats(
        requests=3,
        prompt_tokens=1000,
        hit_gpu_tokens=200,
        hit_cache_tokens={"cpu": 300, "disk": 100},
        computed_tokens=400,
    )
    serve("scheduler", Process(scheduler))
    for rank in (0, 1):
        cpu = tier_stats(capacity_bytes=100, used_bytes=40 + rank, objects=4, hit_tokens=300, evictions=rank)
        disk = tier_stats(
            "disk", state="Ready" if rank == 0 else "Unwritable", capacity_bytes=7, read_seconds=0.25
        )
        stats = rank_stats(rank, tiers=[cpu, disk], stored_tokens=512 + rank, loaded_tokens=256)
        serve(f"rank{rank}", Process(stats))
    async with admin() as client:
        before = datetime.now(UTC)
        body = (await client.get("/v1/stats", headers=AUTH)).json()
    assert body["totals"] == {
        "requests": 3,
        "prompt_tokens": 1000,
        "hit_gpu_tokens": 200,
        "hit_cache_tokens": 400,
        "computed_tokens": 400,
        "hit_rate": 0.5,
        "stored_tokens": 513,
        "loaded_tokens": 256,
        "capacity_bytes": 214,
        "used_bytes": 81,
        "objects": 8,
    }
    assert abs((datetime.fromisoformat(body["updated_at"]) - before).total_seconds()) < 60
    assert body["missing"] == {}
    assert body["scheduler"] == msgspec.to_builtins(scheduler)
    assert [rank["rank"] for rank in body["ranks"]] == [0, 1]
    cpu, disk = body["tiers"]
    assert (cpu["name"], cpu["state"], cpu["used_bytes"], cpu["hit_tokens"]) == ("cpu", "Ready", 81, 300)
    assert (disk["name"], disk["state"], disk["read_seconds"]) == ("disk", "Unwritable", 0.5)


async def test_the_window_sees_what_happened_since_it_watches(admin: Admin, serve: Serve) -> None:
    process = Process(scheduler_stats(prompt_tokens=5000, computed_tokens=5000))
    serve("scheduler", process)
    async with admin(sample_s=3600) as client:
        first = (await client.get("/v1/stats", headers=AUTH)).json()
        assert (first["window"]["prompt_tokens"], first["window"]["hit_rate"]) == (0, None)
        process.reported = scheduler_stats(
            prompt_tokens=5400, hit_gpu_tokens=200, hit_cache_tokens={"cpu": 150}, computed_tokens=5050
        )
        window = (await client.get("/v1/stats", headers=AUTH)).json()["window"]
    assert (window["prompt_tokens"], window["hit_gpu_tokens"], window["hit_cache_tokens"]) == (400, 200, 150)
    assert window["hit_rate"] == 0.75
    assert 0 <= window["seconds"] < 300


async def test_a_rank_that_hangs_is_named_and_the_others_are_served(admin: Admin, serve: Serve) -> None:
    hanging = Process(rank_stats(1))
    hanging.go.clear()
    serve("scheduler", Process(scheduler_stats(prompt_tokens=9)))
    serve("rank0", Process(rank_stats(0, stored_tokens=77)))
    serve("rank1", hanging)
    async with admin(timeout_s=0.2, expected_ranks=3) as client:
        body = (await client.get("/v1/stats", headers=AUTH)).json()
        assert set(body["missing"]) == {"rank1", "rank2"}
        assert body["missing"]["rank1"] == "it did not answer within 0.2 s"
        assert (body["totals"]["prompt_tokens"], body["totals"]["stored_tokens"]) == (9, 77)
        tier = (await client.get("/v1/stats/tiers/cpu", headers=AUTH)).json()
        assert (set(tier["ranks"]), set(tier["missing"])) == ({"rank0"}, {"rank1", "rank2"})
        assert 'kvcache_process_up{process="rank1"} 0.0' in (await asked(client, "/metrics")).text
        hanging.go.set()
        body = (await client.get("/v1/stats", headers=AUTH)).json()
        assert set(body["missing"]) == {"rank2"}


async def test_nobody_there(admin: Admin, socket_dir: Path) -> None:
    async with admin(runtime_dir=str(socket_dir / "none")) as client:
        body = (await client.get("/v1/stats", headers=AUTH)).json()
        assert (body["scheduler"], body["ranks"], body["tiers"]) == (None, [], [])
        assert set(body["missing"]) == {"scheduler"}


async def test_one_tier(admin: Admin, serve: Serve) -> None:
    for rank in (0, 1):
        serve(f"rank{rank}", Process(rank_stats(rank, tiers=[tier_stats(objects=rank + 1)])))
    async with admin() as client:
        body = (await client.get("/v1/stats/tiers/cpu", headers=AUTH)).json()
        assert body["total"]["objects"] == 3
        assert {name: tier["objects"] for name, tier in body["ranks"].items()} == {"rank0": 1, "rank1": 2}
        answer = await client.get("/v1/stats/tiers/nvme", headers=AUTH)
        assert problem(answer, 404, "UnknownTier")["known_tiers"] == ["cpu"]


async def test_metrics_are_those_of_the_processes(admin: Admin, serve: Serve) -> None:
    serve("scheduler", Process(scheduler_stats(requests=12)))
    serve("rank0", Process(rank_stats(0)))
    async with admin() as client:
        answer = await asked(client, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert families["kvcache_requests"].samples[0].value == 12


async def test_however_many_ask_the_processes_are_asked_once_in_a_while(admin: Admin, serve: Serve) -> None:
    rank = CountingProcess(rank_stats(0))
    serve("rank0", rank)
    async with admin(sample_s=3600, rounds_at_once=1, rounds_per_s=0.0) as client:
        for _ in range(20):
            assert (await client.get("/v1/stats", headers=AUTH)).json()["ranks"]
        assert rank.asked == 1


async def test_after_a_flush_they_are_asked_anew(admin: Admin, serve: Serve) -> None:
    rank = CountingProcess(rank_stats(0))
    serve("rank0", rank)
    async with admin(sample_s=3600, rounds_at_once=1, rounds_per_s=0.0) as client:
        for rounds in (1, 2, 3):
            for _ in range(3):
                await client.get("/v1/stats", headers=AUTH)
            assert rank.asked == rounds
            body = {"tiers": ["cpu"], "wait": True}
            assert (await client.post("/v1/flush", headers=AUTH, json=body)).json()["complete"]
