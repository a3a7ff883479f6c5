# SPDX-License-Identifier: Apache-2.0
"""The CustomResourceDefinition, generated from the models, so that there is one description of the resource.

pydantic writes JSON Schema; Kubernetes takes the structural subset of it: no references, no `const`, no
`title`, `nullable` in place of a union with null, and no `additionalProperties: false` beside `properties`
(unknown keys are pruned or refused by the server itself).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcache_operator import GROUP, KIND, PLURAL, VERSION
from kvcache_operator.models import MAX_NAME, KVCacheSpec, Status
from kvcache_operator.models.base import rules

_COLUMNS = (
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 0),
    ("Desired", "integer", ".spec.replicas", 0),
    ("Up", "integer", ".status.readyReplicas", 0),
    ("Hit%", "string", ".status.cache.hitRate", 0),
    ("Model", "string", ".spec.model.name", 1),
    ("Image", "string", ".status.image", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
"""Name, type, path and priority; columns of priority 1 show with `-o wide`."""

_DROPPED = ("title", "const", "additionalProperties", "propertyNames", "$defs")


def crd() -> dict[str, Any]:
    """The definition of KVCache as a Kubernetes object."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["kvc"],
                "categories": ["inference", "kvcache"],
            },
            "versions": [_version()],
        },
    }


def _version() -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "description": "A model served by vLLM with a cache of keys and values.",
        "required": ["spec"],
        **rules(
            (
                f"self.metadata.name.size() <= {MAX_NAME} && self.metadata.name.matches('^[a-z][-a-z0-9]*$')",
                f"the name is also that of a Service: at most {MAX_NAME} lower-case letters, digits and "
                "dashes, a letter first",
                "",
            )
        ),
        "properties": {
            "spec": structural(KVCacheSpec.model_json_schema()),
            "status": structural(Status.model_json_schema()),
        },
    }
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "priority": priority}
            for name, kind, path, priority in _COLUMNS
        ],
    }


def structural(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON Schema of pydantic as a structural schema of Kubernetes."""
    return _node(schema, schema.get("$defs", {}))


def _node(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    node = dict(schema)
    reference = node.pop("$ref", None)
    if reference is not None:
        # A field's own description and default stand beside its reference and win over those of its type.
        node = {**definitions[reference.rpartition("/")[2]], **node}
    alternatives = [part for part in node.get("anyOf", ()) if part != {"type": "null"}]
    if "x-kubernetes-int-or-string" not in node and alternatives:
        # `X | None`: a field that may be left out, which is what absence from `required` says.
        del node["anyOf"]
        return _node({**alternatives[0], **node}, definitions)
    kept = {key: value for key, value in node.items() if key not in _DROPPED}
    if isinstance(node.get("additionalProperties"), dict):
        # A map; `additionalProperties` of the other kind only says that keys are closed.
        kept["additionalProperties"] = _node(node["additionalProperties"], definitions)
        if "maxLength" in kept:
            kept["maxProperties"] = kept.pop("maxLength")
    # Null is absence, an empty text as a default is taken for null by older servers, and an empty list or map
    # says no more than absence and makes `kubectl get -o yaml` long.
    if kept.get("default", 0) in (None, "", []) or (
        kept.get("default", 0) == {} and "properties" not in kept
    ):
        del kept["default"]
    if "const" in node:
        kept["enum"] = [node["const"]]
    if "description" in kept:
        kept["description"] = " ".join(kept["description"].split())
    if "properties" in kept:
        kept["properties"] = {name: _node(part, definitions) for name, part in kept["properties"].items()}
        if "default" in kept:
            kept["default"] = _written(kept["default"], kept)
    if "items" in kept:
        kept["items"] = _node(kept["items"], definitions)
    return kept


def _written(default: Any, schema: Mapping[str, Any]) -> Any:
    """A default without what is absence anyway. It is whole otherwise: rules see it as it stands here."""
    if not isinstance(default, Mapping) or "properties" not in schema:
        return default
    parts = schema["properties"]
    return {
        name: _written(value, parts[name])
        for name, value in default.items()
        if not (value in (None, "", []) or (value == {} and "properties" not in parts[name]))
    }
