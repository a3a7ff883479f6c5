# SPDX-License-Identifier: Apache-2.0
"""What is cached of a prompt, pins, and flushes of a part."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kvcache.control.wire import FlushScope, Part, Prefix
from kvcache.storage.pins import PinRefusedError
from tests.admin.conftest import AUTH, Admin, Serve
from tests.control.processes import Process, rank_stats, scheduler_stats

pytestmark = pytest.mark.anyio


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["code"] == code
    return body


def tokenizer(request: httpx.Request) -> httpx.Response:
    """vLLM's route: a token a letter."""
    assert request.url.path == "/tokenize"
    prompt = json.loads(request.content)["prompt"]
    return httpx.Response(200, json={"tokens": [ord(letter) for letter in prompt], "count": len(prompt)})


def two_ranks(serve: Serve) -> list[Process]:
    ranks = [Process(rank_stats(0)), Process(rank_stats(1))]
    serve("scheduler", Process(scheduler_stats()))
    for number, rank in enumerate(ranks):
        serve(f"rank{number}", rank)
    return ranks


async def test_what_all_ranks_have_of_a_prompt(admin: Admin, serve: Serve) -> None:
    first, second = two_ranks(serve)
    first.parts = [Part(tier="cpu", tokens=8), Part(tier="disk", tokens=4)]
    second.parts = [Part(tier="cpu", tokens=4), Part(tier="remote", tokens=4)]
    async with admin() as client:
        got = await client.get("/v1/lookup?tokens=1,2,%203&salt=me", headers=AUTH)
        posted = await client.post("/v1/lookup", headers=AUTH, json={"tokens": [1, 2, 3], "salt": "me"})
    assert got.json() == posted.json()
    assert first.located == second.located == [Prefix(tokens=[1, 2, 3], salt="me")] * 2
    assert got.json() == {
        "tokens": 3,
        "cached_tokens": 8,
        "parts": [
            {"first_token": 0, "tokens": 4, "tier": "cpu"},
            {"first_token": 4, "tokens": 4, "tier": "remote"},
        ],
        "ranks": {
            "rank0": [
                {"first_token": 0, "tokens": 8, "tier": "cpu"},
                {"first_token": 8, "tokens": 4, "tier": "disk"},
            ],
            "rank1": [
                {"first_token": 0, "tokens": 4, "tier": "cpu"},
                {"first_token": 4, "tokens": 4, "tier": "remote"},
            ],
        },
        "missing": {},
    }


async def test_a_text_is_read_by_vllm(admin: Admin, serve: Serve) -> None:
    first, _ = two_ranks(serve)
    async with admin(tokenizer) as client:
        assert (await client.get("/v1/lookup?prompt=abc", headers=AUTH)).json()["tokens"] == 3
    assert first.located == [Prefix(tokens=[97, 98, 99])]


@pytest.mark.parametrize(
    "vllm",
    [
        lambda request: httpx.Response(404, text="no such route"),
        lambda request: httpx.Response(200, json={"tokens": ["a"]}),
        lambda request: httpx.Response(200, json=[1]),
        lambda request: httpx.Response(200, text="<html>"),
    ],
)
async def test_a_text_that_vllm_does_not_read(admin: Admin, serve: Serve, vllm: Any) -> None:
    two_ranks(serve)
    async with admin(vllm) as client:
        problem(await client.get("/v1/lookup?prompt=abc", headers=AUTH), 503, "NoTokenizer")
    async with admin(vllm_url=None) as client:
        body = problem(await client.get("/v1/lookup?prompt=abc", headers=AUTH), 503, "NoTokenizer")
    assert "send token ids" in body["detail"]


@pytest.mark.parametrize("query", ["", "tokens=1&prompt=a", "tokens=1,x", "tokens=-1", "tokens=1,,2"])
async def test_questions_about_no_prompt(admin: Admin, serve: Serve, query: str) -> None:
    two_ranks(serve)
    async with admin() as client:
        problem(await client.get(f"/v1/lookup?{query}", headers=AUTH), 422, "InvalidRequest")


