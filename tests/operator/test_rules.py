# SPDX-License-Identifier: Apache-2.0
"""Every CEL rule of the definition refuses something and lets something near to it pass; what it refuses, the
models or the plan refuse too, for servers that know no rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cel
import pytest

from kvcache_operator.crd import crd
from kvcache_operator.errors import ResourceError
from tests.operator.resources import plan_of
from tests.operator.rules import CHANGES, PAIRS, Pair
from tests.operator.test_crd import with_defaults

SCHEMA: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def broken(schema: dict[str, Any], value: Any, old: Any = None) -> Iterator[str]:
    """Messages of the rules that do not hold for a value, and for its change from an old one."""
    if isinstance(value, list):
        for entry in value:
            yield from broken(schema["items"], entry)
        return
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"] and old is None:
            continue
        if not cel.evaluate(rule["rule"], {"self": value, "oldSelf": old}):
            yield rule["message"]
    if isinstance(value, dict):
        for name, part in schema.get("properties", {}).items():
            if name in value:
                yield from broken(part, value[name], (old or {}).get(name))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_pairs(pair: Pair) -> None:
    good, bad = (with_defaults(SCHEMA, document) for document in (pair.good, pair.bad))
    assert list(broken(SCHEMA, good)) == []
    assert any(pair.message in message for message in broken(SCHEMA, bad))
    plan_of(pair.good)
    with pytest.raises(ResourceError):
        plan_of(pair.bad)


@pytest.mark.parametrize(
    ("name", "before", "good", "bad", "message"), CHANGES, ids=lambda value: str(value)[:30]
)
def test_changes(
    name: str, before: dict[str, Any], good: dict[str, Any], bad: dict[str, Any], message: str
) -> None:
    old, fine, wrong = (with_defaults(SCHEMA, document) for document in (before, good, bad))
    assert list(broken(SCHEMA, fine, old)) == []
    assert any(message in text for text in broken(SCHEMA, wrong, old)), name


def test_every_rule_is_among_them() -> None:
    def rules(schema: dict[str, Any]) -> Iterator[str]:
        for rule in schema.get("x-kubernetes-validations", ()):
            yield rule["message"]
        for part in schema.get("properties", {}).values():
            yield from rules(part)
        if isinstance(schema.get("items"), dict):
            yield from rules(schema["items"])

    tested = [pair.message for pair in PAIRS] + [change[4] for change in CHANGES]
    for message in set(rules(SCHEMA)):
        assert any(part in message for part in tested), message


def test_every_field_path_exists() -> None:
    def check(schema: dict[str, Any]) -> None:
        for rule in schema.get("x-kubernetes-validations", ()):
            node = schema
            for part in rule.get("fieldPath", "").split(".")[1:]:
                node = node["properties"][part]
        for part in schema.get("properties", {}).values():
            check(part)
        if isinstance(schema.get("items"), dict):
            check(schema["items"])

    check(SCHEMA)
