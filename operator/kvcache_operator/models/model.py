# SPDX-License-Identifier: Apache-2.0
"""The model that is served, and where it comes from."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from kvcache_operator.models.base import Part, rules
from kvcache_operator.models.measures import Quantity
from kvcache_operator.models.refs import ObjectName, TokenSecret

MODELS_MOUNT = "/models"
"""Where the volume of `spec.model.volume` is mounted."""

_ONE_VOLUME = "exactly one of claimName and sizeLimit is needed"


def _check_model(name: str) -> str:
    if ".." in name.split("/"):
        raise ValueError(f"{name!r} leads out of its folder; write the path without '..'")
    return name


class ModelVolume(Part):
    """Where models lie: a claim, or a bounded folder of the pod for downloads."""

    model_config = ConfigDict(
        json_schema_extra=rules(("has(self.claimName) != has(self.sizeLimit)", _ONE_VOLUME, ""))
    )

    claim_name: ObjectName | None = None
    """Name of a PersistentVolumeClaim in the resource's namespace. It is mounted at /models: read-only where
    `model.name` is a path below it, otherwise as the folder that downloads are kept in."""
    size_limit: Quantity | None = None
    """Downloads live in the pod, and may take this much of the node's disk."""

    @model_validator(mode="after")
    def _one(self) -> ModelVolume:
        if (self.claim_name is None) == (self.size_limit is None):
            raise ValueError(_ONE_VOLUME)
        return self


class ModelSpec(Part):
    """What is served."""

    name: Annotated[str, AfterValidator(_check_model)] = Field(min_length=1, max_length=256)
    """Name of a model on the Hugging Face Hub, or an absolute path of a folder that holds one."""
    revision: str | None = Field(default=None, min_length=1, max_length=128)
    """Branch, tag or commit on the Hub."""
    served_name: str | None = Field(default=None, min_length=1, max_length=128)
    """Name under which requests ask for the model. Default: `name`."""
    token_secret_ref: TokenSecret | None = None
    """Token for the Hub, mounted as a file: a new one counts from the next start of a pod."""
    volume: ModelVolume | None = None
    """Where models lie; without it downloads live as long as the pod."""

    @property
    def is_path(self) -> bool:
        """Whether the model is a folder, so that nothing is downloaded."""
        return self.name.startswith("/")

    @property
    def claim(self) -> str | None:
        """The claim that holds models."""
        return self.volume.claim_name if self.volume is not None else None
