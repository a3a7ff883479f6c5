# SPDX-License-Identifier: Apache-2.0
"""Prompts in requests to the admin: as token ids, or as a text that vLLM's own tokenizer reads."""

from __future__ import annotations

from typing import Annotated, Self

import httpx
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvcache.admin.problems import Problem
from kvcache.control.wire import MAX_SALT_CHARS, MAX_TOKENS, Prefix

_TOKENIZE_PATH = "/tokenize"
"""Of vLLM's server."""

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=MAX_TOKENS)]
Salt = Annotated[str, Field(max_length=MAX_SALT_CHARS)]


class PromptFields(BaseModel):
    """A prompt: exactly one of token ids and text."""

    model_config = ConfigDict(extra="forbid")

    tokens: Annotated[TokenIds | None, Field(description="Token ids.")] = None
    prompt: Annotated[
        str | None, Field(description="Text, read as vLLM reads the prompt of a completion.")
    ] = None
    salt: Annotated[Salt, Field(description="`cache_salt` of the requests that it is a prompt of.")] = ""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.tokens is None) == (self.prompt is None):
            raise ValueError("exactly one of tokens and prompt is needed")
        return self


class PromptReader:
    """Makes token ids of prompts.

    Args:
        url: base URL of vLLM's server, or None if the sidecar was not told one.
        timeout_s: the longest that one call may take.
        transport: in place of the network.
    """

    def __init__(
        self, url: str | None, timeout_s: float = 10.0, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._url = url
        self._http = httpx.AsyncClient(timeout=timeout_s, trust_env=False, transport=transport)

    async def prefix(self, fields: PromptFields) -> Prefix:
        """The prompt for a rank.

        Raises:
            Problem: 503 where a text cannot be read, 422 where it is too long.
        """
        tokens = fields.tokens
        if tokens is None:
            tokens = await self._tokenize(fields.prompt or "")
        return Prefix(tokens=tokens, salt=fields.salt)

    async def close(self) -> None:
        await self._http.aclose()

    async def _tokenize(self, prompt: str) -> list[int]:
        if self._url is None:
            raise Problem(
                503,
                "NoTokenizer",
                "A prompt was read, and the sidecar was started without --vllm-url; send token ids.",
            )
        url = self._url.rstrip("/") + _TOKENIZE_PATH
        try:
            answer = await self._http.post(url, json={"prompt": prompt})
            tokens = answer.json()["tokens"] if answer.is_success else None
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise Problem(
                503, "NoTokenizer", f"vLLM at {self._url} read no prompt ({type(error).__name__}: {error})."
            ) from error
        if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
            detail = f"vLLM at {self._url} answered {answer.status_code}: {answer.text[:200]}"
            raise Problem(503, "NoTokenizer", detail)
        if len(tokens) > MAX_TOKENS:
            detail = f"prompt: {len(tokens)} tokens were read; send at most {MAX_TOKENS}."
            raise Problem(422, "InvalidRequest", detail)
        return tokens
