# SPDX-License-Identifier: Apache-2.0
"""A client of the admin sidecar: what the demo asks of it."""

from __future__ import annotations

from typing import Any

import httpx

from demo.server import DemoError


class AdminClient:
    """Speaks to one sidecar with its bearer token."""

    def __init__(self, url: str, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=60.0, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def cache_hit_tokens(self) -> int:
        """Prompt tokens whose KV the cache has given back since vLLM began."""
        return int(self._answer(self._http.get("/v1/stats"))["totals"]["hit_cache_tokens"])

    def flush(self, tier: str) -> None:
        """Empties a tier and waits until that is done in every process.

        Raises:
            DemoError: it was refused or something is left.
        """
        report = self._answer(self._http.post("/v1/flush", json={"tiers": [tier], "wait": True}))
        if not report["complete"]:
            reasons = "; ".join(result["reason"] for result in report["results"] if result["reason"])
            raise DemoError(f"the flush of {tier} left something behind ({reasons or 'no reason given'})")

    @staticmethod
    def _answer(response: httpx.Response) -> dict[str, Any]:
        if response.is_error:
            said = response.text[:300]
            raise DemoError(f"the admin answered {response.status_code} to {response.url.path}: {said}")
        answer: dict[str, Any] = response.json()
        return answer
