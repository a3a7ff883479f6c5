# SPDX-License-Identifier: Apache-2.0
"""From YAML or an API object to a KVCache, or to sentences that say what is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvcache_operator import KIND
from kvcache_operator.errors import Problem, ResourceError
from kvcache_operator.models import KVCache

Location = tuple[int | str, ...]
"""Keys and indices from the top of a document to a value."""

_LIKENESS = 0.6
"""difflib's ratio from which an unknown key is taken for a misspelt known one."""

NOT_OFFERED = {
    "spec.cache.blend": (
        "is not offered: vLLM's connector interface cannot have chosen tokens inside of a prompt computed "
        "anew, and without that joined pieces give other answers; remove it: prompts share what they begin "
        "with"
    ),
}
"""Keys that resources of this kind are known to have elsewhere, and why there is none here."""

_TYPE_NAMES = {
    "int_type": "a whole number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "mapping_type": "a mapping of keys to values",
}


def parse_resource(document: Mapping[str, Any], lines: Mapping[Location, int] | None = None) -> KVCache:
    """The resource in an API object or a YAML document.

    Args:
        document: The object as Kubernetes has it.
        lines: Line of each key of the YAML file, where there is one.

    Raises:
        ResourceError: with one problem for each field that does not fit.
    """
    try:
        # Strict models take mappings only as dicts; kopf's bodies are views.
        return KVCache.model_validate(dict(document))
    except ValidationError as error:
        problems = [_problem(details, lines or {}) for details in error.errors()]
        raise ResourceError(problems) from error


def parse_file(path: Path) -> KVCache:
    """The one KVCache of a YAML file, which may hold other kinds of objects too.

    Raises:
        ResourceError: the file cannot be read, is no YAML, holds not exactly one KVCache, or one that does
        not fit.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ResourceError.at("", f"{path} cannot be read ({reason}); name a readable YAML file") from error
    try:
        documents = [node for node in yaml.compose_all(text, yaml.SafeLoader) if node is not None]
        lines = [dict(_lines(node, ())) for node in documents]
        values = [value for value in yaml.safe_load_all(text) if value is not None]
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        what = getattr(error, "problem", None) or f"no YAML that can be read ({type(error).__name__})"
        raise ResourceError.at("", f"{path}{place}: {what}; correct the YAML") from error
    found = [
        (value, marks)
        for value, marks in zip(values, lines, strict=True)
        if isinstance(value, dict) and (value.get("kind") == KIND or len(values) == 1)
    ]
    if len(found) != 1:
        raise ResourceError.at("", f"{path} holds {len(found)} resources of kind {KIND}; write exactly one")
    return parse_resource(*found[0])


def _lines(node: yaml.Node, at: Location) -> Iterator[tuple[Location, int]]:
    """The line of each key; raises YAMLError where a mapping has a key twice, since YAML would drop one."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
            yield (*at, key.value), key.start_mark.line + 1
            yield from _lines(value, (*at, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*at, index), value.start_mark.line + 1
            yield from _lines(value, (*at, index))


def dotted(location: Sequence[int | str]) -> str:
    """`spec.engine.env[0].name` of a location."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _problem(details: ErrorDetails, lines: Mapping[Location, int]) -> Problem:
    location = details["loc"]
    line = next(
        (lines[location[:end]] for end in range(len(location), 0, -1) if location[:end] in lines), None
    )
    return Problem(dotted(location), _sentence(details), line)


def _sentence(details: ErrorDetails) -> str:
    kind, read, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(details["loc"])
    if kind == "missing":
        return "is required but absent; write it"
    if kind == "value_error":
        return str(context["error"])
    if kind in ("literal_error", "enum"):
        accepted = str(context["expected"]).replace("'", "")
        return f"{read!r} is not known; write {accepted}"
    if kind in _TYPE_NAMES:
        return f"{read!r} is not {_TYPE_NAMES[kind]}; write one"
    if kind == "greater_than_equal":
        return f"{read!r} is too small; write {context['ge']} or more"
    if kind == "less_than_equal":
        return f"{read!r} is too large; write {context['le']} or less"
    if kind == "string_too_short":
        return "is empty; write at least one character"
    if kind in ("string_too_long", "too_long"):
        unit = "items" if kind == "too_long" else "characters"
        return f"is too long; write at most {context['max_length']} {unit}"
    return f"{details['msg']}, got {read!r}; correct it"


def _unknown_key(location: Location) -> str:
    if (reason := NOT_OFFERED.get(dotted(location))) is not None:
        return reason
    *parents, key = (part for part in location if isinstance(part, str))
    siblings = _keys_at(KVCache, parents)
    near = difflib.get_close_matches(key, siblings, n=1, cutoff=_LIKENESS)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    # A known key in the wrong place is as frequent a slip as a misspelt one.
    elsewhere = [path for path in field_paths(KVCache) if path.rpartition(".")[2] == key]
    if elsewhere:
        return f"unknown key here; it belongs at {elsewhere[0]}"
    return f"unknown key; the known ones here are {', '.join(siblings)}"


def _keys_at(model: type[BaseModel], parents: Sequence[str]) -> list[str]:
    for parent in parents:
        below = next((part for key, part in _parts(model) if key == parent), None)
        if below is None:
            return []
        model = below
    return [field.alias or name for name, field in model.model_fields.items()]


def _parts(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel] | None]]:
    for name, field in model.model_fields.items():
        yield field.alias or name, model_in(field.annotation)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that an annotation such as `X`, `X | None` or `tuple[X, ...]` holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in getattr(annotation, "__args__", ()) if (found := model_in(part))), None)


def field_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted path of every field below `model`, parents before children; lists are passed through."""
    for key, below in _parts(model):
        yield f"{prefix}{key}"
        if below is not None:
            yield from field_paths(below, f"{prefix}{key}.")
