# SPDX-License-Identifier: Apache-2.0
"""A client of vLLM's OpenAI server for one measurement at a time."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

ANSWER_TOKENS = 48
QUESTION = "\n\nSay in two sentences what the text above is about."


class DemoError(Exception):
    """A step of the demo failed. The text says which one and what to do."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer."""

    text: str
    ttft_s: float
    """Seconds from sending the request to the first piece of text."""
    prompt_tokens: int


class VllmClient:
    """Speaks to one server about one model; greedy answers only.

    Args:
        url: Such as `http://127.0.0.1:8000`.
        model: The name under which the model is served.
        timeout_s: The longest silence that is borne; a cold prompt of 3,000 tokens takes a CPU a minute.
    """

    def __init__(self, url: str, model: str, timeout_s: float = 300.0) -> None:
        self.model = model
        self._http = httpx.Client(base_url=url, timeout=timeout_s)

    def close(self) -> None:
        self._http.close()

    def prompt_of(self, text: str, tokens: int) -> str:
        """The text cut so that with the question, in the chat template, it makes about `tokens` tokens."""
        around = self._count_chat(QUESTION)
        ids = self._post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        cut = self._post("/detokenize", {"tokens": ids[: tokens - around]})["prompt"]
        return str(cut) + QUESTION

    def ask(self, prompt: str, max_tokens: int = ANSWER_TOKENS) -> Answer:
        """Sends one user message and measures the time to the first token of the streamed answer."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        pieces: list[str] = []
        ttft_s = 0.0
        prompt_tokens = 0
        started = time.perf_counter()
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise DemoError(f"vLLM answered {response.status_code}: {response.read().decode()[:300]}")
            for line in response.iter_lines():
                event = line.removeprefix("data: ")
                if event == line or event == "[DONE]":
                    continue
                chunk = json.loads(event)
                if "error" in chunk:
                    raise DemoError(f"vLLM broke off its answer: {chunk['error']}")
                piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                if piece and not pieces:
                    ttft_s = time.perf_counter() - started
                if piece:
                    pieces.append(piece)
                if chunk.get("usage"):
                    prompt_tokens = chunk["usage"]["prompt_tokens"]
        if not pieces or not prompt_tokens:
            raise DemoError(f"vLLM gave no answer to a prompt of {prompt_tokens} tokens; its log says why")
        return Answer("".join(pieces), ttft_s, prompt_tokens)

    def _count_chat(self, content: str) -> int:
        body = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": True}
        return int(self._post("/tokenize", body)["count"])

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._http.post(path, json={"model": self.model, **body})
        if response.status_code != 200:
            raise DemoError(f"vLLM answered {response.status_code} to {path}: {response.text[:300]}")
        answer: dict[str, Any] = response.json()
        return answer
