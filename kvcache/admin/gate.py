# SPDX-License-Identifier: Apache-2.0
"""What every request passes before a route sees it: the token, and the bound on the size of its body.

It stands before the routes, not in them, so that a new route is closed unless it is named as open, and so
that nothing of a request without a token is parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcache.admin.problems import Problem
from kvcache.bearer import TokenFile

MAX_BODY_BYTES = 4 << 20
"""A prompt of half a million token ids."""
BODY_TIMEOUT_S = 10.0


class Gate:
    """ASGI middleware.

    Args:
        app: what is behind the gate.
        token_file: who may pass.
        open_paths: paths that need no token here.
        answered: called with the route (`other` for what is none) and the status of each answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        token_file: TokenFile,
        open_paths: Collection[str],
        answered: Callable[[str, int], None] = lambda route, status: None,
    ) -> None:
        self._app = app
        self._token_file = token_file
        self._open_paths = frozenset(open_paths)
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._let_in(scope, receive, self._counted(scope, send))

    def _counted(self, scope: Scope, send: Send) -> Send:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Known only once a route was found; a request that was turned away has none.
                route = getattr(scope.get("route"), "path", "other")
                self._answered(route, message["status"])
            await send(message)

        return counting

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] not in self._open_paths:
                self._check_token(scope)
            body = await _read_body(receive)
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)

    def _check_token(self, scope: Scope) -> None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        refusal = self._token_file.refuse(given[0] if len(given) == 1 else None)
        if refusal is not None:
            raise Problem(refusal.status, refusal.code, refusal.detail, refusal.headers)


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body; None if the client is gone."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise Problem(
                        413,
                        "BodyTooLarge",
                        f"The body has more than {MAX_BODY_BYTES} bytes; send less.",
                        {"Connection": "close"},
                    )
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Problem(
            408,
            "BodyTimeout",
            f"The body was not complete after {BODY_TIMEOUT_S:g} s; send it at once.",
            {"Connection": "close"},
        ) from None


def _replayed(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
