# SPDX-License-Identifier: Apache-2.0
"""What all parts of a resource have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Part(BaseModel):
    """A mapping of a resource: strict types, no unknown keys, camelCase as in Kubernetes; never changed once
    read.

    The docstring below each field is its description in the CustomResourceDefinition.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, alias_generator=to_camel, use_attribute_docstrings=True
    )
