# SPDX-License-Identifier: Apache-2.0
"""Who may see the status page: whoever sends the token, or has sent it in the page's form a while ago.

A session is a signed cookie and nothing is kept for it. The token is part of the signing key, so that a new
token ends all sessions, and so does a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

from kvcache.bearer import Refusal, TokenFile

COOKIE = "kvcache_admin"
LIFETIME_S = 3600


class Sessions:
    """Opens and checks sessions.

    Args:
        token_file: the admin's token.
        clock: seconds since the epoch.
    """

    def __init__(self, token_file: TokenFile, clock: Callable[[], float] = time.time) -> None:
        self._token_file = token_file
        self._clock = clock
        self._secret = secrets.token_bytes(32)

    def refusal(self, authorization: bytes | None, cookie: str | None) -> Refusal | None:
        """None if a request with this `Authorization` header or session cookie may pass."""
        if authorization is None and cookie is not None and self._admits(cookie):
            return None
        return self._token_file.refuse(authorization)

    def open(self, token: bytes) -> tuple[str | None, Refusal | None]:
        """A new session's cookie for whoever knows the token, or why there is none."""
        refusal = self._token_file.refuse(b"Bearer " + token)
        if refusal is not None:
            return None, refusal
        expires = str(int(self._clock()) + LIFETIME_S)
        return f"{expires}.{self._signature(expires)}", None

    def _admits(self, cookie: str) -> bool:
        expires, _, signature = cookie.partition(".")
        if not expires.isascii() or not expires.isdigit() or len(expires) > 12:
            return False
        same = hmac.compare_digest(signature.encode(), self._signature(expires).encode())
        return same and self._token_file.token() is not None and int(expires) > self._clock()

    def _signature(self, expires: str) -> str:
        key = self._secret + (self._token_file.token() or b"")
        return hmac.new(key, expires.encode(), hashlib.sha256).hexdigest()
