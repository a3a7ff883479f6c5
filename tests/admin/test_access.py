# SPDX-License-Identifier: Apache-2.0
"""Who is let in, and what is refused before a route or a rank sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from kvcache.admin.gate import MAX_BODY_BYTES
from kvcache.stats import RankStats, SchedulerStats
from tests.admin.conftest import AUTH, TOKEN, Admin, Serve
from tests.control.processes import Process, rank_stats

pytestmark = pytest.mark.anyio

CLOSED = [
    ("GET", "/v1/stats"),
    ("GET", "/v1/stats/tiers/cpu"),
    ("GET", "/v1/config"),
    ("POST", "/v1/flush"),
    ("GET", "/v1/flush/0"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/healthz/"),
    ("GET", "/healthz%2F"),
    ("GET", "/v1/openapi.json"),
    ("GET", "/v1/flush"),
    ("GET", "/nothing"),
]
WRONG: list[list[tuple[bytes, bytes]]] = [
    [],
    [(b"authorization", b"")],
    [(b"authorization", b"Bearer")],
    [(b"authorization", b"Bearer ")],
    [(b"authorization", TOKEN.encode())],
    [(b"authorization", b"Basic " + TOKEN.encode())],
    [(b"authorization", b"Bearer " + TOKEN[:-1].encode())],
    [(b"authorization", b"Bearer " + TOKEN.encode() + b"x")],
    [(b"authorization", b"Bearer " + TOKEN.lower().encode())],
    [(b"authorization", b"Bearer \xff\xfe")],
    [(b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer " + TOKEN.encode())],
    [(b"authorization", b"Bearer " + TOKEN.encode()), (b"authorization", b"Bearer wrong")],
]


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, object]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, object] = answer.json()
    assert (body["status"], body["code"], body["type"]) == (status, code, "about:blank")
    assert body["title"]
    assert body["detail"]
    return body


def put(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)


def replace(file: Path, content: bytes) -> None:
    """As Kubernetes does: another file behind the same name."""
    fresh = file.with_name("fresh")
    fresh.write_bytes(content)
    fresh.replace(file)


class CountingProcess(Process):
    asked = 0

    def stats(self) -> RankStats | SchedulerStats:
        self.asked += 1
        return super().stats()


@pytest.mark.parametrize(("method", "path"), CLOSED)
async def test_without_the_token_nothing_is_reached(
    admin: Admin, serve: Serve, method: str, path: str
) -> None:
    rank = CountingProcess(rank_stats(0))
    serve("rank0", rank)
    async with admin(sample_s=3600) as client:
        await client.get("/v1/stats", headers=AUTH)
        before = rank.asked
        for path_of_all in ("/readyz", "/metrics", "/healthz", "/"):
            await client.get(path_of_all)
        for headers in WRONG:
            answer = await client.request(method, path, headers=headers, content=b"{ no json")
            problem(answer, 401, "Unauthorized")
            assert answer.headers["www-authenticate"].startswith("Bearer")
        assert rank.asked == before
        assert rank.flushed == []


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_with_the_token(admin: Admin, scheme: str) -> None:
    async with admin() as client:
        assert (
            await client.get("/v1/stats", headers={"Authorization": f"{scheme} {TOKEN}"})
        ).status_code == 200
        problem(await client.get("/nothing", headers=AUTH), 404, "NotFound")
        answer = await client.delete("/v1/stats", headers=AUTH)
        problem(answer, 405, "MethodNotAllowed")
        assert answer.headers["allow"] == "GET"


async def test_open_routes_need_none(admin: Admin) -> None:
    async with admin(token_file=None) as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        assert (await client.get("/metrics")).status_code == 200
        problem(await client.get("/readyz"), 503, "NotReady")


@pytest.mark.parametrize("content", [None, b"", b" \n", b"x" * 5000])
async def test_without_a_usable_token_every_closed_route_is_shut(
    admin: Admin, token_file: Path, content: bytes | None
) -> None:
    put(token_file, content)
    async with admin() as client:
        for method, path in CLOSED:
            for header in (
                f"Bearer {TOKEN}",
                "Bearer ",
                "Bearer " + (content or b"").decode()[:4096].strip(),
            ):
                answer = await client.request(method, path, headers={"Authorization": header})
                problem(answer, 503, "TokenUnavailable")


async def test_no_token_file_named(admin: Admin) -> None:
    async with admin(token_file=None) as client:
        problem(await client.get("/v1/stats", headers=AUTH), 503, "TokenUnavailable")


async def test_the_token_is_replaced_while_it_runs(admin: Admin, token_file: Path) -> None:
    async def status(client: httpx.AsyncClient, token: str) -> int:
        return (await client.get("/v1/stats", headers={"Authorization": f"Bearer {token}"})).status_code

    async with admin() as client:
        assert await status(client, TOKEN) == 200
        replace(token_file, b"second-token")
        assert (await status(client, TOKEN), await status(client, "second-token")) == (401, 200)
        put(token_file, b"third-token, of another length")
        assert await status(client, "second-token") == 401
        assert await status(client, "third-token, of another length") == 200
        put(token_file, None)
        assert await status(client, "third-token, of another length") == 503
        put(token_file, TOKEN.encode())
        assert await status(client, TOKEN) == 200


async def _stream(size: int) -> AsyncIterator[bytes]:
    for start in range(0, size, 1000):
        yield b" " * min(1000, size - start)


async def test_bodies_have_a_bound(admin: Admin) -> None:
    async with admin() as client:
        for body in (b" " * (MAX_BODY_BYTES + 1), _stream(MAX_BODY_BYTES + 1)):
            answer = await client.post("/v1/flush", headers=AUTH, content=body)
            problem(answer, 413, "BodyTooLarge")
        headers = {**AUTH, "Content-Type": "application/json"}
        exact = b'{"tiers": ["gpu"], "wait": true}'
        answer = await client.post("/v1/flush", headers=headers, content=exact.ljust(MAX_BODY_BYTES))
        assert answer.status_code == 200


async def test_a_failure_inside_shows_nothing_of_the_inside(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("kvcache.admin.rounds.Rounds.snapshot", broken)
    async with admin() as client:
        answer = await client.get("/v1/stats", headers=AUTH)
        problem(answer, 500, "InternalError")
        assert "secret detail" not in answer.text
