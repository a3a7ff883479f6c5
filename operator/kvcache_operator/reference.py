# SPDX-License-Identifier: Apache-2.0
"""docs/resource.md: every field of the resource, from the same schema that the API server holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvcache_operator.crd import crd

_HEAD = """# The KVCache resource

Every field of `kvcache.dev/v1alpha1`, as `kubectl explain kvc --recursive` shows them too. This page is made
from the definition by `make manifests`.

Sizes are Kubernetes quantities and need a unit (`32Gi`); a bare number of nine digits or more is bytes.
Durations are hours, minutes and seconds (`1h30m`). Sizes of tiers are those of one replica: its ranks share
them, and `status.budget` shows what they come to. A field without a default may be left out.
"""
_RULES = """
## Rules

What the API server refuses beyond the types, with the sentence that it answers. Servers before 1.25 know no
such rules: there the operator says the same in the condition `Accepted`.

"""


def reference() -> str:
    """The page as Markdown."""
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    parts = [_HEAD]
    for name, title in (("spec", "Spec"), ("status", "Status")):
        parts.append(f"\n## {title}\n\n| field | type | default | meaning |\n|---|---|---|---|\n")
        parts += [f"| {row} |\n" for row in _rows(schema[name], name)]
    parts.append(_RULES)
    parts += sorted(set(_rules(schema["spec"], "spec")))
    return "".join(parts)


def _rows(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    required = schema.get("required", ())
    for name, part in schema.get("properties", {}).items():
        where = f"{path}.{name}"
        default = _default(part, name in required)
        text = _escaped(part.get("description", ""))
        yield f"`{where}` | {_kind(part)} | {default} | {text}"
        below = part.get("items", part)
        yield from _rows(below, f"{where}[]" if "items" in part else where)


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return _escaped(", ".join(str(value) for value in schema["enum"]))
    if "x-kubernetes-int-or-string" in schema:
        return "quantity"
    if "additionalProperties" in schema:
        return "map"
    kind = str(schema.get("type", "any"))
    bounds = [str(schema[key]) if key in schema else "" for key in ("minimum", "maximum")]
    if any(bounds):
        return f"{kind} {bounds[0]}..{bounds[1]}"
    return f"list of {_kind(schema['items'])}" if kind == "array" else kind


def _default(schema: Mapping[str, Any], required: bool) -> str:
    if required:
        return "required"
    default = schema.get("default")
    if default is None or isinstance(default, dict):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else _text(default)}`"


def _text(value: Any) -> str:
    return ", ".join(str(entry) for entry in value) if isinstance(value, list) else str(value)


def _rules(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield f"- `{path}{rule.get('fieldPath', '')}`: {rule['message']}\n"
    for name, part in schema.get("properties", {}).items():
        yield from _rules(part, f"{path}.{name}")
    if isinstance(schema.get("items"), dict):
        yield from _rules(schema["items"], f"{path}[]")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
