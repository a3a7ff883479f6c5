# SPDX-License-Identifier: Apache-2.0
"""HTTP probes with the kubelet's rules: when a container counts as started, ready or dead."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from kvcache_operator.local.pod import HttpProbe

_ANSWER_LENGTH = 200


@dataclass
class Streak:
    """Turns answers into a verdict: it changes after as many equal ones in a row as the probe asks for."""

    probe: HttpProbe
    verdict: bool | None = None
    """None until the first threshold is reached."""
    _last: bool | None = None
    _length: int = 0

    def add(self, passed: bool) -> bool | None:
        """Counts one answer; returns the verdict after it."""
        self._length = self._length + 1 if passed == self._last else 1
        self._last = passed
        threshold = self.probe.success_threshold if passed else self.probe.failure_threshold
        if self._length >= threshold:
            self.verdict = passed
        return self.verdict


async def ask(client: httpx.AsyncClient, probe: HttpProbe) -> str:
    """Asks once; an empty text when the answer is good, else what was wrong with it."""
    try:
        response = await client.get(probe.url, timeout=probe.timeout_s)
    except httpx.TimeoutException:
        return f"{probe.url}: no answer within {probe.timeout_s:g} s"
    except httpx.HTTPError as error:
        return f"{probe.url}: {error or type(error).__name__}"
    if 200 <= response.status_code < 400:
        return ""
    answer = " ".join(response.text.split())[:_ANSWER_LENGTH]
    return f"{probe.url}: HTTP {response.status_code} {answer}".rstrip()
