# SPDX-License-Identifier: Apache-2.0
"""Bearer tokens from a file: who may use the admin routes. A leaf that needs no web framework.

Without a usable token nobody is let in, so that a Secret that is missing or empty never opens a route.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

MAX_TOKEN_BYTES = 4096


@dataclass(frozen=True)
class Refusal:
    """Why a request is not let in, as HTTP says it."""

    status: int
    code: str
    detail: str
    headers: dict[str, str] = field(default_factory=dict)


class TokenFile:
    """The token in a file. The file is read again when it was changed or replaced.

    Args:
        path: the file, or None if none was named. White space around the token does not count.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path = None if path is None else Path(path)
        self._version: tuple[int, ...] = ()
        self._token: bytes | None = None
        self.problem = ""
        """Why there is no token, after `token` gave None."""

    def refuse(self, authorization: bytes | None) -> Refusal | None:
        """None if a request with this `Authorization` header may pass.

        Returns:
            401 with `WWW-Authenticate` for a missing or wrong token; 503 if the file has no usable one.
        """
        token = self.token()
        if token is None:
            return Refusal(503, "TokenUnavailable", self.problem)
        if authorization is None:
            return _unauthorized(
                "Bearer", "No token was read; send the header 'Authorization: Bearer TOKEN'."
            )
        scheme, _, given = authorization.strip().partition(b" ")
        # Digests, since the time of a comparison would tell the length of the token.
        same = hmac.compare_digest(hashlib.sha256(given.strip()).digest(), hashlib.sha256(token).digest())
        if scheme.lower() != b"bearer" or not same:
            return _unauthorized(
                'Bearer error="invalid_token"',
                "The token is not the one in the admin's token file; send that one.",
            )
        return None

    def token(self) -> bytes | None:
        """The token, or None if the file has no usable one."""
        if self._path is None:
            self.problem = "No token file is configured; name one that holds the admin token."
            return None
        try:
            version = _version(self._path)
            if version != self._version:
                self._token, self.problem = self._read(self._path)
                self._version = version
        except OSError as error:
            self._token, self._version = None, ()
            self.problem = (
                f"The token file cannot be read ({error.strerror}); mount the Secret with the admin token."
            )
        return self._token

    @staticmethod
    def _read(path: Path) -> tuple[bytes | None, str]:
        with path.open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES + 1).strip()
        if not token:
            return None, "The token file is empty; write the admin token into it."
        if len(token) > MAX_TOKEN_BYTES:
            return (
                None,
                f"The token file has more than {MAX_TOKEN_BYTES} bytes; write only the admin token into it.",
            )
        return token, ""


def _version(path: Path) -> tuple[int, ...]:
    # Kubernetes puts another file behind the same name, an editor changes the file in place.
    status = path.stat()
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)


def _unauthorized(challenge: str, detail: str) -> Refusal:
    return Refusal(401, "Unauthorized", detail, {"WWW-Authenticate": challenge})