async def test_a_rank_that_does_not_say_is_named(admin: Admin, serve: Serve) -> None:
    first, second = two_ranks(serve)
    first.parts = [Part(tier="cpu", tokens=8)]
    second.hangs = True
    async with admin(flush_timeout_s=0.2) as client:
        body = (await client.get("/v1/lookup?tokens=1", headers=AUTH)).json()
        assert (body["cached_tokens"], list(body["missing"])) == (8, ["rank1"])
        # Others are answered meanwhile.
        assert (await client.get("/v1/pins", headers=AUTH)).json()["missing"] == {}


async def test_pins_of_all_ranks(admin: Admin, serve: Serve) -> None:
    first, second = two_ranks(serve)
    first.stored = 1
    async with admin() as client:
        body = {"owner": "me", "tokens": list(range(9)), "salt": "s"}
        pinned = (await client.post("/v1/pin", headers=AUTH, json=body)).json()
        assert pinned == {
            "owner": "me",
            "tokens": 9,
            "ranks": {"rank0": {"chunks": 2, "stored": 1}, "rank1": {"chunks": 2, "stored": 0}},
            "missing": {},
        }
        assert first.kept == second.kept == {"me": Prefix(tokens=list(range(9)), salt="s")}
        pins = (await client.get("/v1/pins", headers=AUTH)).json()
        assert pins == {"pins": [{"owner": "me", "chunks": 2}], "missing": {}}
        unpinned = (await client.delete("/v1/pin/me", headers=AUTH)).json()
        assert unpinned == {"owner": "me", "chunks": 2, "missing": {}}
        problem(await client.delete("/v1/pin/me", headers=AUTH), 404, "UnknownOwner")
        problem(await client.delete("/v1/pin/not%20an%20owner", headers=AUTH), 422, "InvalidRequest")


async def test_a_pin_that_one_rank_refuses_is_none(admin: Admin, serve: Serve) -> None:
    first, second = two_ranks(serve)
    second.refusal = PinRefusedError("5 chunks would be pinned, at most 4 may be")
    async with admin() as client:
        answer = await client.post("/v1/pin", headers=AUTH, json={"owner": "me", "tokens": [1]})
    assert "rank1: 5 chunks" in problem(answer, 409, "PinRefused")["detail"]
    assert first.kept == {}


async def test_without_ranks(admin: Admin, serve: Serve) -> None:
    serve("scheduler", Process(scheduler_stats()))
    async with admin() as client:
        for answer in (
            await client.get("/v1/pins", headers=AUTH),
            await client.get("/v1/lookup?tokens=1", headers=AUTH),
            await client.delete("/v1/pin/me", headers=AUTH),
            await client.post("/v1/pin", headers=AUTH, json={"owner": "me", "tokens": [1]}),
        ):
            problem(answer, 503, "NoRanks")


async def test_a_flush_of_a_part(admin: Admin, serve: Serve) -> None:
    first, _ = two_ranks(serve)
    namespace = "0123456789abcdef" * 2
    scope = {"namespace": namespace, "salt": "me", "prompt": "ab", "force": True}
    async with admin(tokenizer) as client:
        body = {"tiers": ["cpu"], "wait": True, "scope": scope}
        report = (await client.post("/v1/flush", headers=AUTH, json=body)).json()
    assert report["complete"]
    assert report["scope"] == {"namespace": namespace, "salt": "me", "tokens": 2, "force": True}
    prefix = Prefix(tokens=[97, 98], salt="me")
    expected = FlushScope(namespace=bytes.fromhex(namespace), salt="me", prefix=prefix, force=True)
    assert first.scopes == [expected]


async def test_the_gpu_tier_has_no_parts(admin: Admin, serve: Serve) -> None:
    first, _ = two_ranks(serve)
    async with admin() as client:
        scopes: list[dict[str, Any]] = [{"salt": ""}, {"tokens": []}, {"namespace": "0" * 32}]
        for scope in scopes:
            body: dict[str, Any] = {"tiers": ["gpu", "cpu"], "wait": True, "scope": scope}
            problem(await client.post("/v1/flush", headers=AUTH, json=body), 422, "ScopedGpu")
        body = {"tiers": ["cpu"], "scope": {"tokens": [1], "prompt": "a"}}
        problem(await client.post("/v1/flush", headers=AUTH, json=body), 422, "InvalidRequest")
    assert first.scopes == []
