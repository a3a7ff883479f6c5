# SPDX-License-Identifier: Apache-2.0
"""What all parts of a resource have in common."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

LIST_MAP_BY_NAME: Any = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
"""A list whose items have different names: the server merges by name and refuses doubles."""
PRESERVED: Any = {"x-kubernetes-preserve-unknown-fields": True}
"""An object whose keys the schema does not name."""


class Part(BaseModel):
    """A mapping of a resource: strict types, no unknown keys, camelCase as in Kubernetes; never changed once
    read.

    The docstring below each field is its description in the CustomResourceDefinition.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, alias_generator=to_camel, use_attribute_docstrings=True
    )


def rules(*entries: tuple[str, str, str]) -> dict[str, Any]:
    """CEL rules of a model for its `json_schema_extra`: expression, message and field path (or empty).

    The API server checks them where it is new enough; the models or the plan check the same, for all others.
    """
    return {
        "x-kubernetes-validations": [
            {"rule": rule, "message": message, **({"fieldPath": path} if path else {})}
            for rule, message, path in entries
        ]
    }


@dataclass(frozen=True)
class Matching:
    """A text that matches a pattern, with a sentence of its own where it does not."""

    pattern: str
    """Regular expression of RE2's subset, anchored."""
    hint: str
    """What to write instead, as the end of the sentence."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(text: str) -> str:
            if not re.fullmatch(self.pattern, text):
                raise ValueError(f"{text!r} does not fit; {self.hint}")
            return text

        return core_schema.no_info_after_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(schema) | {"pattern": self.pattern}
