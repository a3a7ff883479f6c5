# SPDX-License-Identifier: Apache-2.0
"""Asks the admin sidecars of pods: statistics, versions, flushes. All answers are checked before use."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvcache_operator.observe import PodState

MAX_ANSWER_BYTES = 1 << 20
_CONCURRENT = 16


class _Answer(BaseModel):
    """Part of an answer: what is not named here is not needed."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class TierAnswer(_Answer):
    name: str = Field(max_length=63)
    state: str = Field(max_length=128)
    capacity_bytes: int
    used_bytes: int
    hit_tokens: int
    detail: str = ""


class RankAnswer(_Answer):
    rank: int
    ready: bool
    reason: str
    namespace: str
    config_restart: Annotated[list[str], Field(max_length=256)] = []


class SchedulerAnswer(_Answer):
    ready: bool
    reason: str
    config_restart: Annotated[list[str], Field(max_length=256)] = []


class WindowAnswer(_Answer):
    prompt_tokens: int
    hit_gpu_tokens: int
    hit_cache_tokens: int


class StatsAnswer(_Answer):
    """`GET /v1/stats` of a sidecar."""

    window: WindowAnswer
    tiers: Annotated[list[TierAnswer], Field(max_length=16)]
    scheduler: SchedulerAnswer | None
    ranks: Annotated[list[RankAnswer], Field(max_length=256)]


class ConfigAnswer(_Answer):
    """`GET /v1/config` of a sidecar."""

    version: str = Field(max_length=64)
    namespaces: Annotated[dict[str, str], Field(max_length=256)] = {}
    """Of each rank."""
    problem: str = ""
    """Why the mounted file is refused; the last good one stays."""


class VersionAnswer(_Answer):
    """`GET /version` of vLLM."""

    version: str = Field(max_length=64)


class TierFlushAnswer(_Answer):
    process: str
    tier: str
    complete: bool
    reason: str = ""


class FlushAnswer(_Answer):
    """`POST /v1/flush` of a sidecar that was asked to wait."""

    complete: bool | None
    results: Annotated[list[TierFlushAnswer], Field(max_length=4096)]


@dataclass(frozen=True)
class PodStats:
    """What one pod tells."""

    pod: str
    stats: StatsAnswer
    connector_version: str = ""
    engine_version: str = ""
    config_refusal: str = ""
    """Why it goes on with an older configuration; empty where it does not."""


@dataclass(frozen=True)
class FlushResult:
    """What a flush did to one pod; `problem` is empty where nothing is left in any tier."""

    pod: str
    problem: str


@dataclass(frozen=True)
class Ports:
    """Where a pod listens."""

    engine: int
    admin: int


