# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document: what is checked in, and a fuzzer that holds the running admin to it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode

from kvcache.admin import page_routes
from kvcache.admin.app import OPEN_PATHS, create_app
from kvcache.admin.openapi import text
from kvcache.admin.service import Settings
from tests.admin.conftest import AUTH, Admin, Serve
from tests.admin.sidecar import sidecar
from tests.control.processes import Process, rank_stats, scheduler_stats

CHECKS = [
    getattr(schemathesis.checks, name)
    for name in ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
]
DESCRIBED_503 = {(503, "NotReady"), (503, "NoRanks"), (503, "NoTokenizer")}
CHECKED_IN = Path(__file__).parents[2] / "docs" / "openapi.json"
DOCUMENT = json.loads(text())


def test_what_is_checked_in_is_what_is_served() -> None:
    assert CHECKED_IN.read_text(encoding="utf-8") == text(), (
        "run: .venv/bin/python -m kvcache.admin.openapi > docs/openapi.json"
    )


@pytest.mark.anyio
async def test_it_is_served_to_whoever_has_the_token(admin: Admin) -> None:
    async with admin() as client:
        assert (await client.get("/v1/openapi.json", headers=AUTH)).json() == DOCUMENT


def test_every_route_is_in_it() -> None:
    app = create_app(Settings(runtime_dir="/run/kvcache"))
    routes = {
        (route.path, method.lower())
        for route in app.routes
        if isinstance(route, APIRoute) and route.path not in page_routes.PATHS
        for method in route.methods
    }
    described = {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == routes


def test_exactly_the_open_routes_need_no_token() -> None:
    assert DOCUMENT["security"] == [{"bearer": []}]
    without = {
        path
        for path, methods in DOCUMENT["paths"].items()
        for how in methods.values()
        if how.get("security") == []
    }
    assert without == set(OPEN_PATHS)


def test_every_route_says_what_it_does_and_how_it_fails() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            assert operation["description"].endswith(".")
            failures = {status: how for status, how in operation["responses"].items() if status >= "400"}
            assert path in OPEN_PATHS or "401" in failures
            for how in failures.values():
                assert set(how["content"]) == {"application/problem+json"}


@pytest.fixture
def api(serve: Serve, socket_dir: Path, token_file: Path) -> Iterator[Any]:
    """The running admin, as the fuzzer knows it."""
    serve("scheduler", Process(scheduler_stats()))
    serve("rank0", Process(rank_stats(0)))
    with sidecar(socket_dir, token_file) as url:
        yield schemathesis.openapi.from_url(f"{url}/v1/openapi.json", headers=AUTH)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_a_fuzzer_finds_no_failure_inside_and_no_answer_that_is_not_described(
    api: Any, mode: GenerationMode
) -> None:
    """What fits the document, and what does not."""
    operations = [result.ok() for result in api.get_all_operations()]
    assert {(operation.path, operation.method) for operation in operations} == {
        (path, method) for path, methods in DOCUMENT["paths"].items() for method in methods
    }
    statuses: Counter[int] = Counter()
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not (operation.body or operation.path_parameters):
            continue  # there is nothing to get wrong

        @settings(max_examples=60, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def holds(case: Any) -> None:
            answer = case.call(headers=AUTH)
            statuses[answer.status_code] += 1
            if answer.status_code >= 500:
                assert (answer.status_code, answer.json()["code"]) in DESCRIBED_503
            case.validate_response(answer, checks=CHECKS)

        holds()
    assert statuses[422 if mode is GenerationMode.NEGATIVE else 200] > 10
