# SPDX-License-Identifier: Apache-2.0
"""Flushes through the routes, to real control servers and to what stands in for vLLM's server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.admin.conftest import AUTH, TOKEN, Admin, Serve
from tests.admin.test_access import problem
from tests.control.processes import Process, rank_stats

pytestmark = pytest.mark.anyio


class Vllm:
    """vLLM's server with our route: it answers True after `busy` times False."""

    def __init__(self, busy: int = 0) -> None:
        self.busy = busy
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        self.busy -= 1
        return httpx.Response(200, json={"success": self.busy < 0})


async def flush(client: httpx.AsyncClient, *tiers: str, **fields: Any) -> httpx.Response:
    return await client.post("/v1/flush", headers=AUTH, json={"tiers": tiers, **fields})


async def finished(client: httpx.AsyncClient, location: str) -> dict[str, Any]:
    for _ in range(3000):
        body: dict[str, Any] = (await client.get(location, headers=AUTH)).json()
        if body["state"] == "Done":
            return body
        await asyncio.sleep(0.01)
    raise AssertionError(f"{location} still runs")


async def test_gpu_and_cpu(admin: Admin, serve: Serve) -> None:
    ranks = [Process(rank_stats(rank)) for rank in (0, 1)]
    for rank, process in enumerate(ranks):
        serve(f"rank{rank}", process)
    vllm = Vllm()
    async with admin(vllm) as client:
        answer = await flush(client, "gpu", "cpu", "cpu", wait=True, reason="new weights")
        assert answer.status_code == 200
        body = answer.json()
        assert answer.headers["location"] == f"/v1/flush/{body['id']}"
        assert (await client.get(answer.headers["location"], headers=AUTH)).json() == body
    assert (body["state"], body["complete"], body["tiers"]) == ("Done", True, ["gpu", "cpu"])
    assert body["reason"] == "new weights"
    assert body["completed_at"] >= body["requested_at"]
    by_process = {result["process"]: result for result in body["results"]}
    assert set(by_process) == {"vllm", "rank0", "rank1"}
    assert by_process["vllm"]["tier"] == "gpu"
    assert (by_process["rank1"]["removed_objects"], by_process["rank1"]["removed_bytes"]) == (3, 99)
    assert [process.flushed for process in ranks] == [[["cpu"]], [["cpu"]]]
    (request,) = vllm.requests
    assert (request.method, str(request.url)) == ("POST", "http://vllm:8000/kvcache/v1/reset-gpu")
    assert request.headers["authorization"] == f"Bearer {TOKEN}"


async def test_only_the_tiers_that_are_named(admin: Admin, serve: Serve) -> None:
    rank = Process(rank_stats(0))
    serve("rank0", rank)
    vllm = Vllm()
    async with admin(vllm) as client:
        assert (await flush(client, "cpu", wait=True)).json()["complete"]
        assert (vllm.requests, rank.flushed) == ([], [["cpu"]])
        assert (await flush(client, "gpu", wait=True)).json()["complete"]
        assert (len(vllm.requests), rank.flushed) == (1, [["cpu"]])


async def test_at_once_and_one_at_a_time(admin: Admin, serve: Serve) -> None:
    rank = Process(rank_stats(0))
    serve("rank0", rank)
    async with admin(sample_s=3600) as client:
        assert (await client.get("/v1/stats/tiers/cpu", headers=AUTH)).status_code == 200
        rank.go.clear()
        answer = await flush(client, "cpu")
        assert (answer.status_code, answer.json()["state"], answer.json()["complete"]) == (
            202,
            "Running",
            None,
        )
        second = await flush(client, "cpu", wait=True)
        assert problem(second, 409, "FlushRunning")["id"] == answer.json()["id"]
        assert second.headers["location"] == answer.headers["location"]
        rank.go.set()
        assert (await finished(client, answer.headers["location"]))["complete"]
        assert (await flush(client, "cpu", wait=True)).status_code == 200