class Pods:
    """The sidecars of all resources. Belongs to one event loop: close it there.

    Args:
        timeout_s: the longest that a pod may take for its statistics.
        flush_timeout_s: the longest that a pod may take for a flush.
        transport: in place of the network.
    """

    def __init__(
        self,
        timeout_s: float,
        flush_timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._flush_timeout_s = flush_timeout_s
        self._slots = asyncio.Semaphore(_CONCURRENT)
        # No proxies of the environment: the tokens are for pods only. No TLS is spoken, and loading the
        # system's authorities would cost memory and a tenth of a second.
        self._http = httpx.AsyncClient(
            timeout=timeout_s,
            trust_env=False,
            transport=transport,
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def stats(self, pods: Sequence[PodState], ports: Ports, token: str) -> list[PodStats]:
        """What those pods tell that answer in time; the others are left out."""
        answers = await asyncio.gather(*(self._stats(pod, ports, token) for pod in pods))
        return [answer for answer in answers if answer is not None]

    async def flush(
        self,
        pods: Sequence[PodState],
        ports: Ports,
        token: str,
        tiers: Sequence[str],
        reason: str,
        shared: Collection[str] = (),
    ) -> list[FlushResult]:
        """Has every pod drop what these tiers hold, and waits for it.

        Args:
            shared: tiers that others use too: of these only what the pod's own model may read is dropped.
        """
        own, common = (
            [tier for tier in tiers if (tier in shared) == is_shared] for is_shared in (False, True)
        )

        async def flush(pod: PodState) -> FlushResult:
            admin, problems = _url(pod, ports.admin), []
            if own:
                problems.append(await self._flush(admin, token, own, reason, None))
            if common:
                namespaces = await self._namespaces(admin, token)
                if not namespaces:
                    problems.append(f"{', '.join(common)}: no rank says which objects are its own")
                for namespace in namespaces:
                    problems.append(await self._flush(admin, token, common, reason, namespace))
            return FlushResult(pod.name, "; ".join(dict.fromkeys(filter(None, problems))))

        return list(await asyncio.gather(*map(flush, pods)))

    async def _stats(self, pod: PodState, ports: Ports, token: str) -> PodStats | None:
        admin = _url(pod, ports.admin)
        try:
            stats = StatsAnswer.model_validate(await self._get(f"{admin}/v1/stats", token))
        except (httpx.HTTPError, ValidationError, ValueError):
            return None
        config = await self._config(admin, token)
        return PodStats(
            pod=pod.name,
            stats=stats,
            connector_version=config.version if config is not None else "",
            engine_version=await self._version(f"{_url(pod, ports.engine)}/version"),
            config_refusal=config.problem if config is not None else "",
        )

    async def _config(self, admin: str, token: str) -> ConfigAnswer | None:
        try:
            return ConfigAnswer.model_validate(await self._get(f"{admin}/v1/config", token))
        except (httpx.HTTPError, ValidationError, ValueError):
            return None

    async def _version(self, url: str) -> str:
        try:
            return VersionAnswer.model_validate(await self._get(url, "")).version
        except (httpx.HTTPError, ValidationError, ValueError):
            return ""

    async def _namespaces(self, admin: str, token: str) -> list[str]:
        """Of the objects that the ranks of a pod may read; none where nobody answers."""
        config = await self._config(admin, token)
        return sorted(set(filter(None, config.namespaces.values()))) if config is not None else []

    async def _flush(
        self, admin: str, token: str, tiers: Sequence[str], reason: str, namespace: str | None
    ) -> str:
        """Why something is left in one of the tiers, of a namespace where one is given; else empty."""
        body: dict[str, Any] = {"tiers": list(tiers), "wait": True, "reason": reason[:256]}
        if namespace is not None:
            body["scope"] = {"namespace": namespace}
        try:
            async with self._slots:
                answer = await self._http.post(
                    f"{admin}/v1/flush",
                    json=body,
                    headers=_headers(token),
                    timeout=self._flush_timeout_s,
                )
            if answer.is_error:
                return f"{', '.join(tiers)}: HTTP {answer.status_code}: {_problem(answer)}"
            report = FlushAnswer.model_validate(_json(answer))
        except httpx.HTTPError as error:
            return f"{', '.join(tiers)}: no answer ({type(error).__name__})"
        except (ValidationError, ValueError):
            return f"{', '.join(tiers)}: an answer that cannot be read"
        failed = [
            f"{entry.tier} of {entry.process}: {entry.reason}"
            for entry in report.results
            if not entry.complete
        ]
        return "" if report.complete else "; ".join(failed) or f"{', '.join(tiers)}: not complete"

    async def _get(self, url: str, token: str) -> Mapping[str, Any]:
        async with self._slots:
            answer = await self._http.get(url, headers=_headers(token), timeout=self._timeout_s)
        answer.raise_for_status()
        return _json(answer)


def _url(pod: PodState, port: int) -> str:
    host = f"[{pod.address}]" if ":" in pod.address else pod.address
    return f"http://{host}:{port}"


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _json(answer: httpx.Response) -> Mapping[str, Any]:
    if len(answer.content) > MAX_ANSWER_BYTES:
        raise ValueError(f"{len(answer.content)} bytes are too many for an answer")
    value = answer.json()
    if not isinstance(value, Mapping):
        raise ValueError("the answer is no object")
    return value


def _problem(answer: httpx.Response) -> str:
    try:
        return str(_json(answer).get("detail", ""))[:200]
    except ValueError:
        return ""
