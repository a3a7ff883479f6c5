# SPDX-License-Identifier: Apache-2.0
"""Flushes: one at a time, each with a report that is kept for a while."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime

import httpx

from kvcache.admin.models import FlushReport, FlushRequest, FlushScopeReport, TierFlush
from kvcache.admin.problems import Problem
from kvcache.bearer import TokenFile
from kvcache.control.wire import FlushResult, FlushScope

logger = logging.getLogger(__name__)

GPU_TIER = "gpu"
HISTORY = 32

_VLLM = "vllm"
_RESET_GPU_PATH = "/kvcache/v1/reset-gpu"
"""Of the endpoint plugin `kvcache.integration.vllm.endpoints`."""
_RETRY_S = 0.1


class GpuCache:
    """vLLM's own prefix cache, behind our route on vLLM's server.

    Args:
        url: base URL of vLLM's server, or None if the sidecar was not told one.
        token_file: the token that is sent.
        timeout_s: the longest that one call may take.
        patience_s: how long to ask again while running requests hold blocks.
        transport: in place of the network.
    """

    def __init__(
        self,
        url: str | None,
        token_file: TokenFile,
        timeout_s: float = 10.0,
        patience_s: float = 2.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url
        self._token_file = token_file
        self._patience_s = patience_s
        # No proxies of the environment: the token is for vLLM only.
        self._http = httpx.AsyncClient(timeout=timeout_s, trust_env=False, transport=transport)

    async def flush(self) -> TierFlush:
        """Has vLLM forget its prefix cache; what went wrong stands in the result."""
        reason = await self._flush()
        return TierFlush(process=_VLLM, tier=GPU_TIER, complete=not reason, reason=reason)

    async def close(self) -> None:
        await self._http.aclose()

    async def _flush(self) -> str:
        token = self._token_file.token()
        if self._url is None or token is None:
            return "the sidecar was started without --vllm-url; name vLLM's server there"
        url = self._url.rstrip("/") + _RESET_GPU_PATH
        headers = {b"Authorization": b"Bearer " + token}
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                answer = await self._http.post(url, headers=headers)
            except httpx.HTTPError as error:
                return f"vLLM at {self._url} did not answer ({type(error).__name__}: {error})"
            reason = _reset_problem(answer)
            if reason is not None:
                return reason
            if time.monotonic() >= deadline:
                return "running requests hold blocks of vLLM's cache; flush again when they are done"
            await asyncio.sleep(_RETRY_S)


def _reset_problem(answer: httpx.Response) -> str | None:
    """What is wrong, empty if vLLM has reset its cache; None if it could not do so now."""
    if answer.status_code == 404:
        return "vLLM has no route for it; start vLLM with VLLM_PLUGINS=kvcache,kvcache_admin"
    if answer.status_code == 401:
        return "vLLM expects another token; give both containers the same KVCACHE_ADMIN_TOKEN_FILE"
    try:
        success = answer.json()["success"] if answer.is_success else None
    except (ValueError, KeyError, TypeError):
        success = None
    if not isinstance(success, bool):
        return f"vLLM answered {answer.status_code}: {answer.text[:200]}"
    return "" if success else None


class FlushJobs:
    """Runs flushes one at a time and remembers the last 32.

    Args:
        flush_ranks: has every rank drop what of tiers is in a scope; the name of each rank to its results.
        gpu: vLLM's own cache, the tier `gpu`.
        changed: what was known of the tiers holds no longer.
    """

    def __init__(
        self,
        flush_ranks: Callable[[Sequence[str], FlushScope], Awaitable[Mapping[str, Sequence[FlushResult]]]],
        gpu: GpuCache,
        changed: Callable[[], None],
    ) -> None:
        self._flush_ranks = flush_ranks
        self._gpu = gpu
        self._changed = changed
        self._reports: dict[str, FlushReport] = {}
        self._task: asyncio.Task[None] | None = None
        self._running = ""
        self.ended: Counter[tuple[str, str]] = Counter()
        """Flushes of a tier that ended, by tier and `complete` or `incomplete`."""

    def start(self, request: FlushRequest, scope: FlushScope) -> FlushReport:
        """Begins a flush.

        Args:
            scope: as the ranks understand it.

        Raises:
            Problem: 409 while another one runs.
        """
        if self._task is not None and not self._task.done():
            raise Problem(
                409,
                "FlushRunning",
                f"Flush {self._running} runs; wait until it is done.",
                {"Location": f"/v1/flush/{self._running}"},
                id=self._running,
            )
        report = FlushReport(
            id=secrets.token_hex(8),
            state="Running",
            tiers=list(dict.fromkeys(request.tiers)),
            reason=request.reason,
            scope=FlushScopeReport(
                namespace=request.scope.namespace,
                salt=request.scope.salt,
                tokens=None if scope.prefix is None else len(scope.prefix.tokens),
                force=request.scope.force,
            ),
            requested_at=datetime.now(UTC),
        )
        self._reports[report.id] = report
        while len(self._reports) > HISTORY:
            del self._reports[next(iter(self._reports))]
        self._running = report.id
        self._task = asyncio.create_task(self._run(report, scope))
        return report

    async def wait(self) -> None:
        """Waits for the flush that runs. A caller that goes away does not end it."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def get(self, flush_id: str) -> FlushReport:
        """The report.

        Raises:
            Problem: 404 for an id that is not among the last 32.
        """
        try:
            return self._reports[flush_id]
        except KeyError:
            raise Problem(
                404,
                "UnknownFlush",
                f"Flush {flush_id!r} is not among the last {HISTORY}.",
                known=list(self._reports),
            ) from None

    @property
    def history(self) -> list[FlushReport]:
        """The last 32, the latest first."""
        return list(reversed(self._reports.values()))

    async def close(self) -> None:
        """Gives up on a flush that runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, report: FlushReport, scope: FlushScope) -> None:
        try:
            report.results = await self._flush(report.tiers, scope)
        except Exception as error:
            logger.exception("flush %s failed", report.id)
            report.results = [
                TierFlush(
                    process="admin", tier=tier, complete=False, reason=f"{type(error).__name__}: {error}"
                )
                for tier in report.tiers
            ]
        report.complete = bool(report.results) and all(result.complete for result in report.results)
        for tier in report.tiers:
            complete = all(result.complete for result in report.results if result.tier == tier)
            self.ended[tier, "complete" if complete else "incomplete"] += 1
        self._changed()
        report.completed_at = datetime.now(UTC)
        report.state = "Done"
        logger.info(
            "flush %s of %s: %s", report.id, report.tiers, "complete" if report.complete else "incomplete"
        )

    async def _flush(self, tiers: Sequence[str], scope: FlushScope) -> list[TierFlush]:
        # A request that runs between the two steps can carry KV from one cache to the other; a second flush
        # drops that.
        results = [await self._gpu.flush()] if GPU_TIER in tiers else []
        stored = [tier for tier in tiers if tier != GPU_TIER]
        if not stored:
            return results
        by_rank = await self._flush_ranks(stored, scope)
        if not by_rank:
            reason = "no rank has a control socket"
            return results + [
                TierFlush(process="ranks", tier=t, complete=False, reason=reason) for t in stored
            ]
        for process, rank_results in by_rank.items():
            results += [
                TierFlush(
                    process=process,
                    tier=result.tier,
                    complete=result.complete,
                    removed_objects=result.removed_objects,
                    removed_bytes=result.removed_bytes,
                    kept_objects=result.kept_objects,
                    reason=result.reason,
                )
                for result in rank_results
            ]
        return results