async def test_one_who_goes_away_does_not_end_the_flush(admin: Admin, serve: Serve) -> None:
    rank = Process(rank_stats(0))
    serve("rank0", rank)
    async with admin(sample_s=3600) as client:
        await client.get("/v1/stats", headers=AUTH)
        rank.go.clear()
        waiting = asyncio.create_task(flush(client, "cpu", wait=True))
        assert await asyncio.to_thread(rank.flush_reached.wait, 30)
        running = await flush(client, "cpu")
        assert running.status_code == 409
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        rank.go.set()
        assert (await finished(client, running.headers["location"]))["complete"]


async def test_the_last_32_are_kept(admin: Admin) -> None:
    async with admin(Vllm()) as client:
        ids = [(await flush(client, "gpu", wait=True)).json()["id"] for _ in range(34)]
        known = [(await client.get(f"/v1/flush/{id_}", headers=AUTH)).status_code for id_ in ids]
        assert known == [404] * 2 + [200] * 32
        problem(await client.get("/v1/flush/nothing", headers=AUTH), 404, "UnknownFlush")


async def test_a_rank_that_is_missing_makes_it_incomplete(admin: Admin, serve: Serve) -> None:
    serve("rank0", Process(rank_stats(0)))
    async with admin(expected_ranks=2) as client:
        body = (await flush(client, "cpu", wait=True)).json()
    assert body["complete"] is False
    assert {result["process"]: result["complete"] for result in body["results"]} == {
        "rank0": True,
        "rank1": False,
    }
    assert "not served" in body["results"][1]["reason"]


async def test_unknown_tiers_and_no_rank_to_know_them(admin: Admin, serve: Serve) -> None:
    async with admin(Vllm()) as client:
        body = problem(await flush(client, "cpu"), 503, "NoRanks")
        assert "scheduler" in body["missing"]  # type: ignore[operator]
        server = serve("rank0", Process(rank_stats(0)))
        body = problem(await flush(client, "cpu", "tape"), 422, "UnknownTier")
        assert body["known_tiers"] == ["gpu", "cpu"]
        assert "tape" in str(body["detail"])
        server.close()
        late = (await flush(client, "gpu", "cpu", wait=True)).json()
        assert late["complete"] is False, "the tier is known, but nobody is there to drop it"
        assert late["results"][1]["reason"] == "no rank has a control socket"


@pytest.mark.parametrize(
    "body",
    ["{", "[]", "{}", '{"tiers": []}', '{"tiers": "cpu"}', '{"tiers": ["cpu"], "wiat": true}', "[" * 10_000],
)
async def test_bodies_that_are_no_flush(admin: Admin, body: str) -> None:
    async with admin() as client:
        headers = {**AUTH, "Content-Type": "application/json"}
        answer = await client.post("/v1/flush", headers=headers, content=body)
        assert answer.status_code in (400, 422)
        assert answer.headers["content-type"] == "application/problem+json"
        headers["Content-Type"] = "application/x-www-form-urlencoded"
        answer = await client.post("/v1/flush", headers=headers, content=body)
        assert "application/json" in str(problem(answer, 415, "UnsupportedMediaType")["detail"])


@pytest.mark.parametrize(("busy", "complete"), [(1, True), (10**9, False)])
async def test_blocks_that_are_in_use(admin: Admin, busy: int, complete: bool) -> None:
    vllm = Vllm(busy)
    patience = 30 if complete else 0.15
    async with admin(vllm, gpu_patience_s=patience) as client:
        body = (await flush(client, "gpu", wait=True)).json()
    assert body["complete"] is complete
    assert ("hold blocks" in body["results"][0]["reason"]) is not complete
    assert len(vllm.requests) >= 2


