# SPDX-License-Identifier: Apache-2.0
"""References to other objects of the resource's namespace."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from kvcache_operator.models.base import Matching, Part, rules

ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Matching(
        r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$",
        "write the name of an object: lower-case letters, digits, dashes and dots",
    ),
]
"""Name of a Secret, a claim or another object."""
DataKey = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Matching(r"^[-._a-zA-Z0-9]+$", "write a key: letters, digits, dashes, dots and underscores"),
]
"""Key in the data of a Secret or ConfigMap."""


class SecretKey(Part):
    """One key of a Secret."""

    name: ObjectName
    """Name of the Secret in the resource's namespace."""
    key: DataKey
    """Key in the Secret."""


class TokenSecret(SecretKey):
    """A key with a token."""

    key: DataKey = "token"
    """Key in the Secret."""


class PasswordSecret(SecretKey):
    """A key with a password."""

    key: DataKey = "password"
    """Key in the Secret."""


class CredentialsSecret(SecretKey):
    """A key with a credentials file."""

    key: DataKey = "credentials"
    """Key in the Secret."""


class AuthoritySecret(SecretKey):
    """A key with certificates of authorities."""

    key: DataKey = "ca.crt"
    """Key in the Secret, PEM."""


class SecretName(Part):
    """A whole Secret."""

    name: ObjectName
    """Name of the Secret in the resource's namespace."""


class ConfigMapKey(Part):
    """One key of a ConfigMap."""

    name: ObjectName
    """Name of the ConfigMap in the resource's namespace."""
    key: DataKey
    """Key in the ConfigMap."""


class PodField(Part):
    """A field of the pod itself."""

    field_path: str = Field(min_length=1, max_length=253)
    """Path of the field, such as status.podIP."""


class EnvSource(Part):
    """Where a value comes from that does not stand in the resource: exactly one of the three."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)]"
                ".filter(x, x).size() == 1",
                "exactly one of secretKeyRef, configMapKeyRef and fieldRef is needed",
                "",
            )
        )
    )

    secret_key_ref: SecretKey | None = None
    """A key of a Secret."""
    config_map_key_ref: ConfigMapKey | None = None
    """A key of a ConfigMap."""
    field_ref: PodField | None = None
    """A field of the pod."""

    @model_validator(mode="after")
    def _one(self) -> EnvSource:
        given = [ref for ref in (self.secret_key_ref, self.config_map_key_ref, self.field_ref) if ref]
        if len(given) != 1:
            raise ValueError("exactly one of secretKeyRef, configMapKeyRef and fieldRef is needed")
        return self
