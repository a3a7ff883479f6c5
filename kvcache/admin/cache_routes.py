# SPDX-License-Identifier: Apache-2.0
"""The routes about what is cached of a prompt, and what is kept."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request
from pydantic import ValidationError

from kvcache.admin.cached import LookupReport, Owner, PinReport, PinRequest, PinsReport, UnpinReport
from kvcache.admin.prefixes import PromptFields, Salt
from kvcache.admin.problems import Problem, documented
from kvcache.admin.service import AdminService


def add(app: FastAPI) -> None:
    """Adds the routes to the app, whose `state.service` is there when it runs."""

    @app.get("/v1/lookup", responses=documented(422))
    async def lookup(
        request: Request,
        tokens: Annotated[str | None, Query(description="Token ids, separated by commas.")] = None,
        prompt: Annotated[str | None, Query(description="Text, instead of token ids.")] = None,
        salt: Salt = "",
    ) -> LookupReport:
        """Which part of a prompt is cached, and in which tier. Nothing is moved by asking."""
        try:
            fields = PromptFields.model_validate({"tokens": _ids(tokens), "prompt": prompt, "salt": salt})
        except ValidationError as error:
            raise Problem(422, "InvalidRequest", f"{error.errors()[0]['msg']}.") from error
        return await _lookup(request, fields)

    @app.post("/v1/lookup", responses=documented(408, 415, 422))
    async def lookup_long(request: Request, body: PromptFields) -> LookupReport:
        """The same for prompts that are too long for an address."""
        return await _lookup(request, body)

    @app.get("/v1/pins")
    async def pins(request: Request) -> PinsReport:
        """What every owner keeps."""
        return await _service(request).cached.pins()

    @app.post("/v1/pin", responses=documented(408, 409, 415, 422))
    async def pin(request: Request, body: PinRequest) -> PinReport:
        """Keeps the chunks of a prefix, those to come included, until its owner lets go or the engine ends.
        They are not evicted, and flushes leave them unless forced."""
        service = _service(request)
        return await service.cached.pin(body.owner, await service.prompts.prefix(body))

    @app.delete("/v1/pin/{owner}", responses=documented(404, 422))
    async def unpin(request: Request, owner: Owner) -> UnpinReport:
        """Lets go of all that an owner keeps."""
        report = await _service(request).cached.unpin(owner)
        if not report.chunks and not report.missing:
            raise Problem(404, "UnknownOwner", f"{owner!r} keeps nothing; GET /v1/pins lists who does.")
        return report


def _service(request: Request) -> AdminService:
    service: AdminService = request.app.state.service
    return service


async def _lookup(request: Request, fields: PromptFields) -> LookupReport:
    service = _service(request)
    return await service.cached.locate(await service.prompts.prefix(fields))


def _ids(text: str | None) -> list[str] | None:
    if text is None:
        return None
    return [part.strip() for part in text.split(",")] if text.strip() else []
