# SPDX-License-Identifier: Apache-2.0
"""Errors as RFC 9457 problem details (`application/problem+json`).

`type` is `about:blank`; what a program should branch on is the extension member `code`, in CamelCase.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

logger = logging.getLogger(__name__)

_JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)

MEDIA_TYPE = "application/problem+json"


class Problem(Exception):  # noqa: N818 (RFC 9457's word)
    """A request that is answered by problem details.

    Args:
        status: the HTTP status.
        code: what is wrong, in CamelCase.
        detail: what was read, what is wrong, what to do.
        headers: sent along.
        members: extension members.
    """

    def __init__(
        self, status: int, code: str, detail: str, headers: Mapping[str, str] | None = None, **members: object
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.headers = headers
        self.members = members

    def response(self) -> JSONResponse:
        content: dict[str, Any] = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            **self.members,
        }
        return JSONResponse(content, self.status, self.headers, media_type=MEDIA_TYPE)


class ProblemReport(BaseModel):
    """RFC 9457 problem details."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    code: Annotated[str, Field(description="What is wrong, in CamelCase, for programs.")]
    detail: Annotated[str, Field(description="What was read, what is wrong, what to do.")]


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """These errors as a route's `responses` in the OpenAPI document."""
    schema = {"$ref": f"#/components/schemas/{ProblemReport.__name__}"}
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": schema}},
        }
        for status in statuses
    }


def install(app: FastAPI) -> None:
    """Has the app answer every error as problem details."""

    @app.exception_handler(Problem)
    async def problem(_: Request, error: Problem) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == HTTPStatus.BAD_REQUEST:
            # The framework's word for a body whose bytes are no text.
            errors = [{"field": "body", "problem": "no UTF-8; send JSON in UTF-8"}]
            return Problem(
                422, "InvalidRequest", "body: no UTF-8; send JSON in UTF-8", errors=errors
            ).response()
        code = HTTPStatus(error.status_code).phrase.title().replace(" ", "").replace("-", "")
        detail = f"{request.method} {request.url.path}: {error.detail}"
        return Problem(error.status_code, code, detail, error.headers).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        media_type = request.headers.get("content-type", "")
        if request.method == "POST" and not _JSON.match(media_type):
            detail = f"Content-Type {media_type!r} was read; send the body as application/json."
            return Problem(415, "UnsupportedMediaType", detail).response()
        errors = [_invalid_field(item) for item in error.errors()]
        detail = "; ".join(f"{item['field']}: {item['problem']}" for item in errors)
        return Problem(422, "InvalidRequest", detail, errors=errors).response()

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return Problem(500, "InternalError", "The admin failed on this request; its log says why.").response()


def _invalid_field(item: Mapping[str, Any]) -> dict[str, str]:
    """Which field is wrong, and how, in one error of pydantic's."""
    if item["type"] == "json_invalid":
        # Its place holds the byte, not a field.
        at, why = item["loc"][-1], item.get("ctx", {}).get("error", item["msg"])
        return {"field": "body", "problem": f"no JSON at byte {at} ({why})"}
    field = ".".join(str(part) for part in item["loc"] if part != "body")
    return {"field": field or "body", "problem": item["msg"]}
