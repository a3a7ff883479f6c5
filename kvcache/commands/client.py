# SPDX-License-Identifier: Apache-2.0
"""How commands reach an admin sidecar and a vLLM: options that they share, and errors as one sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from kvcache.commands.output import fail

_TOKEN_FILE_ENV = "KVCACHE_ADMIN_TOKEN_FILE"  # noqa: S105 (a name)
_TOKEN_ENV = "KVCACHE_ADMIN_TOKEN"  # noqa: S105 (a name)

Url = Annotated[
    str,
    typer.Option(
        "--url", envvar="KVCACHE_ADMIN_URL", help="The admin sidecar, for a pod by kubectl port-forward."
    ),
]
TokenPath = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar=_TOKEN_FILE_ENV,
        help=f"File with the admin token. Without it the variable {_TOKEN_ENV} may hold the token itself.",
    ),
]
VllmUrl = Annotated[str, typer.Option("--vllm-url", envvar="KVCACHE_VLLM_URL", help="vLLM's server.")]
DEFAULT_URL = "http://127.0.0.1:8081"
DEFAULT_VLLM_URL = "http://127.0.0.1:8000"


class AdminClient:
    """One admin sidecar.

    Args:
        url: of the sidecar.
        token_file: with its token; else the environment's.
        transport: in place of the network.
    """

    def __init__(
        self, url: str, token_file: Path | None, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {_token(token_file)}"}
        # No proxies of the environment: the token is for the admin only.
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=30.0, trust_env=False, transport=transport
        )

    def get(self, path: str, **parameters: str) -> dict[str, Any]:
        return self._ask("GET", path, params=parameters)

    def post(self, path: str, body: object) -> dict[str, Any]:
        return self._ask("POST", path, json=body)

    def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, **more)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            fail(
                f"the admin at {self._url} does not answer ({error}); name it with --url, for a pod after:"
                " kubectl port-forward POD 8081:8081"
            )
        if answer.is_error:
            fail(_problem(answer))
        document: dict[str, Any] = answer.json()
        return document


def _token(token_file: Path | None) -> str:
    if token_file is None:
        token = os.environ.get(_TOKEN_ENV, "").strip()
        if not token:
            fail(
                "no admin token is given; name its file with --token-file, for a pod after: kubectl get"
                " secret NAME-admin-token -o jsonpath='{.data.token}' | base64 -d > token"
            )
        return token
    try:
        token = token_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        fail(f"{token_file} cannot be read ({reason}); name the file with the admin token by --token-file")
    if not token:
        fail(f"{token_file} is empty; write the admin token into it")
    return token


def _problem(answer: httpx.Response) -> str:
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = answer.text[:200] or "without a word"
    return f"the admin answered {answer.status_code} to {answer.request.url.path}: {detail}"
