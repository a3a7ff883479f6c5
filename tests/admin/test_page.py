# SPDX-License-Identifier: Apache-2.0
"""The status page: who sees it, what it says, and how it behaves in a real browser."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcache.admin.sessions import LIFETIME_S, Sessions
from kvcache.bearer import TokenFile
from tests.admin.conftest import AUTH, TOKEN, Admin, Serve
from tests.admin.sidecar import sidecar
from tests.admin.test_access import replace
from tests.control.processes import Process, rank_stats, scheduler_stats, tier_stats

CHROMIUM = shutil.which("chromium")
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
SHOT = os.environ.get("KVCACHE_PICTURES")
EVIL = "<script>alert(1)</script>"


def processes(serve: Serve) -> Process:
    scheduler = scheduler_stats(
        requests=21,
        prompt_tokens=90_000,
        hit_gpu_tokens=10_000,
        hit_cache_tokens={"cpu": 55_000, "disk": 5_000},
        computed_tokens=20_000,
    )
    serve("scheduler", Process(scheduler))
    tiers = [
        tier_stats(capacity_bytes=32 << 30, used_bytes=8 << 30, objects=1234, hit_tokens=55_000),
        tier_stats("disk", state="Unwritable", detail=f"no space left {EVIL}", capacity_bytes=1 << 40),
    ]
    rank = Process(rank_stats(0, tiers=tiers))
    serve("rank0", rank)
    return rank


async def logged_in(client: httpx.AsyncClient, token: str = TOKEN) -> httpx.Response:
    return await client.post("/login", headers=FORM, content=f"token={token.replace('+', '%2B')}")


@pytest.mark.anyio
class TestRoutes:
    async def test_without_a_token_there_is_a_form_and_nothing_else(self, admin: Admin, serve: Serve) -> None:
        processes(serve)
        async with admin() as client:
            answer = await client.get("/")
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert 'name="token"' in answer.text
            assert "55" not in answer.text
            assert "role=" not in answer.text

    async def test_with_the_header_or_the_form(self, admin: Admin, serve: Serve) -> None:
        processes(serve)
        async with admin() as client:
            by_header = await client.get("/", headers=AUTH)
            answer = await logged_in(client)
            assert (answer.status_code, answer.headers["location"]) == (303, "./")
            cookie = answer.headers["set-cookie"]
            assert "HttpOnly" in cookie and "SameSite=strict" in cookie and f"Max-Age={LIFETIME_S}" in cookie
            assert TOKEN not in cookie
            by_cookie = await client.get("/")
            for page in (by_header, by_cookie):
                assert page.status_code == 200
                assert "60,000" in page.text
                assert "75.0%" in page.text
                assert "8.0 GiB" in page.text
            await client.post("/logout")
            assert (await client.get("/")).status_code == 401

    async def test_a_wrong_token_says_so(self, admin: Admin) -> None:
        async with admin() as client:
            for answer in (
                await logged_in(client, "wrong"),
                await client.post("/login", headers=FORM, content=b"\xff=%ff&token=%00"),
                await client.get("/", headers={"Authorization": "Bearer wrong"}),
            ):
                assert answer.status_code == 401
                assert 'role="alert"' in answer.text
                assert "set-cookie" not in answer.headers

    async def test_a_new_token_ends_sessions(self, admin: Admin, token_file: Path) -> None:
        async with admin() as client:
            await logged_in(client)
            assert (await client.get("/")).status_code == 200
            replace(token_file, b"another")
            assert (await client.get("/")).status_code == 401
            replace(token_file, b"")
            assert (await client.get("/")).status_code == 503

    async def test_a_cookie_opens_the_page_and_no_other_route(self, admin: Admin) -> None:
        async with admin() as client:
            await logged_in(client)
            for path in ("/v1/stats", "/v1/config", "/v1/flush"):
                assert (await client.get(path)).status_code == 401

    async def test_flush_by_the_form(self, admin: Admin, serve: Serve) -> None:
        rank = processes(serve)
        async with admin() as client:
            refused = await client.post("/flush", headers=FORM, content="tier=cpu")
            assert refused.status_code == 401
            assert rank.flushed == []
            await logged_in(client)
            answer = await client.post("/flush", headers=FORM, content="tier=cpu&reason=new+weights")
            assert answer.status_code == 303
            for _ in range(500):
                page = (await client.get("/")).text
                if "new weights" in page and ">running<" not in page:
                    break
                await asyncio.sleep(0.01)
            assert "complete" in page
            assert rank.flushed == [["cpu"]]

    async def test_a_flush_of_nothing_or_of_what_is_not_there(self, admin: Admin, serve: Serve) -> None:
        processes(serve)
        async with admin() as client:
            await logged_in(client)
            for form, said in (("", "Choose"), ("tier=nvme", "nvme"), ("tier=cpu&reason=" + "x" * 300, "")):
                answer = await client.post("/flush", headers=FORM, content=form)
                assert answer.status_code == 422
                assert said in answer.text
            many = await client.post("/flush", headers=FORM, content="&".join(["tier=cpu"] * 99))
            assert many.json()["code"] == "InvalidRequest"

    async def test_forms_of_other_sites_are_refused(self, admin: Admin, serve: Serve) -> None:
        rank = processes(serve)
        async with admin() as client:
            await logged_in(client)
            for path in ("/flush", "/login", "/logout"):
                for origin in ("http://evil.example", "null", "http://admin.evil.example"):
                    answer = await client.post(path, headers={**FORM, "Origin": origin}, content="tier=cpu")
                    assert answer.json()["code"] == "ForeignOrigin"
            assert (await client.get("/")).status_code == 200
            ours = await client.post("/flush", headers={**FORM, "Origin": "http://admin"}, content="tier=cpu")
            assert ours.status_code == 303
        assert rank.flushed in ([["cpu"]], [])

    async def test_nothing_of_what_is_shown_is_taken_for_markup(self, admin: Admin, serve: Serve) -> None:
        processes(serve)
        async with admin() as client:
            await logged_in(client)
            await client.post("/flush", headers=FORM, content=f"tier=cpu&reason={EVIL}")
            page = await client.get("/")
            assert EVIL not in page.text
            assert page.text.count("&lt;script&gt;") == 2
            policy = page.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; style-src 'sha256-")
            assert "unsafe" not in policy and "script-src" not in policy
            assert page.headers["cache-control"] == "no-store"
            outside = re.findall(r"""(?:src|href|url)\s*[=(]|https?://|@import|<script""", page.text)
            assert outside == []


class TestSessions:
    @pytest.fixture
    def sessions(self, token_file: Path) -> Sessions:
        self.now = 5000.0
        return Sessions(TokenFile(token_file), clock=lambda: self.now)

    def test_it_ends_after_an_hour(self, sessions: Sessions) -> None:
        cookie, refusal = sessions.open(TOKEN.encode())
        assert cookie is not None and refusal is None
        assert sessions.refusal(None, cookie) is None
        self.now += LIFETIME_S + 1
        assert sessions.refusal(None, cookie) is not None

    def test_a_made_up_cookie_opens_nothing(self, sessions: Sessions) -> None:
        cookie, _ = sessions.open(TOKEN.encode())
        assert cookie is not None
        expires, _, signature = cookie.partition(".")
        later = f"{int(expires) + 1}.{signature}"
        for made_up in (
            "",
            ".",
            expires,
            f"{expires}.",
            f"{expires}.é",
            later,
            f"²{cookie}",
            f"-{cookie}",
            cookie[:-1],
        ):
            assert sessions.refusal(None, made_up) is not None
        # A header that is wrong is not mended by a cookie that is right.
        assert sessions.refusal(b"Bearer wrong", cookie) is not None


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")
def test_in_a_browser(serve: Serve, socket_dir: Path, token_file: Path, tmp_path: Path) -> None:
    """Token by the form, figures, a flush and its result; nothing is fetched from elsewhere and nothing is
    blocked by the policy."""
    from playwright.sync_api import sync_playwright

    rank = processes(serve)
    with sidecar(socket_dir, token_file) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page: Any = browser.new_page(viewport={"width": 1000, "height": 900})
        complaints: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        complaints.clear()  # a browser notes the 401 of the form's page
        page.get_by_label("Token of the resource").fill("wrong")
        page.get_by_role("button", name="Show").click()
        assert "send that one" in page.get_by_role("alert").inner_text()
        complaints.clear()
        page.get_by_label("Token of the resource").fill(TOKEN)
        page.get_by_role("button", name="Show").click()
        assert page.locator("#hit-tokens").inner_text() == "60,000"
        assert page.locator("#tiers tbody tr").count() == 2
        assert page.locator(".big").first.evaluate("e => getComputedStyle(e).fontSize") == "32px"
        page.get_by_label("cpu").check()
        page.get_by_label("Reason").fill("seen by a browser")
        page.get_by_role("button", name="Flush").click()
        row = page.locator("#flushes tbody tr").first
        for _ in range(100):
            if "complete" in row.inner_text():
                break
            page.reload()
        assert "seen by a browser" in row.inner_text()
        assert rank.flushed == [["cpu"]]
        shot = Path(SHOT) / "status-page.png" if SHOT else tmp_path / "status-page.png"
        page.screenshot(path=shot, full_page=True)
        page.get_by_role("button", name="Log out").click()
        assert page.get_by_label("Token of the resource").is_visible()
        browser.close()
    assert all(address.startswith((url, "data:")) for address in asked)
    assert [text for text in complaints if "401" not in text] == []
