# SPDX-License-Identifier: Apache-2.0
"""The CustomResourceDefinition says what the models say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from kvcache_operator.crd import crd
from kvcache_operator.parse import parse_resource
from kvcache_operator.yaml_text import to_yaml
from tests.operator.resources import ROOT, SAMPLES, SMALLEST, with_value
from tests.operator.test_render import BIG

FILE = ROOT / "manifests" / "crd" / "kvcaches.yaml"
SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def test_the_checked_in_file_is_generated() -> None:
    """`python -m kvcache_operator crd > manifests/crd/kvcaches.yaml` writes it anew."""
    assert FILE.read_text() == to_yaml(crd())


def test_it_is_a_valid_definition() -> None:
    kubernetes_validate.validate(crd(), "1.37", strict=True)


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from nodes(part, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


def test_the_schema_is_structural() -> None:
    """The rules of Kubernetes for structural schemas, as far as they concern what pydantic writes."""
    for path, node in nodes(SCHEMA):
        assert (
            not {"$ref", "$defs", "const", "title", "additionalProperties", "oneOf", "allOf"} & node.keys()
        ), path
        assert ("anyOf" in node) == ("x-kubernetes-int-or-string" in node), path
        assert ("type" in node) != ("x-kubernetes-int-or-string" in node), path
        assert node.get("default", 0) is not None, path


def test_every_field_is_described() -> None:
    assert [
        path for path, node in nodes(SCHEMA) if not node.get("description") and not path.endswith("[]")
    ] == []


def with_defaults(schema: dict[str, Any], value: Any) -> Any:
    """The defaulting of an API server: defaults of absent properties, then of what is inside them."""
    if not isinstance(value, dict):
        return [with_defaults(schema["items"], item) for item in value] if isinstance(value, list) else value
    filled = dict(value)
    for name, part in schema.get("properties", {}).items():
        if name not in filled and "default" in part:
            filled[name] = part["default"]
        if name in filled:
            filled[name] = with_defaults(part, filled[name])
    return filled


@pytest.mark.parametrize("document", [SMALLEST, BIG], ids=["smallest", "big"])
def test_defaults_of_the_schema_are_those_of_the_models(document: dict[str, Any]) -> None:
    defaulted = with_defaults(SCHEMA, document)
    assert parse_resource(defaulted).spec == parse_resource(document).spec
    written = parse_resource(document).spec.model_dump(by_alias=True, mode="json", exclude_none=True)
    assert defaulted["spec"] == written


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_samples_pass_the_schema(sample: Any) -> None:
    document = yaml.safe_load(sample.read_text())
    jsonschema.validate(document, SCHEMA)
    # Strictly: no key that the server would drop.
    for path, node in nodes(SCHEMA["properties"]["spec"]):
        place = document["spec"]
        for key in filter(None, path.split(".")):
            place = place.get(key) if isinstance(place, dict) else None
        if isinstance(place, dict):
            assert place.keys() <= node["properties"].keys(), path


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.replicas", 65),
        ("spec.cache.role", "both"),
        ("spec.cache.tiers.cpu.capacity", "4GB"),
        ("spec.cache.tiers.cpu.capacity", "4"),
        ("spec.engine.startupTimeout", "half an hour"),
        ("spec.model", {}),
    ],
)
def test_what_the_models_refuse_the_server_refuses(path: str, value: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(with_value(SMALLEST, path, value), SCHEMA)
