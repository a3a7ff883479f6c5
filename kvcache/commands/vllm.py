# SPDX-License-Identifier: Apache-2.0
"""A client of vLLM's OpenAI server, for commands."""

from __future__ import annotations

from typing import Any

import httpx

from kvcache.commands.output import fail

_TIMEOUT_S = 600.0
"""A long prompt takes a CPU minutes."""


class VllmClient:
    """One server and one model of it.

    Args:
        url: of the server.
        model: the name under which a model is served; the first one if None.
        transport: in place of the network.
    """

    def __init__(self, url: str, model: str | None, transport: httpx.BaseTransport | None = None) -> None:
        self._url = url
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False, transport=transport)
        self.model = model or self._first_model()

    def complete(self, prompt: str | list[int], salt: str | None = None) -> int:
        """Has vLLM read the prompt and answer one token.

        Returns:
            Tokens of the prompt.
        """
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        if salt:
            body["cache_salt"] = salt
        return int(self._post("/v1/completions", body)["usage"]["prompt_tokens"])

    def _first_model(self) -> str:
        return str(self._answer(self._ask("GET", "/v1/models"))["data"][0]["id"])

    def _post(self, path: str, body: object) -> dict[str, Any]:
        return self._answer(self._ask("POST", path, body))

    def _ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            fail(f"vLLM at {self._url} does not answer ({why}); name it with --vllm-url")

    def _answer(self, response: httpx.Response) -> dict[str, Any]:
        if response.is_error:
            fail(
                f"vLLM answered {response.status_code} to {response.request.url.path}: {response.text[:300]}"
            )
        document: dict[str, Any] = response.json()
        return document
