# SPDX-License-Identifier: Apache-2.0
"""The routes of the status page. They check who asks themselves: a browser has a cookie and no header."""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import ValidationError

from kvcache.admin import page
from kvcache.admin.models import FlushRequest
from kvcache.admin.problems import Problem
from kvcache.admin.report import stats_report
from kvcache.admin.service import AdminService
from kvcache.admin.sessions import COOKIE, LIFETIME_S, Sessions
from kvcache.bearer import Refusal

PATHS = ("/", "/login", "/logout", "/flush")
_MAX_FIELDS = 32


def add(app: FastAPI, sessions: Sessions) -> None:
    """Adds the page to the app, whose `state.service` is there when it runs."""

    @app.get("/", include_in_schema=False)
    async def show(request: Request) -> Response:
        refusal = _refusal(request, sessions)
        if refusal is not None:
            # A browser that was never asked for a token is no failure worth a message.
            asked = "authorization" in request.headers or refusal.status != HTTPStatus.UNAUTHORIZED
            return _login(refusal, refusal.detail if asked else "")
        return await _status(request)

    @app.post("/login", include_in_schema=False)
    async def login(request: Request) -> Response:
        _same_origin(request)
        given = dict(await _form(request)).get("token", "")
        cookie, refusal = sessions.open(given.strip().encode())
        if cookie is None or refusal is not None:
            wrong = refusal or Refusal(HTTPStatus.UNAUTHORIZED, "Unauthorized", "")
            return _login(wrong, wrong.detail)
        answer = _back()
        answer.set_cookie(COOKIE, cookie, max_age=LIFETIME_S, httponly=True, samesite="strict")
        return answer

    @app.post("/logout", include_in_schema=False)
    async def logout(request: Request) -> Response:
        _same_origin(request)
        answer = _back()
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer

    @app.post("/flush", include_in_schema=False)
    async def flush(request: Request) -> Response:
        _same_origin(request)
        refusal = _refusal(request, sessions)
        if refusal is not None:
            return _login(refusal, refusal.detail)
        fields = await _form(request)
        try:
            asked = FlushRequest(
                tiers=[value for name, value in fields if name == "tier"],
                reason=dict(fields).get("reason", ""),
            )
            await _service(request).flush(asked)
        except ValidationError:
            return await _status(
                request, "Choose at least one tier to flush.", HTTPStatus.UNPROCESSABLE_ENTITY
            )
        except Problem as problem:
            return await _status(request, problem.detail, problem.status)
        return _back()


def _service(request: Request) -> AdminService:
    service: AdminService = request.app.state.service
    return service


def _refusal(request: Request, sessions: Sessions) -> Refusal | None:
    given = request.headers.getlist("authorization")
    if len(given) > 1:
        return sessions.refusal(b"", None)
    authorization = given[0].encode("latin-1") if given else None
    return sessions.refusal(authorization, request.cookies.get(COOKIE))


def _same_origin(request: Request) -> None:
    """Refuses forms that another site made the browser send.

    Raises:
        Problem: 403 for another origin than this server.
    """
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise Problem(403, "ForeignOrigin", f"The form was sent by {origin!r}; use the page of this server.")


async def _form(request: Request) -> list[tuple[str, str]]:
    body = (await request.body()).decode("utf-8", "replace")
    try:
        return parse_qsl(body, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise Problem(
            422, "InvalidRequest", f"The form has more than {_MAX_FIELDS} fields; send those of the page."
        ) from None


async def _status(request: Request, message: str = "", code: int = HTTPStatus.OK) -> Response:
    service = _service(request)
    snapshot = await service.rounds.snapshot()
    shown = page.Status(
        stats_report(snapshot, service.window),
        snapshot.not_ready(),
        service.flushes.history,
        service.mounted.problem,
    )
    return HTMLResponse(page.status(shown, message), code, page.HEADERS)


def _login(refusal: Refusal, message: str) -> Response:
    return HTMLResponse(page.login(message), refusal.status, {**page.HEADERS, **refusal.headers})


def _back() -> RedirectResponse:
    # Relative, since a proxy may have put the admin below a path of its own.
    return RedirectResponse("./", HTTPStatus.SEE_OTHER, page.HEADERS)
