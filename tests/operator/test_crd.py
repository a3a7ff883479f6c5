# SPDX-License-Identifier: Apache-2.0
"""The CustomResourceDefinition says what the models say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from kvcache_operator.crd import crd
from kvcache_operator.parse import parse_resource
from kvcache_operator.yaml_text import to_yaml
from tests.operator.full import FULL
from tests.operator.resources import ROOT, SAMPLES, SMALLEST, with_value

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
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}[]")


def test_the_schema_is_structural() -> None:
    """The rules of Kubernetes for structural schemas, as far as they concern what pydantic writes."""
    for path, node in nodes(SCHEMA):
        assert not {"$ref", "$defs", "const", "title", "propertyNames", "oneOf", "allOf"} & node.keys(), path
        assert not ("properties" in node and "additionalProperties" in node), path
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


def without_absence(value: Any) -> Any:
    """Without nulls, and without empty lists and maps, which say no more than absence."""
    if isinstance(value, list):
        return [without_absence(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    kept = {key: without_absence(entry) for key, entry in value.items()}
    return {key: entry for key, entry in kept.items() if entry not in (None, [], {})}


@pytest.mark.parametrize("document", [SMALLEST, *FULL], ids=lambda document: document["metadata"]["name"])
def test_defaults_of_the_schema_are_those_of_the_models(document: dict[str, Any]) -> None:
    defaulted = with_defaults(SCHEMA, document)
    assert parse_resource(defaulted).spec == parse_resource(document).spec
    written = parse_resource(document).spec.model_dump(by_alias=True, mode="json", exclude_none=True)
    assert without_absence(defaulted["spec"]) == without_absence(written)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_samples_pass_the_schema(sample: Any) -> None:
    document = yaml.safe_load(sample.read_text())
    jsonschema.validate(document, SCHEMA)
    # Strictly: no key that the server would drop.
    for path, node in nodes(SCHEMA["properties"]["spec"]):
        place = document["spec"]
        for key in filter(None, path.split(".")):
            place = place.get(key) if isinstance(place, dict) else None
        if isinstance(place, dict) and "x-kubernetes-preserve-unknown-fields" not in node:
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


def test_every_text_list_and_map_has_a_bound() -> None:
    """Otherwise the cost of rules cannot be bounded, and one resource could fill etcd."""
    for path, node in nodes(SCHEMA["properties"]["spec"]):
        kind = node.get("type")
        if kind == "string" and "enum" not in node:
            assert "maxLength" in node, path
        if kind == "array":
            assert "maxItems" in node, path
        if kind == "object" and "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_it_fits_into_the_annotation_of_kubectl_apply() -> None:
    assert len(json.dumps(crd())) < 200 << 10
