# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document of the admin (`python -m kvcache.admin.openapi`), checked in as docs/openapi.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvcache.admin.problems import ProblemReport

DESCRIPTION = (
    "Statistics, readiness, configuration and flushes of one vLLM with its KV cache. `/healthz`, `/readyz`"
    " and `/metrics` are open; every other route asks for the token of the resource as a bearer token."
    " Errors are problem details (RFC 9457); what a program should branch on is their member `code`."
)
_BEARER = {"bearer": {"type": "http", "scheme": "bearer", "description": "The admin token of the resource."}}


def install(app: FastAPI, open_paths: Collection[str]) -> None:
    """Has the app describe itself, open routes without the token."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, open_paths)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def text() -> str:
    """The document as it is checked in."""
    from kvcache.admin.app import create_app
    from kvcache.admin.service import Settings

    return json.dumps(create_app(Settings(runtime_dir="/run/kvcache")).openapi(), indent=2) + "\n"


def _document(app: FastAPI, open_paths: Collection[str]) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes)
    document["components"]["securitySchemes"] = _BEARER
    document["security"] = [{"bearer": []}]
    schemas = document["components"]["schemas"]
    schemas[ProblemReport.__name__] = ProblemReport.model_json_schema()
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if "/HTTPValidationError" in str(operation["responses"].get("422")):
                # Added by the framework for every parameter; a text in the path is always valid.
                del operation["responses"]["422"]
            if path in open_paths:
                operation["security"] = []
                operation["responses"].pop("401", None)
    return document


if __name__ == "__main__":
    sys.stdout.write(text())
