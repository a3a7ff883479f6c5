# SPDX-License-Identifier: Apache-2.0
"""A proxy between an operator and the API server: writes down each request, and answers some itself."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

_CORE = re.compile(r"^/api/v1/(.*)$")
_GROUP = re.compile(r"^/apis/([^/]+)/[^/]+/(.*)$")
_DROPPED = {"transfer-encoding", "content-length", "connection", "content-encoding"}
_WRITES = ("create", "update", "patch", "delete")


@dataclass(frozen=True)
class Seen:
    """A request, in the words of RBAC."""

    verb: str
    group: str
    resource: str
    """With its subresource, as in `kvcaches/status`."""
    name: str
    dry_run: bool = False

    @property
    def is_write(self) -> bool:
        return self.verb in _WRITES and not self.dry_run and self.resource not in ("leases", "events")


Fault = Callable[[Seen], int | str | None]
"""What to do with a request: an HTTP status to answer, `cut` to break the connection (a watch: after it has
begun), None to let it through."""


@dataclass
class Proxy:
    """Runs in a thread of its own. `start` it, `stop` it."""

    target: str
    seen: list[Seen] = field(default_factory=list)
    fault: Fault = lambda _: None
    before_answer: Callable[[Seen], None] = lambda _: None
    """Called when the API server has done a request and the client does not know yet."""
    hide_group: str = ""
    """An API group that discovery does not show."""
    url: str = ""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _thread: threading.Thread | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        ready = threading.Event()

        async def run() -> None:
            connector = aiohttp.TCPConnector(ssl=False, limit=0)
            async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
                app = web.Application(client_max_size=16 << 20)

                async def handle(request: web.Request) -> web.StreamResponse:
                    return await self._handle(request, session)

                app.router.add_route("*", "/{path:.*}", handle)
                runner = web.AppRunner(app, shutdown_timeout=0.1)
                await runner.setup()
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                self.url = "http://{}:{}".format(*runner.addresses[0][:2])
                ready.set()
                await self._stop.wait()
                await runner.cleanup()
                # Watches of operators that were killed.
                left = asyncio.all_tasks() - {asyncio.current_task()}
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)

        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(run()), daemon=True)
        self._thread.start()
        if not ready.wait(10):
            raise RuntimeError("the proxy did not start")

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join(10)

    def kubeconfig(self, original: Path, target: Path) -> Path:
        """`original` with this proxy in place of the server."""
        config = yaml.safe_load(original.read_text())
        config["clusters"][0]["cluster"] = {"server": self.url}
        target.write_text(yaml.safe_dump(config))
        return target

    @property
    def writes(self) -> list[Seen]:
        return [entry for entry in self.seen if entry.is_write]

    async def _handle(self, request: web.Request, session: aiohttp.ClientSession) -> web.StreamResponse:
        seen = parse(request)
        if seen is not None:
            self.seen.append(seen)
        fault = self.fault(seen) if seen is not None else None
        if isinstance(fault, int):
            body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": fault}
            return web.json_response({**body, "message": "a fault of the test"}, status=fault)
        if fault == "cut" and seen is not None and seen.verb != "watch":
            request.transport.close()  # type: ignore[union-attr]
            return web.Response()
        headers = request.headers.copy()  # some are there twice
        headers.popall("Host", None)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with session.request(
            request.method,
            self.target + request.raw_path,
            data=await request.read() or None,
            headers=headers,
            timeout=timeout,
            ssl=False,
        ) as answer:
            kept = {key: value for key, value in answer.headers.items() if key.lower() not in _DROPPED}
            if "Content-Encoding" in answer.headers:
                kept["Content-Encoding"] = answer.headers["Content-Encoding"]
            if seen is None or seen.verb != "watch":
                body_bytes = await answer.read()
                if self.hide_group and request.path == "/apis":
                    groups = json.loads(body_bytes)
                    groups["groups"] = [g for g in groups["groups"] if g["name"] != self.hide_group]
                    return web.json_response(groups)
                if seen is not None:
                    self.before_answer(seen)
                return web.Response(status=answer.status, headers=kept, body=body_bytes)
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
                if self.fault(seen) == "cut":
                    request.transport.close()  # type: ignore[union-attr]
                    break
            return response


def parse(request: web.Request) -> Seen | None:
    """A request as RBAC sees it; None for what is no resource, such as discovery."""
    path = request.path
    core, grouped = _CORE.match(path), _GROUP.match(path)
    if core is not None:
        group, rest = "", core[1]
    elif grouped is not None:
        group, rest = grouped[1], grouped[2]
    else:
        return None
    parts = [part for part in rest.split("/") if part]
    if not parts:
        return None
    if parts[0] == "namespaces" and len(parts) > 2:
        parts = parts[2:]
    resource, name, *sub = [*parts, "", ""][: max(2, len(parts))]
    if sub and sub[0]:
        resource = f"{resource}/{sub[0]}"
    query = request.query
    watches = query.get("watch") in ("true", "1")
    verbs: dict[str, str] = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    verb = verbs.get(request.method) or ("watch" if watches else "get" if name else "list")
    return Seen(verb, group, resource, name, bool(query.get("dryRun")))


def rules_of(seen: list[Seen]) -> set[tuple[str, str, str]]:
    """Group, resource and verb of each request; a server-side apply may have to create."""
    return {(entry.group, entry.resource, entry.verb) for entry in seen}


def granted(role: dict[str, Any]) -> set[tuple[str, str, str]]:
    """What a Role or ClusterRole grants."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
