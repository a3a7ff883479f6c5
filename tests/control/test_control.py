# SPDX-License-Identifier: Apache-2.0
"""The sidecar's questions to real control servers, of which some hang, fail or are gone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from kvcache.control.client import ControlClient
from kvcache.control.server import ControlServer
from kvcache.control.snapshot import Snapshot
from kvcache.control.wire import FlushResult, rank_name, rank_of, served_names, socket_path
from kvcache.stats import RankStats
from tests.control.processes import Process, rank_stats, scheduler_stats, tier_stats

T = TypeVar("T")


@pytest.fixture
def serve(socket_dir: Path) -> Iterator[Callable[..., ControlServer]]:
    servers: list[tuple[ControlServer, Process]] = []

    def start(name: str, process: Process) -> ControlServer:
        server = ControlServer(socket_dir, name, process)
        servers.append((server, process))
        return server

    yield start
    for server, process in servers:
        process.go.set()
        server.close()


def asked(
    runtime_dir: Path, question: Callable[[ControlClient], Coroutine[Any, Any, T]], ranks: int | None = None
) -> T:
    async def ask() -> T:
        client = ControlClient(runtime_dir, ranks, timeout_s=0.3, flush_timeout_s=0.3)
        try:
            return await question(client)
        finally:
            client.close()

    return asyncio.run(ask())


def test_every_process_is_asked(socket_dir: Path, serve: Callable[..., ControlServer]) -> None:
    scheduler = scheduler_stats(prompt_tokens=10, hit_cache_tokens={"cpu": 4}, failures={"LoadFailed": 2})
    ranks = {
        rank: rank_stats(rank, tiers=[tier_stats(used_bytes=rank), tier_stats("disk")]) for rank in (0, 1, 11)
    }
    serve("scheduler", Process(scheduler))
    for rank, stats in ranks.items():
        serve(rank_name(rank), Process(stats))
    snapshot = asked(socket_dir, ControlClient.snapshot)
    assert snapshot.scheduler == scheduler
    assert snapshot.ranks == ranks
    assert snapshot.missing == {}
    assert snapshot.not_ready() == {}
    assert snapshot.tier_names() == ["cpu", "disk"]


def test_those_that_hang_are_gone_or_never_came_are_named(
    socket_dir: Path, serve: Callable[..., ControlServer]
) -> None:
    serve("scheduler", Process(scheduler_stats()))
    serve("rank0", Process(rank_stats(0)))
    hanging = Process(rank_stats(1))
    hanging.go.clear()
    serve("rank1", hanging)
    killed = zmq.Context()
    killed.socket(zmq.ROUTER).bind(f"ipc://{socket_path(socket_dir, 'rank2')}")
    killed.destroy(linger=0)  # leaves its socket file
    assert served_names(socket_dir) == ["rank0", "rank1", "rank2", "scheduler"]
    snapshot = asked(socket_dir, ControlClient.snapshot, ranks=4)
    assert set(snapshot.ranks) == {0}
    assert snapshot.missing["rank1"] == "it did not answer within 0.3 s"
    assert snapshot.missing["rank2"] == snapshot.missing["rank3"]
    assert "not served" in snapshot.missing["rank2"]
    assert set(snapshot.not_ready()) == {"rank1", "rank2", "rank3"}


def test_a_failing_backend_is_named_with_its_reason(
    socket_dir: Path, serve: Callable[..., ControlServer]
) -> None:
    class Broken(Process):
        def stats(self) -> RankStats:
            raise RuntimeError("no counters")

    serve("scheduler", Process(scheduler_stats()))
    server = serve("rank0", Broken(rank_stats(0)))
    snapshot = asked(socket_dir, ControlClient.snapshot)
    assert snapshot.missing == {"rank0": "RuntimeError: no counters"}
    assert server.counters.failures == 1


def test_a_rank_that_reports_for_the_scheduler_is_no_scheduler(
    socket_dir: Path, serve: Callable[..., ControlServer]
) -> None:
    serve("scheduler", Process(rank_stats(0)))
    snapshot = asked(socket_dir, ControlClient.snapshot)
    assert snapshot.scheduler is None
    assert "no SchedulerSnapshot" in snapshot.missing["scheduler"]


def test_a_restarted_rank_is_found_again(socket_dir: Path, serve: Callable[..., ControlServer]) -> None:
    async def through_restarts() -> list[int]:
        client = ControlClient(socket_dir, timeout_s=5)
        pids = []
        try:
            for pid in (1, 2):
                with ControlServer(socket_dir, "rank0", Process(rank_stats(0, pid=pid))):
                    pids.append((await client.snapshot()).ranks[0].pid)
                assert (await client.snapshot()).ranks == {}
        finally:
            client.close()
        return pids

    assert asyncio.run(through_restarts()) == [1, 2]


def test_a_connection_that_answered_is_used_again(
    socket_dir: Path, serve: Callable[..., ControlServer]
) -> None:
    serve("scheduler", Process(scheduler_stats()))
    serve("rank0", Process(rank_stats(0)))

    def connections() -> int:
        path = str(socket_path(socket_dir, "rank0"))
        lines = Path("/proc/net/unix").read_text().splitlines()
        return sum(line.endswith(path) for line in lines) - 1  # one of them listens

    async def rounds() -> list[int]:
        client = ControlClient(socket_dir, timeout_s=5)
        seen = []
        try:
            for _ in range(5):
                assert (await client.snapshot()).missing == {}
                seen.append(connections())
            await asyncio.gather(*(client.snapshot() for _ in range(3)))
        finally:
            client.close()
        return seen

    assert asyncio.run(rounds()) == [1] * 5


def test_an_answer_that_came_too_late_is_not_the_next_ones(
    socket_dir: Path, serve: Callable[..., ControlServer]
) -> None:
    rank = Process(rank_stats(0, stored_tokens=1))
    serve("rank0", rank)

    async def ask() -> list[int]:
        client = ControlClient(socket_dir, timeout_s=0.3)
        stored = []
        try:
            stored.append((await client.snapshot()).ranks[0].stored_tokens)
            rank.go.clear()
            assert (await client.snapshot()).missing["rank0"] == "it did not answer within 0.3 s"
            rank.go.set()
            rank.reported = rank_stats(0, stored_tokens=2)
            for _ in range(3):
                stored.append((await client.snapshot()).ranks[0].stored_tokens)
        finally:
            client.close()
        return stored

    assert asyncio.run(ask()) == [1, 2, 2, 2]


@pytest.mark.parametrize("ends", ["closed", "killed"])
def test_a_process_that_ends_between_two_requests(socket_dir: Path, ends: str) -> None:
    async def ask() -> None:
        client = ControlClient(socket_dir, expected_ranks=1, timeout_s=1)
        try:
            for number in range(3):
                process = _started(socket_dir, number)
                try:
                    assert (await client.snapshot()).ranks[0].stored_tokens == number
                finally:
                    if ends == "closed":
                        process.communicate(b"")
                    process.kill()
                    process.wait()
                assert "not served" in (await client.snapshot()).missing["rank0"]
        finally:
            client.close()

    asyncio.run(ask())


def _started(runtime_dir: Path, stored_tokens: int) -> subprocess.Popen[bytes]:
    """A rank in a process of its own, which ends with its input."""
    program = (
        "import sys; from kvcache.control.server import ControlServer;"
        "from tests.control.processes import Process, rank_stats;"
        "process = Process(rank_stats(0, stored_tokens=int(sys.argv[2])));"
        "server = ControlServer(sys.argv[1], 'rank0', process);"
        "print(flush=True); sys.stdin.read(); server.close()"
    )
    command = [sys.executable, "-c", program, str(runtime_dir), str(stored_tokens)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_flush_reaches_every_rank_and_each_tier_has_a_result(
    socket_dir: Path, serve: Callable[..., ControlServer]
) -> None:
    scheduler = Process(scheduler_stats())
    ranks = [Process(rank_stats(rank)) for rank in range(2)]
    serve("scheduler", scheduler)
    for rank, process in enumerate(ranks):
        serve(rank_name(rank), process)
    results = asked(socket_dir, lambda client: client.flush(["cpu", "disk"]), ranks=3)
    assert [process.flushed for process in (*ranks, scheduler)] == [[["cpu", "disk"]], [["cpu", "disk"]], []]
    for name in ("rank0", "rank1"):
        cpu, disk = results[name]
        assert (cpu.tier, cpu.complete, cpu.removed_objects, cpu.removed_bytes) == ("cpu", True, 3, 99)
        assert (disk.tier, disk.complete, disk.reason) == ("disk", False, "the rank has no such tier")
    assert [(result.tier, result.complete) for result in results["rank2"]] == [
        ("cpu", False),
        ("disk", False),
    ]


def test_a_rank_that_hangs_in_a_flush(socket_dir: Path, serve: Callable[..., ControlServer]) -> None:
    ranks = [Process(rank_stats(rank)) for rank in range(2)]
    ranks[1].go.clear()
    for rank, process in enumerate(ranks):
        serve(rank_name(rank), process)
    results = asked(socket_dir, lambda client: client.flush(["cpu"]))
    assert results["rank0"][0].complete
    assert results["rank1"] == [
        FlushResult(tier="cpu", complete=False, reason="it did not answer within 0.3 s")
    ]


def test_an_empty_or_missing_folder(socket_dir: Path) -> None:
    snapshot = asked(socket_dir / "none", ControlClient.snapshot)
    assert (snapshot.scheduler, snapshot.ranks, set(snapshot.missing)) == (None, {}, {"scheduler"})
    assert set(snapshot.not_ready()) == {"scheduler", "ranks"}
    assert asked(socket_dir / "none", lambda client: client.flush(["cpu"])) == {}


def test_ready_is_what_the_processes_say() -> None:
    snapshot = Snapshot(
        0.0,
        scheduler_stats(ready=False, reason="waits for the ranks"),
        {0: rank_stats(0), 1: rank_stats(1, ready=False)},
    )
    assert snapshot.not_ready() == {"scheduler": "waits for the ranks", "rank1": "not ready"}


@pytest.mark.parametrize("name", ["rank", "rank-1", "rank01", "rank1x", "rank1\n", "scheduler", "rank123456"])
def test_other_names_are_no_ranks(name: str) -> None:
    assert rank_of(name) is None


@pytest.mark.parametrize("rank", [0, 9, 10, 4711])
def test_names_of_ranks(rank: int) -> None:
    assert rank_of(rank_name(rank)) == rank