def _refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("vllm", "reason"),
    [
        (_refuse, "did not answer"),
        (lambda _: httpx.Response(404, json={}), "VLLM_PLUGINS=kvcache,kvcache_admin"),
        (lambda _: httpx.Response(401, json={}), "another token"),
        (lambda _: httpx.Response(503, text="no engine"), "503: no engine"),
        (lambda _: httpx.Response(200, text="<html>"), "200: <html>"),
        (lambda _: httpx.Response(200, json={"success": "yes"}), "200:"),
        (lambda _: httpx.Response(200, json=[1]), "200:"),
        (lambda _: httpx.Response(302, headers={"Location": "http://other/"}), "302"),
    ],
)
async def test_a_vllm_that_does_not_do_it(
    admin: Admin, vllm: Callable[[httpx.Request], httpx.Response], reason: str
) -> None:
    async with admin(vllm) as client:
        body = (await flush(client, "gpu", wait=True)).json()
    assert body["complete"] is False
    assert reason in body["results"][0]["reason"]


async def test_a_flush_that_fails_inside_is_done_and_says_so(
    admin: Admin, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: object, tiers: object, scope: object) -> None:
        raise OSError("out of descriptors")

    monkeypatch.setattr("kvcache.control.client.ControlClient.flush", broken)
    serve("rank0", Process(rank_stats(0)))
    async with admin() as client:
        body = (await flush(client, "cpu", wait=True)).json()
    assert (body["state"], body["complete"]) == ("Done", False)
    assert "out of descriptors" in body["results"][0]["reason"]


async def test_no_address_of_vllm(admin: Admin) -> None:
    async with admin(vllm_url=None) as client:
        body = (await flush(client, "gpu", wait=True)).json()
    assert "--vllm-url" in body["results"][0]["reason"]


async def test_the_history_has_the_latest_first(admin: Admin, serve: Serve) -> None:
    serve("rank0", Process(rank_stats(0)))
    async with admin() as client:
        assert (await client.get("/v1/flush", headers=AUTH)).json() == {"flushes": []}
        for number in range(35):
            await flush(client, "cpu", wait=True, reason=f"number {number}")
        history = (await client.get("/v1/flush", headers=AUTH)).json()["flushes"]
        assert [report["reason"] for report in history] == [f"number {n}" for n in range(34, 2, -1)]
        assert (await client.get(f"/v1/flush/{history[-1]['id']}", headers=AUTH)).json() == history[-1]


async def test_flushes_and_requests_are_counted(admin: Admin, serve: Serve) -> None:
    serve("rank0", Process(rank_stats(0)))
    async with admin(Vllm(busy=99)) as client:
        await flush(client, "cpu", wait=True)
        await flush(client, "gpu", "cpu", wait=True)
        await client.get("/v1/flush/nothing", headers=AUTH)
        await client.get("/v1/stats")
        await client.get("/somewhere", headers=AUTH)
        text = (await client.get("/metrics")).text
    for line in (
        'kvcache_flushes_total{result="complete",tier="cpu"} 2.0',
        'kvcache_flushes_total{result="incomplete",tier="gpu"} 1.0',
        'kvcache_admin_requests_total{route="/v1/flush",status="200"} 2.0',
        'kvcache_admin_requests_total{route="/v1/flush/{flush_id}",status="404"} 1.0',
        'kvcache_admin_requests_total{route="other",status="401"} 1.0',
        'kvcache_admin_requests_total{route="other",status="404"} 1.0',
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"tiers": ["gpu"', "body: no JSON at byte "),
        (b'{"tiers": ["\xe9"]}', "body: no UTF-8"),
        (b"", "body: "),
        (b'"gpu"', "body: "),
        (b'{"tiers": []}', "tiers: "),
        (b'{"tiers": [""]}', "tiers.0: "),
        (b'{"tiers": ["gpu"], "wait": "maybe"}', "wait: "),
        (b'{"tiers": ["gpu"], "tires": 1}', "tires: "),
    ],
)
async def test_what_is_wrong_with_a_body_is_said_by_its_field(admin: Admin, body: bytes, said: str) -> None:
    async with admin() as client:
        headers = {**AUTH, "Content-Type": "application/json"}
        answer = problem(await client.post("/v1/flush", headers=headers, content=body), 422, "InvalidRequest")
        assert str(answer["detail"]).startswith(said)
