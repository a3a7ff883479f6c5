# SPDX-License-Identifier: Apache-2.0
"""Of several replicas of the operator one works: the one that holds the lease.

As in client-go: a lease is judged by this process's own clock, from the moment at which its content was last
seen to change, so that clocks that disagree do no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kvcache_operator.cluster import CONFLICT, Cluster, ClusterError
from kvcache_operator.render import Manifest

log = logging.getLogger(__name__)

API_VERSION = "coordination.k8s.io/v1"
NAME = "kvcache-operator"


class LeaseLostError(RuntimeError):
    """Somebody else may work now; this process must end."""


@dataclass
class Lease:
    """The lease as one process sees it. All times are seconds of a monotonic clock."""

    cluster: Cluster
    namespace: str
    identity: str
    life_s: float
    clock: Callable[[], float] = field(default=lambda: asyncio.get_running_loop().time())
    _seen: tuple[Any, ...] = ()
    _seen_at: float = 0.0
    _renewed_at: float = 0.0

    async def acquire(self) -> None:
        """Waits until the lease is ours."""
        said = ""
        while True:
            try:
                holder = await self._try()
            except ClusterError as error:
                holder = f"nobody that can be asked ({error})"
            if holder is None:
                log.info("this process holds the lease now")
                return
            if holder != said:
                log.info("waiting: the lease is held by %s", holder)
                said = holder
            await asyncio.sleep(self.life_s / 3 * (1 + 0.2 * random.random()))  # noqa: S311

    async def hold(self) -> None:
        """Renews the lease as long as that succeeds.

        Raises:
            LeaseLostError: somebody else has it, or it could not be renewed for most of its life.
        """
        while True:
            await asyncio.sleep(self.life_s / 3)
            try:
                holder = await asyncio.wait_for(self._try(), self.life_s / 3)
            except (ClusterError, TimeoutError) as error:
                # Given up before others may take it, so that never two work.
                if self.clock() - self._renewed_at > self.life_s * 2 / 3:
                    raise LeaseLostError(f"the lease could not be renewed ({error})") from error
                continue
            if holder is not None:
                raise LeaseLostError(f"the lease is held by {holder}")

    async def release(self) -> None:
        """Lets another process have the lease at once."""
        with contextlib.suppress(ClusterError):
            lease = await self._read()
            if lease is not None and lease["spec"].get("holderIdentity") == self.identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await asyncio.to_thread(self.cluster.replace, lease)

    async def _read(self) -> Manifest | None:
        return await asyncio.to_thread(self.cluster.get, API_VERSION, "Lease", self.namespace, NAME)

    async def _try(self) -> str | None:
        """Takes or renews the lease; None when it is ours, else who holds it."""
        lease = await self._read()
        if lease is None:
            return await self._write(self.cluster.create, self._content({}, 0))
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        seen = (holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        if seen != self._seen:
            self._seen, self._seen_at = seen, self.clock()
        life = spec.get("leaseDurationSeconds") or self.life_s
        if holder not in ("", self.identity) and self.clock() - self._seen_at < life:
            return str(holder)
        changes = (spec.get("leaseTransitions") or 0) + (holder != self.identity)
        return await self._write(self.cluster.replace, self._content(lease, changes))

    async def _write(self, write: Callable[[Manifest], Manifest], lease: Manifest) -> str | None:
        try:
            await asyncio.to_thread(write, lease)
        except ClusterError as error:
            if error.status == CONFLICT:
                return "another process, just now"
            raise
        self._renewed_at = self.clock()
        return None

    def _content(self, lease: Manifest, changes: int) -> Manifest:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = lease.get("spec") or {}
        mine = spec.get("holderIdentity") == self.identity
        return {
            "apiVersion": API_VERSION,
            "kind": "Lease",
            "metadata": lease.get("metadata") or {"name": NAME, "namespace": self.namespace},
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": round(self.life_s),
                "acquireTime": spec.get("acquireTime", now) if mine else now,
                "renewTime": now,
                "leaseTransitions": changes,
            },
        }
