# SPDX-License-Identifier: Apache-2.0
"""What all configuration models share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """The configuration cannot be used. The text names the field, what was read and what is accepted."""


class Strict(BaseModel):
    """Unknown keys are errors, and nothing changes once it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)
