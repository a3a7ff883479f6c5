# SPDX-License-Identifier: Apache-2.0
"""The loop: kopf watches, a queue collects, workers reconcile.

kopf's handlers only say which resource to look at. So kopf keeps no state in resources, sets no finalizer and
retries nothing: the queue does, and what is looked at is always the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import time
from typing import Any

import kopf

from kvcache_operator import API_VERSION, FIELD_MANAGER, GROUP, KIND, PLURAL, VERSION
from kvcache_operator.cluster import Cluster, ClusterError
from kvcache_operator.health import Health
from kvcache_operator.queue import Key, KeyedQueue
from kvcache_operator.reconcile import Reconciler
from kvcache_operator.settings import Settings
from kvcache_operator.telemetry import Telemetry

log = logging.getLogger(__name__)

_CHILDREN = {"app.kubernetes.io/managed-by": FIELD_MANAGER, "app.kubernetes.io/component": "engine"}
_INSTANCE = "app.kubernetes.io/instance"
_SERVER_TIMEOUT_S = 300
_CONNECT_TIMEOUT_S = 10
_MAX_DOUBLINGS = 10
_ERROR_RETRY_S = 5.0
_LONG_S = 60.0
"""A watch that has lasted this long was a good one."""


class Loop:
    """Everything that runs while this process works. Belongs to one event loop."""

    def __init__(
        self,
        cluster: Cluster,
        reconciler: Reconciler,
        settings: Settings,
        telemetry: Telemetry,
        health: Health,
    ) -> None:
        self._cluster = cluster
        self._reconciler = reconciler
        self._settings = settings
        self._telemetry = telemetry
        self._health = health
        self.queue = KeyedQueue()
        self._failures: dict[Key, int] = {}
        self._heard: dict[Key, int] = {}
        """The newest generation that the watch has told."""
        self._misses = 0
        self._kinds_known = asyncio.Event()
        """Set when the server has told once what kinds it has: nothing is rendered before."""

    async def run(self) -> None:
        """Works until it is cancelled, or until a signal ends kopf, which takes signals for itself."""
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(self._work()) for _ in range(self._settings.workers)]
            others.append(tasks.create_task(self._resync_for_ever()))
            await self._watch()
            for task in others:
                task.cancel()

    def registry(self) -> kopf.OperatorRegistry:
        """The handlers in a registry of their own, so that importing this module registers nothing."""
        registry = kopf.OperatorRegistry()
        kopf.on.startup(registry=registry)(self.configure)
        kopf.on.login(registry=registry)(login)
        kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(self.resource_changed)
        for group, version, plural in (
            ("apps", "v1", "deployments"),
            ("apps", "v1", "statefulsets"),
            ("", "v1", "pods"),
        ):
            kopf.on.event(group, version, plural, registry=registry, labels=_CHILDREN)(self.child_changed)
        return registry

    async def configure(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        """kopf's own settings."""
        # A watch that hangs is dropped and made anew; without these it would be quiet for ever.
        settings.watching.server_timeout = _SERVER_TIMEOUT_S
        settings.watching.client_timeout = _SERVER_TIMEOUT_S + 30
        settings.watching.connect_timeout = _CONNECT_TIMEOUT_S
        settings.networking.request_timeout = self._settings.api_timeout_s
        # Each log line of a handler would become an Event; only transitions are worth one.
        settings.posting.enabled = False
        # Otherwise kopf wants to watch namespaces and definitions of the whole cluster.
        settings.scanning.disabled = True

    async def resource_changed(self, meta: kopf.Meta, **_: Any) -> None:
        """A KVCache was made, changed, deleted, or found at the start."""
        key = Key(str(meta.get("namespace")), str(meta.get("name")))
        self._heard[key] = int(meta.get("generation") or 0)
        if not self._reconciler.has_written(key, str(meta.get("resourceVersion", ""))):
            self.queue.add(key)

    async def child_changed(self, meta: kopf.Meta, **_: Any) -> None:
        """A workload or pod of ours: what it tells belongs into its owner's status."""
        name, namespace = meta.get("labels", {}).get(_INSTANCE), meta.get("namespace")
        if name and namespace:
            self.queue.add(Key(str(namespace), str(name)))

    async def resync(self) -> None:
        """Looks at all resources, whatever was heard of them.

        Raises:
            ClusterError: the API server did not answer.
        """
        self._reconciler.kinds = await asyncio.to_thread(self._cluster.kinds)
        self._kinds_known.set()
        found: dict[Key, int] = {}
        for namespace in self._settings.namespaces or (None,):
            for entry in await asyncio.to_thread(self._cluster.list, API_VERSION, KIND, namespace):
                meta = entry["metadata"]
                found[Key(meta["namespace"], meta["name"])] = int(meta.get("generation") or 0)
        missed = [key for key, generation in found.items() if self._heard.get(key, generation) < generation]
        self._telemetry.missed.inc(len(missed))
        self._misses = self._misses + 1 if missed else 0
        self._health.deaf = self._misses >= 2
        self._health.resynced_at = time.monotonic()
        self._telemetry.resources.set(len(found))
        self._heard = {key: generation for key, generation in self._heard.items() if key in found}
        for key in found:
            self._reconciler.forget_applied(key)
            self.queue.add(key)

    async def _watch(self) -> None:
        """Runs kopf, and runs it anew when it gives up: it does so at errors that go by, such as HTTP 410."""
        failures = 0
        while True:
            began = time.monotonic()
            try:
                await kopf.operator(
                    registry=self.registry(),
                    clusterwide=not self._settings.namespaces,
                    namespaces=self._settings.namespaces,
                    standalone=True,
                )
            except Exception as error:
                failures = 0 if time.monotonic() - began > _LONG_S else failures + 1
                delay = self._backoff(failures)
                self._telemetry.watch_restarts.inc()
                log.warning("the watch has ended (%s); starting it again in %.1f s", error, delay)
                await asyncio.sleep(delay)
            else:
                return

    async def _resync_for_ever(self) -> None:
        while True:
            try:
                await self.resync()
                delay = self._settings.resync_s
            except ClusterError as error:
                log.warning("cannot look at all resources: %s", error)
                delay = min(self._settings.resync_s, self._settings.retry_s * 5)
            await asyncio.sleep(delay)

    async def _work(self) -> None:
        await self._kinds_known.wait()
        while True:
            key = await self.queue.get()
            self._telemetry.queue_depth.set(self.queue.depth)
            try:
                await self._reconcile(key)
            finally:
                self.queue.done(key)

    async def _reconcile(self, key: Key) -> None:
        began = time.monotonic()
        try:
            outcome = await self._reconciler.reconcile(key)
            if outcome.failure is not None:
                raise outcome.failure
        except ClusterError as error:
            self._telemetry.reconciles.labels("api_error").inc()
            if error.is_final:
                # The same request would be refused again; the resource's next change or resync is awaited.
                log.warning("%s/%s: %s; waiting for a change", *key, error)
                return
            delay = self._delay(key)
            log.warning("%s/%s: %s; again in %.1f s", *key, error, delay)
            self.queue.add_after(key, delay)
        except Exception:
            # A defect of ours must not end the others' resources; it is counted and comes back slowly.
            self._telemetry.reconciles.labels("error").inc()
            delay = max(_ERROR_RETRY_S, self._delay(key))
            log.exception("%s/%s: an error of the operator itself; again in %.1f s", *key, delay)
            self.queue.add_after(key, delay)
        else:
            self._failures.pop(key, None)
            self._telemetry.reconciles.labels("ok").inc()
            if outcome.again_in_s is not None:
                self.queue.add_after(key, outcome.again_in_s)
        finally:
            self._telemetry.reconcile_seconds.observe(time.monotonic() - began)

    def _delay(self, key: Key) -> float:
        """Seconds until the next try: doubled each time, with as much again by chance."""
        self._failures[key] = self._failures.get(key, 0) + 1
        return self._backoff(self._failures[key])

    def _backoff(self, failures: int) -> float:
        base = self._settings.retry_s * 2 ** min(max(failures - 1, 0), _MAX_DOUBLINGS)
        return float(min(base * (1 + random.random()), self._settings.retry_max_s))  # noqa: S311


async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    """The same places that `Cluster.connect` looks into: the pod's service account, then KUBECONFIG."""
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


@contextlib.contextmanager
def until_signal(task: asyncio.Task[Any]) -> Any:
    """Cancels the task on SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
